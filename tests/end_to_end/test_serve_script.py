"""scripts/serve: starting, watching and ending server and gateway (installing is for a fresh machine)."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import queue
import re
import runpy
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import openai
import processes
import pytest
from processes import BIN, FLAGS, wait_for

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture
def script(tmp_path):
    """A copy of the script beside a .venv in which everything is installed."""
    for name in ("pyproject.toml", "scripts/serve"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("runtime-serve", "smg"):
        (tmp_path / ".venv" / "bin" / name).symlink_to(BIN / name)
    made = runpy.run_path(str(tmp_path / "scripts" / "serve"))
    made["STAMP"].write_text(made["installation_mark"]())
    return tmp_path / "scripts" / "serve"


@contextlib.contextmanager
def serving(script, tiny, *flags):
    command = [sys.executable, script, f"--model={tiny}", f"--grpc_port={processes.free_port()}"]
    command += [f"--http_port={processes.free_port()}", "--metrics_port=0", *FLAGS, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = [process.stdout.readline(), process.stdout.readline()]
            assert lines[1].startswith("ready: curl "), lines
            yield process, "".join(lines)
        finally:
            process.kill()


def children(process):
    """Ids of the process's children that are still there, by name."""
    ids = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return {pathlib.Path(f"/proc/{one}/comm").read_text().strip(): int(one) for one in ids}


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_and_ends(shared_server, tiny, script, number):
    with serving(script, tiny) as (process, said):
        url, body = re.search(r"^ready: curl (\S+) .* -d '(.*)'$", said, re.MULTILINE).groups()
        request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["choices"][0]["message"]["role"] == "assistant"
        pids = children(process).values()
        assert len(pids) == 2
        process.send_signal(number)
        assert process.wait(60) == 0
        assert all(map(is_gone, pids))


def test_a_drain_finishes_what_clients_of_the_gateway_wait_for(shared_server, tiny, script):
    with serving(script, tiny) as (process, said), concurrent.futures.ThreadPoolExecutor(32) as pool:
        url = re.search(r"http://\S+/v1", said)[0]
        health = re.search(r"http://\S+/(?=metrics;)", said)[0] + "health"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            options = {"model": "tiny", "prompt": "hello", "max_tokens": 300, "extra_body": {"ignore_eos": True}}
            begun = queue.Queue()

            def stream():
                try:
                    chunks = client.completions.create(**options, stream=True, stream_options={"include_usage": True})
                except openai.InternalServerError as error:
                    return str(error)
                usages = []
                for chunk in chunks:
                    if not usages:
                        begun.put(None)
                    usages.append(chunk.usage)
                return usages[-1].completion_tokens

            calls = [pool.submit(stream) for _ in range(32)]
            for _ in range(4):
                begun.get(timeout=30)
            pids = children(process).values()
            process.terminate()
            wait_for(lambda: not is_healthy(health))
            with pytest.raises(openai.InternalServerError, match=r"503.*shutting down"):
                client.completions.create(model="tiny", prompt="late")
            # Those that were taken before the drain end as they would have, the others are refused.
            results = [call.result() for call in calls]
            assert results.count(300) >= 4
            assert all("shutting down" in result for result in results if result != 300)
        assert process.wait(30) == 0
        assert all(map(is_gone, pids))
        with processes.socket.create_server(("127.0.0.1", int(re.search(r":(\d+)/", url)[1]))):
            pass


def is_healthy(url):
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return False


@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_has_to_be_killed_is_a_failure(shared_server, tiny, script, victim):
    script.write_text(script.read_text().replace("KILL_SECONDS = 30", "KILL_SECONDS = 1"))
    with serving(script, tiny, "--drain_timeout=0") as (process, _):
        pids = list(children(process).values())
        os.kill(pids[victim], signal.SIGSTOP)
        process.terminate()
        assert process.wait(30) == 1
        assert all(map(is_gone, pids))


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_dies_so_does_the_other(shared_server, tiny, script, victim):
    with serving(script, tiny) as (process, _):
        pids = list(children(process).values())
        os.kill(pids[victim], signal.SIGKILL)
        assert process.wait(60) == 1
        assert all(map(is_gone, pids))


def test_when_it_is_killed_nothing_stays(shared_server, tiny, script):
    with serving(script, tiny) as (process, _):
        pids = list(children(process).values())
        process.kill()
        process.wait()
        wait_for(lambda: all(map(is_gone, pids)), 30)


def test_a_taken_port_is_one_line(script):
    with processes.socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run([script, f"--http_port={port}"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and str(port) in done.stderr


def test_a_model_that_cannot_be_is_told_and_nothing_stays(script):
    command = [sys.executable, script, "--model=/nowhere", f"--grpc_port={processes.free_port()}"]
    command += [f"--http_port={processes.free_port()}", "--metrics_port=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert "/nowhere" in done.stderr and "Traceback" not in done.stderr
