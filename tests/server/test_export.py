"""``runtime-export``: what it writes runs without the project, and gives the engine's tokens."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors
import tiny_model
from jax import export as jax_export

from precast.kernels_pallas.targets import Target
from precast.models.checkpoint import open_checkpoint
from precast.runtime.config import ConfigError
from precast.runtime.exporting import Exporter, ExportShapes
from precast.runtime.request import SamplingParams
from precast.server import export, export_example
from precast.server.llm import LLM

SHAPES = ExportShapes(batch=2, prefill_tokens=8, max_tokens=48, page_size=16)
# The second takes three calls of prefill.
PROMPTS = [[5, 6, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]
STEPS = 10
# Runs a file as a program in a process in which the project cannot be imported.
ALONE = "import runpy, sys; sys.modules['precast'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "out"
    export.export_model(open_checkpoint(str(model)), out, [Target("cpu"), Target("tpu", "v6e")], SHAPES)
    return out


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Where JAX keeps what the example compiles, for its next run."""
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def llm(model):
    return LLM(str(model), progress=False, slots=2, max_model_len=48, page_size=16, token_budget=10)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 7}])
def test_the_example_gives_the_engines_tokens_without_the_project(exported, compiled, llm, sampling):
    arguments = [f"--token_ids={','.join(map(str, prompt))}" for prompt in PROMPTS]
    arguments += [f"--{name}={value}" for name, value in sampling.items()]
    command = [sys.executable, "-c", ALONE, str(exported / "example.py"), f"--steps={STEPS}", *arguments]
    environment = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": compiled}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    printed = [[int(word) for word in line.split(",")] for line in done.stdout.splitlines()]
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True, **sampling)
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    assert printed == [result.outputs[0].token_ids for result in results]


def test_a_token_without_room_gives_no_numbers(exported):
    model = export_example.Exported(exported, "cpu")
    ids, positions = np.zeros(2, np.int32), np.array([47, 48], np.int32)
    logits, cache = jax.jit(model.decode.call)(model.weights, model.new_cache(), ids, positions)
    assert np.isfinite(logits[0]).all() and np.isnan(logits[1]).all()
    # The second sequence's pages, after the scratch page and three of the first.
    assert not any(np.asarray(one[4:]).any() for one in cache)


def test_functions_for_a_tpu_hold_its_kernels(exported):
    about = json.loads((exported / "export.json").read_text())["platforms"]["tpu"]
    assert about["target"] == "tpu:v6e"
    for name in ("prefill", "decode"):
        read = jax_export.deserialize(bytearray((exported / about["functions"][name]).read_bytes()))
        assert read.platforms == ("tpu",) and read.nr_devices == 1
        assert "tpu_custom_call" in read.mlir_module()
        listed = [*about["weights"], *about["cache"]]
        arguments = [(list(one.shape), one.dtype.name) for one in read.in_avals[: len(listed)]]
        assert arguments == [(one["shape"], one["dtype"]) for one in listed]


def test_functions_for_a_gpu_hold_its_kernels(model):
    config = dataclasses.replace(open_checkpoint(str(model)).config, num_layers=1, head_dim=16)
    exporter = Exporter(config, Target("gpu", "h200"), SHAPES, "bfloat16")
    artefacts = exporter.artefacts()
    for name in ("prefill", "decode"):
        read = jax_export.deserialize(bytearray(artefacts[name]))
        assert read.platforms == ("cuda",) and "mosaic_gpu_v2" in read.mlir_module()


def test_platforms_share_their_weights(exported):
    about = json.loads((exported / "export.json").read_text())["platforms"]
    (file,) = (exported / "weights").iterdir()
    with safetensors.safe_open(file, "np") as stored:
        names = set(stored.keys())
    for platform in ("cpu", "tpu"):
        assert names == {name for one in about[platform]["weights"] for name in one["tensors"]}
    assert sum(one["stacked"] for one in about["tpu"]["weights"]) == 6
    assert not any("@" in name for name in names)


def test_the_readme_names_the_shapes(exported):
    text = (exported / "README.md").read_text()
    assert "prefill(weights, cache, token_ids [2, 8], starts [2], lengths [2])" in text
    assert "Platforms: cpu, tpu:v6e." in text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "platforms is empty"),
        (["rocm"], "must be cpu, tpu:CHIP or cuda:CHIP"),
        (["tpu"], "must be one of tpu:v5e, tpu:v5p, tpu:v6e, tpu:tpu7x"),
        (["cuda:v6e"], "must be one of cuda:a100"),
        (["cpu:8"], "must be one of cpu"),
        (["tpu:v6e", "tpu:v5e"], "one set of functions for each platform"),
    ],
)
def test_platforms_that_are_none(names, words):
    with pytest.raises(ConfigError, match=words):
        export.parse_platforms(names)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 24}, "page_size is 24: it must be a power of two"),
        ({"batch": 0}, "batch is 0: it must be at least 1"),
        ({"prefill_tokens": 600}, "prefill_tokens is 600: it must be at most max_tokens, 256"),
        ({"max_tokens": 300}, "max_tokens is 300: the model is made for at most 256"),
        ({"platforms": "cuda:h200", "max_tokens": 64}, "no float32; use bfloat16"),
        ({"out": "."}, "something is there already"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(model, tmp_path, monkeypatch, capsys, changes, words):
    monkeypatch.chdir(model)
    given = {"model": model, "out": tmp_path / "out", **changes}
    with pytest.raises(SystemExit):
        export.main([f"--{name}={value}" for name, value in given.items()])
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1 and message.startswith("runtime-export: ")
    assert list(tmp_path.iterdir()) == []


def test_a_command_writes_functions_alone(model, tmp_path, capsys):
    out = tmp_path / "out"
    given = {"model": model, "out": out, "prefill_tokens": 8, "max_tokens": 48, "dtype": "bfloat16"}
    export.main([*(f"--{name}={value}" for name, value in given.items()), "--noweights"])
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "cpu", "example.py", "export.json"]
    assert "example.py runs it" in capsys.readouterr().out
