"""Runs one group of GPU cases in Pallas's GPU interpreter: ``python kernel_gpu_cases.py GROUP``.

The interpreter takes seconds for each block of the cache, so the cases are small.  Exits with 1 when one is wrong; the
caller sets a time limit, since a kernel that waits for a copy nobody started would hang.
"""

import sys

import jax
import numpy as np
from kernel_oracle import UPDATES, Case, attend, make_inputs, make_update, relative_error

from precast.kernels_pallas.cache_update import cache_update
from precast.kernels_pallas.paged_attention import paged_attention
from precast.kernels_pallas.targets import Target

INTERPRETED = Target("gpu", "h200", interpret=True)
GROUPS = {
    "few_queries": [
        Case(heads=4, kv_heads=2, contexts=(0, 1, 17, 100)),
        Case(heads=3, kv_heads=1, head_dim=64, contexts=(0, 150), splits=2, sinks=True),
        Case(heads=2, kv_heads=1, head_dim=64, contexts=(330,), q=2, splits=1),
        Case(q=3, heads=4, kv_heads=1, page_size=128, contexts=(130, 33), window=33, soft_cap=5.0),
        Case(heads=4, kv_heads=1, head_dim=192, value_dim=128, contexts=(70, 5)),
    ],
    "quantized": [
        Case(heads=2, kv_heads=1, page_size=32, contexts=(130,), kv_dtype="int8"),
        Case(heads=4, kv_heads=2, page_size=64, contexts=(70,), kv_dtype="float8_e4m3fn", q=2),
    ],
    "many_queries": [
        Case(heads=2, kv_heads=1, contexts=(0, 70), head_dim=80, page_size=8),
        Case(q=70, heads=1, kv_heads=1, contexts=(100,), sinks=True, head_dim=64),
    ],
    "blackwell": [Case(heads=4, kv_heads=2, q=2, contexts=(0, 150))],
    "update": UPDATES,
}


def attention_is_right(case: Case) -> bool:
    target = Target("gpu", "b200", interpret=True) if sys.argv[1] == "blackwell" else INTERPRETED
    out = paged_attention(**make_inputs(case).arrays(), config=case.config, target=target)
    error = relative_error(out, attend(case, make_inputs(case)))
    print(case, error, flush=True)
    return error < 8e-3


def update_is_right(case: Case) -> bool:
    arguments = make_update(case)
    want = cache_update(**arguments, target=Target("reference"))
    got = jax.jit(cache_update, static_argnames="target")(**arguments, target=INTERPRETED)
    same = [
        theirs is None or np.array_equal(np.asarray(mine).view(np.uint8), np.asarray(theirs).view(np.uint8))
        for mine, theirs in zip(got, want, strict=True)
    ]
    print(case, same, flush=True)
    return all(same)


if __name__ == "__main__":
    check = update_is_right if sys.argv[1] == "update" else attention_is_right
    sys.exit(0 if not [case for case in GROUPS[sys.argv[1]] if not check(case)] else 1)
