"""Whole models through the TPU and NVIDIA compilers: nothing large is copied, decode moves little more than it must.

``scripts/check_targets`` says what is checked; without ``--quick`` it runs every machine and model at full depth.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_targets"


@pytest.mark.parametrize(
    ("machine", "cases"),
    [
        ("tpu:v6e:2x4", 2), ("cuda:h200 ", 1), ("cuda:h200x8", 1),
        ("tpu:v5e", 1), ("tpu:v5p", 1), ("tpu:v6e:4x4", 1), ("tpu:tpu7x", 1), ("cuda:h100", 1), ("cuda:b200", 1),
    ],
)  # fmt: skip
def test_a_model_compiles_to_about_the_least_work(machine, cases):
    command = [sys.executable, str(SCRIPT), "--quick", "--only", machine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.stdout.splitlines()[-1:] == [f"{cases} ok, 0 unsupported, 0 failed"], done.stdout + done.stderr
