"""runtime-compile, runtime-plan and runtime-serve --plan, as an operator uses them."""

import json
import re
import shutil
import subprocess

import processes
import pytest
from processes import BIN, FLAGS, generate, output_ids


def command(*arguments):
    done = subprocess.run([str(argument) for argument in arguments], capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def config_only(tiny, tmp_path_factory):
    """A folder without weights."""
    folder = tmp_path_factory.mktemp("config")
    shutil.copy(tiny / "config.json", folder)
    return folder


@pytest.fixture(scope="module")
def compiled(config_only, tmp_path_factory):
    """(folder, standard output) of a plan for this host."""
    out = tmp_path_factory.mktemp("plans") / "plan"
    status, output, errors = command(BIN / "runtime-compile", f"--model={config_only}", f"--out={out}", *FLAGS)
    assert status == 0, errors
    return out, output


def test_a_table_and_the_memory_are_printed(compiled):
    out, output = compiled
    manifest = json.loads((out / "manifest.json").read_bytes())
    rows = re.findall(r"^(\w+) +([\dx+]*) +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +-$", output, re.MULTILINE)
    assert [f"{kind}-{shape}" if shape else kind for kind, shape in rows] == list(manifest["programs"])
    assert re.search(r"^W weights .* MiB ", output, re.MULTILINE)
    assert re.search(r"at most \d\.\d GiB of this host's memory", output)
    assert re.search(r"manifest sha256 [0-9a-f]{64}$", output, re.MULTILINE)
    assert sorted(file.name for file in out.iterdir()) == [
        "executables", "exported", "manifest.json", "manifest.sha256", "native.so", "seen.json", "trees.pickle",
    ]  # fmt: skip


def test_a_server_starts_from_a_pinned_plan_with_the_plans_settings(compiled, tiny, shared_server, tmp_path):
    out, output = compiled
    digest = re.search(r"sha256 ([0-9a-f]{64})", output)[1]
    request = generate([5, 6, 7], max_tokens=9, temperature=0.9, seed=3)
    with (
        processes.server(tiny, tmp_path, f"--plan={out}", f"--plan_sha256={digest}", "--slots=4") as server,
        server.stub() as stub,
        shared_server.stub() as other,
    ):
        assert "4 slots, up to 384 tokens, float32" in server.ready_line
        assert output_ids(stub.Generate(request)) == output_ids(other.Generate(request))
        assert server.metric("vllm:compiles_after_ready_total") == 0
        assert server.stop() == 0


def test_a_host_without_a_compiler_serves_a_plan_and_compiles_one(compiled, tiny, tmp_path):
    """The plan carries the kernels' library; without a plan XLA's operations serve, with the same tokens."""
    out, _ = compiled
    request = generate([5, 6, 7], max_tokens=9, temperature=0.9, seed=3)
    tokens = []
    host = {"PATH": "", "HOME": str(tmp_path)}
    for flags in ([f"--plan={out}"], [f"--plan_dir={tmp_path / 'plans'}", *FLAGS]):
        with processes.server(tiny, tmp_path, *flags, **host) as server, server.stub() as stub:
            tokens.append(output_ids(stub.Generate(request)))
            assert ("no C++ compiler" in server.log.read_text()) == (len(tokens) == 2)
            assert server.stop() == 0
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slots=8"], "slots: the plan has 4, here it is 8"),
        (["--mesh=tensor=2"], "mesh: the plan has '', here it is 'tensor=2'"),
        ([f"--plan_sha256={'0' * 64}"], f"plan_sha256 is {'0' * 64}: the digest of its manifest.json is "),
    ],
)
def test_a_server_refuses_what_is_not_the_plans(compiled, tiny, flags, message):
    serve = (BIN / "runtime-serve", f"--model={tiny}", "--port=0", "--metrics_port=0", f"--plan={compiled[0]}")
    status, output, errors = command(*serve, *flags)
    assert (status, output) == (1, "")
    assert message in errors.splitlines()[-1]


def test_runtime_plan_answers(compiled):
    status, output, errors = command(
        BIN / "runtime-plan", compiled[0], "--context=100", "--mesh=tensor=2", "--weights=int8"
    )
    assert (status, errors) == (0, "")
    # 4 slots of 384 tokens on pages of 16: 96 pages, 7 for a conversation.
    assert "13 conversations of 100 tokens fit at a time (1536 tokens in KV pages)" in output
    changed = r"with mesh tensor=2, int8 weights on 2 devices, of which cpu has 1: weights .* -> .*, a KV page .* -> "
    assert re.search(changed, output)
    assert re.search(r"^  \[[WKTSRCPm.]{60}\]$", output, re.MULTILINE)


def test_a_tpu_slice_is_compiled_for_here(tmp_path):
    """The paged-attention kernel is in it, the cache is updated in place, and each layer has two all-reduces."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ("--target=tpu:v6e:1x2", "--mesh=tensor=2", "--slots=2", "--token_budget=66", "--max_model_len=128")
    status, _, errors = command(
        BIN / "runtime-compile", f"--model={tmp_path}", f"--out={tmp_path / 'plan'}", *flags, "--kv_cache_memory=4MiB"
    )
    assert status == 0, errors
    manifest = json.loads((tmp_path / "plan" / "manifest.json").read_bytes())
    assert manifest["facts"]["target"] == "tpu:v6e:1x2" and "libtpu" in manifest["facts"]["plugins"]
    memory = manifest["memory"]
    for name, one in manifest["programs"].items():
        if name.startswith("backbone"):
            assert one["custom_calls"]["tpu_custom_call"] >= 2
            assert one["alias_bytes"] >= memory["page_bytes"] * memory["num_pages"]
            # And one for the embedding, whose rows are divided.
            assert one["collectives"]["all-reduce"] == 5
    assert memory["device_bytes"] == 31.25 * 2**30
    assert command(BIN / "runtime-plan", tmp_path / "plan")[0] == 0


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ([], 2, "--out is missing"),
        (["--out={tmp}"], 1, "something that is not a plan is there; name another folder"),
        (["--out={tmp}/p", "--target=tpu:v6e:2x2x2"], 1, "target is 'tpu:v6e:2x2x2': v6e has 2 axes, such as 2x2"),
        (["--out={tmp}/p", "--mesh=tensor=2"], 1, "mesh is 'tensor=2': it takes 2 devices, cpu has 1"),
        (["--out={tmp}/p", "--mesh=tensors=2"], 1, "mesh is 'tensors=2': write axis=degree"),
        (["--out={tmp}/p", "--max_model_len=513"], 1, "max_model_len is 513: the model is made for at most 512"),
        (["--out={tmp}/p", "--kv_cache_memory=1"], 1, "kv_cache_memory is 1 bytes: one page of 64 tokens takes "),
        (["--out={tmp}/p", "extra"], 2, "unexpected argument 'extra'"),
    ],
)
def test_a_compilation_that_cannot_be_says_why(config_only, tmp_path, flags, status, message):
    (tmp_path / "mine").write_text("keep")
    found, _, errors = command(
        BIN / "runtime-compile", f"--model={config_only}", *(flag.format(tmp=tmp_path) for flag in flags)
    )
    assert found == status
    assert message in errors.splitlines()[-1]
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
