"""A plan's folder: what is damaged is made again, what is intact is loaded without compiling."""

import json
import multiprocessing

import jax
import numpy as np
import pytest
import toy_models

from precast.runtime import plan as plans
from precast.runtime import weight_cache
from precast.runtime.programs import Program
from precast.runtime.request import SamplingParams


def double(x):
    return x * 2 + 1


PROGRAM = Program("double", double, (jax.ShapeDtypeStruct((4,), np.float32),))


def build(root, **key):
    """(was it compiled?, does it work?) of a plan with one program."""
    folder = plans.PlanFolder(root, plans.make_key(**key))
    plan = plans.build([PROGRAM], folder, plans.load(folder, first=[]), progress=False)
    result = plan.programs["double"](np.arange(4, dtype=np.float32))
    assert result.tolist() == [1, 3, 5, 7]
    return not plan.built[0].loaded


def test_the_second_build_loads(tmp_path):
    assert build(tmp_path)
    assert not build(tmp_path)


def test_another_key_has_a_folder_of_its_own(tmp_path):
    assert build(tmp_path, slots=4)
    assert build(tmp_path, slots=8)
    assert not build(tmp_path, slots=4)
    assert build(tmp_path, slots=4, xla_flags="--xla_cpu_max_isa=AVX2")


def executable_file(root):
    (path,) = root.glob("*/executables/*.bin")
    return path


def manifest_file(root):
    (path,) = root.glob("*/manifest.json")
    return path


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "truncated": lambda root: executable_file(root).write_bytes(executable_file(root).read_bytes()[:-1]),
    "emptied": lambda root: executable_file(root).write_bytes(b""),
    "flipped": lambda root: flip(executable_file(root)),
    "missing": lambda root: executable_file(root).unlink(),
    "manifest missing": lambda root: manifest_file(root).unlink(),
    "manifest truncated": lambda root: manifest_file(root).write_text(manifest_file(root).read_text()[:40]),
    "manifest a list": lambda root: manifest_file(root).write_text("[]"),
    "manifest of another": lambda root: manifest_file(root).write_text(json.dumps({"key": {}, "programs": {}})),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_healed(tmp_path, damage):
    build(tmp_path)
    DAMAGE[damage](tmp_path)
    assert build(tmp_path)
    assert not build(tmp_path)


def test_a_pickle_whose_digest_does_not_match_is_not_opened(tmp_path):
    build(tmp_path)
    marker = tmp_path / "opened"
    executable_file(tmp_path).write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % str(marker).encode())
    assert build(tmp_path)
    assert not marker.exists()


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert build(blocked)
    assert build(blocked)


def _build_in_process(root, results):
    results.put(build(root))


def test_two_servers_start_on_one_folder(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=_build_in_process, args=(tmp_path, results)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    build(tmp_path)
    assert not build(tmp_path)
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".json", ".bin"}


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


def test_an_engine_starts_from_its_plan(make_engine, run, tmp_path):
    rand = toy_models.random_llama(tmp_path / "model")
    settings = {"slots": 2, "max_model_len": 32, "kv_cache_memory": 1 << 16, "plan_dir": str(tmp_path)}
    requests = [([10, 11, 12], SamplingParams(seed=1, max_tokens=5))]
    first = run(make_engine(rand, **settings), requests)[0, 0]
    engine = make_engine(rand, **settings)
    assert all(one.loaded for one in engine.plan.built)
    assert run(engine, requests)[0, 0].token_ids == first.token_ids
    assert engine.stats().compiles_after_ready == 0
