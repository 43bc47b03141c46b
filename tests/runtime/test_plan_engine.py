"""Engines from plans: kept beside the model, or given; whatever does not fit is refused by name."""

import hashlib
import json
import multiprocessing
import shutil
import tempfile

import pytest
import toy_models

from precast.runtime import loading, manifest, planning
from precast.runtime import plan as plans
from precast.runtime.config import ConfigError, EngineConfig
from precast.runtime.machine import Machine
from precast.runtime.request import SamplingParams

SETTINGS = {"dtype": "float32", "slots": 2, "max_model_len": 32, "page_size": 4, "token_budget": 12}
DECODE = "backbone-2x1+0"
REQUESTS = [([10, 11, 12], SamplingParams(seed=1, max_tokens=5))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return toy_models.random_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def given(model, tmp_path_factory):
    """A plan compiled from the config alone."""
    path = tmp_path_factory.mktemp("plan") / "toy"
    config = EngineConfig(**SETTINGS)
    planning.make(
        path, planning.resolve(model.config, config, Machine.parse("cpu"), own=True, xla_flags=""), progress=False
    )
    return path


def start(checkpoint, **given):
    return loading.load_engine(checkpoint, loading.configure(given), tokenizer=None)


def test_an_engine_starts_from_a_given_plan_without_compiling(model, given, run, make_engine):
    expected = run(make_engine(model, **SETTINGS), REQUESTS)[0, 0].token_ids
    before = plans.CompileCounter()
    engine = start(model, plan=str(given))
    assert (engine.config.slots, engine.config.max_model_len, engine.config.page_size) == (2, 32, 4)
    assert run(engine, REQUESTS)[0, 0].token_ids == expected
    assert (engine.stats().compiles_after_ready, before.count) == (0, 0)


def test_a_plan_is_kept_and_found_again(model, run, tmp_path, monkeypatch):
    settings = SETTINGS | {"plan_dir": str(tmp_path)}
    first = run(start(model, **settings), REQUESTS)[0, 0]
    monkeypatch.setattr(planning, "make", lambda *_, **__: pytest.fail("compiled again"))
    monkeypatch.setattr(plans.trial, "run", lambda *_: pytest.fail("tried"))
    engine = start(model, **settings)
    assert run(engine, REQUESTS)[0, 0].token_ids == first.token_ids
    assert engine.stats().compiles_after_ready == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.15)])
def test_xlas_own_operations_serve_where_there_is_no_library(model, run, tmp_path, monkeypatch, dtype, tolerance):
    """With other plans, other weights in memory and the same log-probabilities up to rounding."""
    settings = SETTINGS | {"plan_dir": str(tmp_path), "dtype": dtype}
    scoring = [(list(range(10, 30)), SamplingParams(max_tokens=0, prompt_logprobs=0))]

    def logprobs(engine):
        (delta,) = run(engine, scoring)[0, 0].deltas
        return [token.logprob for token in delta.prompt_logprobs[1:]]

    expected = logprobs(start(model, **settings))
    monkeypatch.setattr(planning, "own_library", lambda: None)
    engine = start(model, **settings)
    assert logprobs(engine) == pytest.approx(expected, abs=tolerance) and len(expected) == 19
    calls = [call for program in engine.plan.manifest["programs"].values() for call in program["custom_calls"]]
    assert not any(call.startswith("precast_") for call in calls)


def test_a_plan_has_the_kernels_in_it(given):
    (backbone,) = (program for name, program in manifest.read(given).manifest["programs"].items() if name == DECODE)
    layers = 2
    assert backbone["custom_calls"] == {
        "precast_dense_f32": 4 * layers, "precast_cpu_attention_f32": layers, "precast_cpu_write_f32": layers,
        "precast_norm_f32": 2 * layers + 1,
    }  # fmt: skip


def test_another_library_than_the_process_has_is_refused(model, given, tmp_path):
    (tmp_path / "plan").mkdir()
    shutil.copytree(given, tmp_path / "plan", dirs_exist_ok=True)
    (tmp_path / "plan" / "native.so").write_bytes(b"another")
    about = json.loads((given / "manifest.json").read_bytes())
    about["facts"]["native_library"] = hashlib.sha256(b"another").hexdigest()
    for name in ("manifest.json", "manifest.sha256"):
        (tmp_path / "plan" / name).unlink()
    manifest.seal(tmp_path / "plan", {name: about[name] for name in about.keys() - {"format", "files"}})
    with pytest.raises(manifest.PlanError, match=r"native.so is another than the one that this process has loaded"):
        start(model, plan=str(tmp_path / "plan"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 3}, "slots: the plan has 2, here it is 3"),
        ({"max_model_len": 31}, "max_model_len: the plan has 32, here it is 31"),
        ({"page_size": 8}, "page_size: the plan has 4, here it is 8"),
        ({"token_budget": 13}, "token_budget: the plan has 12, here it is 13"),
        ({"dtype": "bfloat16"}, "dtype: the plan has 'float32', here it is 'bfloat16'"),
        ({"mesh": "tensor=2"}, "mesh: the plan has '', here it is 'tensor=2'"),
        ({"plan_sha256": "00"}, "plan_sha256 is '00': it must be 64 hexadecimal digits"),
        ({"plan_sha256": "0" * 64}, f"plan_sha256 is {'0' * 64}: the digest of its manifest.json is"),
    ],
)
def test_a_setting_that_is_not_the_plans_is_refused(model, given, changes, message):
    with pytest.raises(ConfigError, match=message):
        start(model, plan=str(given), **changes)


def test_a_plan_of_another_model_version_or_host_is_refused(model, given, tmp_path, monkeypatch):
    other = toy_models.random_llama(tmp_path, vocab_size=64)
    with pytest.raises(ConfigError, match=r"model.vocab_size: the plan has \d+, here it is 64; model_fingerprint: "):
        start(other, plan=str(given))
    monkeypatch.setattr(manifest.jax, "__version__", "9.9")
    with pytest.raises(ConfigError, match=r"jax: the plan has '0\..*', here it is '9.9'; compile it again"):
        start(model, plan=str(given))
    monkeypatch.undo()
    monkeypatch.setattr(manifest, "processor", lambda: {"machine": "x86_64", "features": ["mmx"]})
    with pytest.raises(ConfigError, match=r"cpu.features: the plan has .*, here it is "):
        start(model, plan=str(given))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="xla_flags: the plan has '', here it is '--xla_cpu_max_isa=AVX2'"):
        loading.load_engine(model, EngineConfig(plan=str(given)), tokenizer=None, xla_flags="--xla_cpu_max_isa=AVX2")


def test_a_damaged_plan_beside_the_model_is_made_again(model, tmp_path):
    settings = SETTINGS | {"plan_dir": str(tmp_path)}
    start(model, **settings)
    (path,) = tmp_path.glob("*/trees.pickle")
    path.write_bytes(path.read_bytes()[:-9])
    start(model, **settings)
    assert manifest.read(path.parent)
    assert list(tmp_path.iterdir()) == [path.parent]


def test_a_folder_that_cannot_be_written_costs_only_time(model, run, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(plans.trial, "run", lambda *_: pytest.fail("tried"))
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert run(start(model, **SETTINGS, plan_dir=str(blocked)), REQUESTS)[0, 0].token_ids
    assert list(tmp_path.iterdir()) == [blocked]


def _start_in_process(folder, path):
    start(toy_models.random_llama(folder), **SETTINGS, plan_dir=path)


def test_two_servers_start_on_one_folder(model, tmp_path):
    context = multiprocessing.get_context("spawn")
    folder = str(tmp_path / "plans")
    processes = [context.Process(target=_start_in_process, args=(str(tmp_path / str(i)), folder)) for i in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert process.exitcode == 0
    (kept,) = (tmp_path / "plans").iterdir()
    assert manifest.read(kept)
