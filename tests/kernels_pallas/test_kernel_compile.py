"""The kernels through the real TPU and NVIDIA compilers, on this host. ``scripts/bench_kernels --compile_only`` without
``--quick`` and ``--chips`` is the whole sweep."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_kernels"


@pytest.mark.parametrize(
    ("chip", "counts"),
    [
        ("v5e", "8 compiled, 0 unsupported"),
        ("h200", "8 compiled, 0 unsupported"),
        ("b200", "4 compiled, 4 unsupported"),
        ("a100", "0 compiled, 8 unsupported"),
    ],
)
def test_each_kind_of_program_compiles(chip, counts):
    command = [sys.executable, str(SCRIPT), "--compile_only", "--quick", "--chips", chip]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    *cases, last = done.stdout.splitlines()
    assert last == f"{counts}, 0 failed", done.stdout + done.stderr[-2000:]
    assert done.returncode == 0
    assert all(re.search(r": (ok \d+\.\d|unsupported \w)", case) for case in cases), cases
