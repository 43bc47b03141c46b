"""Loading a plan's executables in a process of its own: one made for another machine may end the process."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys

from precast.kernels_pallas.native import library as native_library
from precast.runtime import compiling, manifest
from precast.runtime.manifest import Sealed

_SECONDS = 600


def run(plan: Sealed, source: Sealed) -> str | None:
    """Deserialises the executables of ``source``, the plan or its local folder; None, or what went wrong.

    Must come before this process takes the devices.
    """
    command = [sys.executable, "-m", __name__, str(plan.path), plan.sha256, str(source.path), source.sha256]
    try:
        child = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer in {_SECONDS} s"
    if child.returncode < 0:
        return f"the process that tried ended by {signal.Signals(-child.returncode).name}"
    if child.returncode > 0:
        return child.stderr.strip().rpartition("\n")[2] or f"exit status {child.returncode}"
    return None


def _main(plan: str, plan_sha256: str, source: str, source_sha256: str) -> None:
    sealed = manifest.read(plan, pinned=plan_sha256)
    contents = manifest.read_sealed(source, pinned=source_sha256).contents
    if library := sealed.contents.get(native_library.FILE):
        native_library.register(library)
    mesh = manifest.machine_of(sealed).mesh(manifest.mesh_of(sealed))
    for name, trees in pickle.loads(sealed.contents[compiling.TREES]).items():
        compiling.deserialise(contents[f"{compiling.EXECUTABLES}/{name}.bin"], trees, mesh)


if __name__ == "__main__":
    _main(*sys.argv[1:])
