"""A plan's folder: damage is found before anything is unpickled, and what does not load is compiled from StableHLO."""

import errno
import hashlib
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from precast.kernels_pallas.targets import Target
from precast.runtime import compiling, files, manifest, weight_cache
from precast.runtime import plan as plans
from precast.runtime.config import EngineConfig
from precast.runtime.manifest import PlanError
from precast.runtime.programs import Program


def double(x):
    return {"twice": x["x"] * 2 + 1}


PROGRAM = Program("double", double, ({"x": jax.ShapeDtypeStruct((4,), np.float32)},), None)
ARGUMENT = {"x": np.arange(4, dtype=np.float32)}
FACTS = {"target": "cpu", "settings": manifest.settings_of(EngineConfig())}


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "plan"
    with files.replacing_folder(path) as folder:
        entries = compiling.compile_programs([PROGRAM], folder, Target("cpu"), progress=False)
        manifest.seal(folder, {"facts": FACTS, "shapes": {}, "memory": {}, "programs": entries})
    return path


@pytest.fixture
def folder(made, tmp_path):
    return pathlib.Path(shutil.copytree(made, tmp_path / "plan"))


@pytest.fixture
def no_trial(monkeypatch):
    """No executable loads."""
    monkeypatch.setattr(plans.trial, "run", lambda *_: "it is another's")


def load(folder, **options):
    return plans.load(manifest.read(folder), first=[], mesh=lambda: None, **options)


def works(plan):
    result = plan.programs["double"](ARGUMENT)
    return result["twice"].tolist() == [1, 3, 5, 7]


class Compiles:
    """Compilations and traces inside a block."""

    def __enter__(self):
        self._counter = plans.CompileCounter()
        return self

    def __exit__(self, *_):
        self.compiles, self.traces = self._counter.count, self._counter.traces


def test_a_plan_is_tried_once_and_then_loads_without_compiling(folder, monkeypatch):
    assert works(load(folder))
    monkeypatch.setattr(plans.trial, "run", lambda *_: pytest.fail("tried again"))
    with Compiles() as counted:
        assert works(load(folder))
    assert (counted.compiles, counted.traces) == (0, 0)


def test_another_kind_of_host_tries_for_itself(folder, monkeypatch):
    assert works(load(folder))
    monkeypatch.setattr(manifest, "host_kind", lambda: "another")
    tried = []
    monkeypatch.setattr(plans.trial, "run", lambda *_: tried.append(1))
    assert works(load(folder))
    assert tried == [1]


def test_what_the_manifest_says(made):
    sealed = manifest.read(made)
    entry = sealed.manifest["programs"]["double"]
    assert entry["argument_bytes"] == entry["output_bytes"] == 16
    assert entry["alias_bytes"] == 0 and entry["collectives"] == entry["custom_calls"] == {}
    assert entry["bytes_accessed"] == 32 and entry["compile_seconds"] > 0
    assert set(sealed.contents) == {"executables/double.bin", "exported/double.bin", "trees.pickle"}


def test_the_stablehlo_can_be_read_without_us(made):
    exported = jax.export.deserialize(bytearray((made / "exported/double.bin").read_bytes()))
    assert exported.call(ARGUMENT["x"])[0].tolist() == [1, 3, 5, 7]


def replace_executable(folder, content):
    """A plan that is whole, but for an executable that is not for this host."""
    (folder / "executables/double.bin").write_bytes(content)
    about = json.loads((folder / "manifest.json").read_bytes())
    for file in ("manifest.json", "manifest.sha256"):
        (folder / file).unlink()
    manifest.seal(folder, about)


FOREIGN = {"truncated": None, "garbage": b"\x80\x04garbage", "killing": b"cos\nabort\n(tR."}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_executable_is_replaced_by_one_compiled_here(folder, made, kind, monkeypatch):
    whole = (made / "executables/double.bin").read_bytes()
    replace_executable(folder, whole[: len(whole) // 2] if kind == "truncated" else FOREIGN[kind])
    digest = manifest.read(folder).sha256
    with Compiles() as counted:
        assert works(load(folder))
    assert counted.compiles == 1
    assert manifest.read(folder).sha256 == digest
    monkeypatch.setattr(plans.trial, "run", lambda *_: pytest.fail("tried again"))
    with Compiles() as counted:
        assert works(load(folder))
    assert (counted.compiles, counted.traces) == (0, 0)


def test_an_executable_of_another_number_of_devices_is_replaced(folder):
    code = (
        "import jax, pickle, sys; jax.config.update('jax_num_cpu_devices', 2)\n"
        "from jax.experimental import serialize_executable\n"
        "mesh = jax.make_mesh((2,), ('x',)); s = jax.NamedSharding(mesh, jax.P('x'))\n"
        "arg = jax.ShapeDtypeStruct((4,), 'float32', sharding=s)\n"
        "compiled = jax.jit(lambda x: x * 2 + 1).lower(arg).compile()\n"
        "open(sys.argv[1], 'wb').write(serialize_executable.serialize(compiled)[0])\n"
    )
    foreign = folder.with_name("foreign")
    subprocess.run([sys.executable, "-c", code, str(foreign)], check=True)
    replace_executable(folder, foreign.read_bytes())
    assert works(load(folder))
    assert (folder / "local/executables/double.bin").exists()


def test_a_pinned_plan_believes_no_local_executables(folder, no_trial):
    assert works(load(folder))
    assert (folder / "local").exists()
    local = (folder / "local/manifest.json").stat()
    with Compiles() as counted:
        assert works(load(folder, pinned=True))
    assert counted.compiles == 1
    assert (folder / "local/manifest.json").stat() == local


def test_damaged_local_executables_are_made_again(folder, no_trial):
    load(folder)
    flip(folder / "local/executables/double.bin")
    assert works(load(folder))
    with Compiles() as counted:
        assert works(load(folder))
    assert counted.compiles == 0


def test_a_damaged_note_only_means_another_try(folder, monkeypatch):
    tried = []
    monkeypatch.setattr(plans.trial, "run", lambda *_: tried.append(1))
    for content in (b"", b"[1]", b'{"a": 1}', b"\xff"):
        (folder / "seen.json").write_bytes(content)
        assert works(load(folder))
    assert len(tried) == 4


def test_a_plan_that_cannot_be_written_compiles_at_each_start(folder, no_trial, monkeypatch):
    replacing = files.replacing_folder

    def full(path):
        if path.parent == folder:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replacing(path)

    monkeypatch.setattr(files, "replacing_folder", full)
    for _ in range(2):
        with Compiles() as counted:
            assert works(load(folder))
        assert counted.compiles == 1
    assert not (folder / "local").exists()


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def reseal(folder, **changes):
    about = json.loads((folder / "manifest.json").read_bytes()) | changes
    content = json.dumps(about).encode()
    (folder / "manifest.json").write_bytes(content)
    (folder / "manifest.sha256").write_text(hashlib.sha256(content).hexdigest())


DAMAGE = {
    "no folder": (shutil.rmtree, "manifest.json cannot be read"),
    "half written": (lambda f: (f / "manifest.json").unlink(), "manifest.json cannot be read"),
    "no digest": (lambda f: (f / "manifest.sha256").unlink(), "manifest.sha256 cannot be read"),
    "manifest flipped": (lambda f: flip(f / "manifest.json"), "manifest.json is damaged"),
    "manifest truncated": (lambda f: (f / "manifest.json").write_bytes(b'{"format"'), "manifest.json is damaged"),
    "digest flipped": (lambda f: flip(f / "manifest.sha256"), "manifest.json is damaged"),
    "not a plan": (lambda f: reseal(f, files=[1]), "manifest.json is not a plan's"),
    "other format": (lambda f: reseal(f, format=0), "format is 0: this version reads 1"),
    "flipped": (lambda f: flip(f / "executables/double.bin"), "double.bin is damaged: its digest is"),
    "truncated": (lambda f: os.truncate(f / "executables/double.bin", 9), "double.bin is damaged"),
    "emptied": (lambda f: (f / "trees.pickle").write_bytes(b""), "trees.pickle is damaged"),
    "missing": (lambda f: (f / "exported/double.bin").unlink(), "exported/double.bin cannot be read"),
    "a folder in its place": (
        lambda f: ((f / "exported/double.bin").unlink(), (f / "exported/double.bin").mkdir()),
        "exported/double.bin cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_before_anything_is_unpickled(folder, damage, monkeypatch):
    monkeypatch.setattr(pickle, "loads", lambda _: pytest.fail("unpickled"))
    spoil, message = DAMAGE[damage]
    spoil(folder)
    with pytest.raises(PlanError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_a_pinned_digest_is_the_manifests(folder):
    digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    assert manifest.read(folder, pinned=digest.upper()).sha256 == digest
    with pytest.raises(PlanError, match=f"plan_sha256 is {'0' * 64}: the digest of its manifest.json is {digest}"):
        manifest.read(folder, pinned="0" * 64)


def test_nothing_is_left_of_a_folder_that_was_not_finished(tmp_path):
    path = tmp_path / "plan"
    with pytest.raises(RuntimeError), files.replacing_folder(path) as folder:
        (folder / "a").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    # Left by a process that was killed.
    (tmp_path / ".plan.0.99999999").mkdir()
    for content in ("first", "second"):
        with files.replacing_folder(path) as folder:
            (folder / "a").write_text(content)
    assert [file.name for file in tmp_path.iterdir()] == ["plan"]
    assert (path / "a").read_text() == "second"


def test_differences_name_the_field_and_both_values():
    plan = {"jax": "1", "model": {"num_layers": 2, "name": "a"}, "cpu": {"features": ["avx", "avx512f"]}}
    host = {"jax": "2", "model": {"num_layers": 3, "name": "a"}, "cpu": {"features": ["avx", "amx"]}, "more": 1}
    assert manifest.differences(plan, host) == [
        "cpu.features: the plan has ['avx512f'], here it is ['amx']",
        "jax: the plan has '1', here it is '2'",
        "model.num_layers: the plan has 2, here it is 3",
        "more: the plan has None, here it is 1",
    ]
    assert manifest.differences(plan, plan) == []


def test_weights_are_mapped_and_checked(tmp_path):
    weights = {"a": jax.numpy.arange(7.0), "b": (jax.numpy.ones((3, 5), "bfloat16"),)}
    assert weight_cache.load(tmp_path, "f") is None
    weight_cache.store(tmp_path, "f", weights)
    loaded = weight_cache.load(tmp_path, "f")
    assert jax.tree.structure(loaded) == jax.tree.structure(weights)
    jax.tree.map(np.testing.assert_array_equal, loaded, weights)
    assert weight_cache.load(tmp_path, "another checkpoint") is None
    flip(tmp_path / "weights.bin")
    assert weight_cache.load(tmp_path, "f") is None
