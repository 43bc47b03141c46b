"""Models by hub id, with the real client against a server of our own."""

from __future__ import annotations

import os
import subprocess
import sys

import hub_server
import numpy as np
import pytest
import tiny_checkpoints as tiny

from precast.models.checkpoint import hub, open_checkpoint

# Opens each model, printing where it lies or the error.
_OPEN = """
import sys
from huggingface_hub import constants
from precast.models.checkpoint import CheckpointError, open_checkpoint
# The client keeps what it has in steps of this; the file here is smaller than one of its own.
constants.DOWNLOAD_CHUNK_SIZE = 4096
for name in sys.argv[1:]:
    try:
        print(open_checkpoint(name).path)
    except CheckpointError as error:
        print("refused:", error)
"""


def open_all(home, endpoint, *names):
    """(lines that opening each model printed, what went to stderr), in a process with a cache of its own."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "JAX_PLATFORMS": "cpu"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-W", "error", "-c", _OPEN, *names]
    done = subprocess.run(
        command, env={**environment, **settings}, cwd=home, check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout.splitlines(), done.stderr


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "served").mkdir()
    tiny.write(tmp_path / "served")
    (tmp_path / "served" / "pytorch_model.bin").write_bytes(b"a pickle that nobody reads")
    return tmp_path / "served"


def test_a_download_that_was_cut_goes_on_where_it_stopped(folder, tmp_path):
    (tmp_path / "home").mkdir()
    size = (folder / "model.safetensors").stat().st_size
    with hub_server.serving(folder, cut="model.safetensors", cuts=1) as server:
        (path, unknown, gated), progress = open_all(
            tmp_path / "home", server.endpoint, "tiny/model", "tiny/absent", "tiny/gated"
        )
    asked = [headers for name, headers in server.gets if name == "model.safetensors"]
    assert len(asked) == 2 and asked[0] is None
    assert size // 2 - 4096 < int(asked[1].removeprefix("bytes=").removesuffix("-")) <= size // 2
    assert {name for name, _ in server.gets} == {"config.json", "model.safetensors"}
    assert "100%" in progress
    np.testing.assert_array_equal(
        open_checkpoint(path).read("embed.weight"), tiny.tensors()["model.embed_tokens.weight"]
    )
    assert unknown.startswith("refused: tiny/absent is neither a file or directory here nor a public model on http")
    assert gated.startswith("refused: tiny/gated is gated: accept its terms at http")
    (offline, missing), _ = open_all(tmp_path / "home", server.endpoint, "tiny/model", "tiny/other")
    assert offline == path
    assert missing.startswith("refused: tiny/other is neither") and "cannot be reached" in missing


@pytest.mark.parametrize(
    ("name", "is_id"),
    [("a/b", True), ("a-b/c.d_e", True), ("a", False), ("a/b/c", False), ("../b", False), ("a/..", False)],
)
def test_what_an_id_looks_like(name, is_id):
    assert hub.is_hub_id(name) is is_id
