"""The TPU kernels in Pallas's TPU interpreter, with race detection, against the oracle and the reference."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from kernel_oracle import (
    LATENT,
    OPTIONS,
    QUANTIZED,
    QUERIES,
    SHAPES,
    UPDATES,
    Case,
    attend,
    make_inputs,
    make_update,
    relative_error,
)

from precast.kernels_pallas.cache_update import cache_update
from precast.kernels_pallas.paged_attention import paged_attention
from precast.kernels_pallas.targets import Target

INTERPRETED = Target("tpu", "v6e", interpret=True)

# The blocks of these are small, so that a row has several and the copies of one row run into the next.
SMALL_BLOCKS = [
    Case(contexts=(100, 0, 0, 33, 32, 1, 0, 64, 65), kv_block=32),
    Case(contexts=(90, 200), q=64, kv_block=32, q_block=32, heads=9, kv_heads=3, head_dim=64),
    Case(contexts=(90, 0, 200), q=40, q_starts=(50, 0, 160), kv_block=16, q_block=16, window=30, sinks=True),
    Case(contexts=(200, 64), kv_block=64, page_size=32, kv_dtype="int8"),
]  # fmt: skip
# Every head size, grouping, page size and option once; the reference's tests run the whole list.
CASES = [*SMALL_BLOCKS, *SHAPES[1:10:2], SHAPES[-1], *OPTIONS[-2:], QUERIES[0], QUERIES[3], *QUANTIZED[1:3], LATENT[1]]


def run(case: Case, target: Target):
    out = paged_attention(**make_inputs(case).arrays(), config=case.config, target=target)
    assert not interpret_pallas_call.races.races_found
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_matches_the_oracle(case):
    out = run(case, INTERPRETED)
    assert relative_error(out, attend(case, make_inputs(case))) < 8e-3


def test_attention_splits_its_steps_over_the_cores_of_a_megacore():
    case = Case(contexts=(40, 0, 33, 100), kv_block=32)
    out = run(case, Target("tpu", "v5p", interpret=True))
    assert relative_error(out, attend(case, make_inputs(case))) < 8e-3


def test_attention_in_float32_is_exact_to_float32():
    case = Case(dtype="float32", kv_dtype="float32", q=3, contexts=(3, 70))
    assert relative_error(run(case, INTERPRETED), attend(case, make_inputs(case))) < 1e-5


@pytest.mark.parametrize("case", UPDATES, ids=str)
def test_update_is_the_reference_bit_for_bit(case):
    arguments = make_update(case)
    want = cache_update(**arguments, target=Target("reference"))
    got = cache_update(**arguments, target=INTERPRETED)
    assert not interpret_pallas_call.races.races_found
    for mine, theirs in zip(got, want, strict=True):
        if theirs is not None:
            np.testing.assert_array_equal(np.asarray(mine).view(np.uint8), np.asarray(theirs).view(np.uint8))


def test_limits_are_named():
    inputs = make_inputs(Case()).arrays()
    tpu = Target("tpu", "v5e")
    half = inputs | {"pages": inputs["pages"].astype(jnp.float16)}
    with pytest.raises(NotImplementedError, match="float16 has no matrix product"):
        paged_attention(**half, config=Case().config, target=tpu)
    wide = inputs | {"page_table": jnp.zeros((6, 40_000), jnp.int32)}
    with pytest.raises(NotImplementedError, match="page table of 6 x 40000 entries is over the 200000"):
        paged_attention(**wide, config=Case().config, target=tpu)
    huge = Case(q=512, heads=128, kv_heads=64, head_dim=256, contexts=(512,), q_block=512)
    with pytest.raises(NotImplementedError, match=r"bytes of VMEM, the limit is 50331648; shard the heads further"):
        paged_attention(**make_inputs(huge).arrays(), config=huge.config, target=Target("tpu", "v5p"))


def test_blocks_given_by_the_caller_do_not_change_the_result():
    case = Case(contexts=(90, 200), q=48, dtype="float32", kv_dtype="float32")
    results = [run(replace(case, kv_block=kv, q_block=q), INTERPRETED) for kv, q in ((None, None), (32, 16))]
    np.testing.assert_allclose(*results, rtol=2e-5, atol=2e-5)
