"""The Hopper kernels in Pallas's GPU interpreter, with race detection, against the oracle and the reference."""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from kernel_gpu_cases import GROUPS
from kernel_oracle import Case, make_inputs, make_update

from precast.kernels_pallas.cache_update import cache_update
from precast.kernels_pallas.paged_attention import paged_attention
from precast.kernels_pallas.targets import Target


@pytest.mark.parametrize("group", GROUPS)
def test_in_the_interpreter(group):
    script = Path(__file__).with_name("kernel_gpu_cases.py")
    done = subprocess.run([sys.executable, str(script), group], capture_output=True, text=True, timeout=500)
    words = done.stdout + done.stderr
    assert done.returncode == 0 and "RACE DETECTED" not in words, words[-3000:]


def attention_on(chip: str, case: Case, **changes):
    inputs = make_inputs(case).arrays() | changes
    return paged_attention(**inputs, config=case.config, target=Target("gpu", chip))


def test_limits_are_named():
    with pytest.raises(
        NotImplementedError, match="on a100: Mosaic GPU compiles for Hopper and Blackwell, not for sm_80"
    ):
        attention_on("a100", Case())
    with pytest.raises(NotImplementedError, match="cache update on a100: Mosaic GPU compiles for Hopper"):
        cache_update(**make_update(Case()), target=Target("gpu", "a100"))
    with pytest.raises(NotImplementedError, match="16-bit with head size 128, got bfloat16 with 64"):
        attention_on("b200", Case(head_dim=64))
    with pytest.raises(NotImplementedError, match="tensor cores have no float32"):
        attention_on("h100", Case(), queries=jnp.zeros((6, 1, 8, 128), jnp.float32))
    with pytest.raises(NotImplementedError, match="page size is 16; quantised pages need at least 32"):
        attention_on("h100", Case(kv_dtype="int8"))
    with pytest.raises(NotImplementedError, match="head sizes in multiples of 64, got 80"):
        attention_on("h100", Case(kv_dtype="int8", head_dim=80, page_size=32))
    with pytest.raises(NotImplementedError, match="head size is 72, must be a multiple of 16"):
        attention_on("h100", Case(head_dim=72))
    with pytest.raises(NotImplementedError, match="bytes of shared memory, the limit is 232448"):
        attention_on("h100", Case(kv_block=512))
