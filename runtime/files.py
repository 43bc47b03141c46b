"""Files and folders that nobody ever sees half written."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of ``path`` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def replacing_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to fill, which takes the place of ``path``, and of all that was in it, when the block ends well."""
    path = path.resolve()
    for left in path.parent.glob(f".{path.name}.*"):
        if not _is_running(left.suffix[1:]):
            shutil.rmtree(left, ignore_errors=True)
    made, old = (path.with_name(f".{path.name}.{uuid.uuid4().hex}.{os.getpid()}") for _ in range(2))
    made.mkdir(parents=True)
    try:
        yield made
        # A folder that is not empty cannot be renamed over.
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, old)
        os.rename(made, path)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _is_running(process: str) -> bool:
    """Whether this host has a process with this id."""
    return pathlib.Path("/proc", process).exists()


def is_writable(folder: pathlib.Path) -> bool:
    """Whether files can be made in a folder, which is made unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
