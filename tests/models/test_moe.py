"""Routing, with values worked out by hand, and the grouped products."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from precast.models.config import MoeConfig
from precast.models.layers import grouped_linear
from precast.models.moe import route

SMALL = MoeConfig(num_experts=4, experts_per_token=2, intermediate_size=8, layers=(True,))
GROUPED = MoeConfig(
    num_experts=16,
    experts_per_token=2,
    intermediate_size=8,
    layers=(True,),
    router="sigmoid",
    normalize=True,
    num_groups=4,
    groups_kept=1,
    group_score="top2",
    correction_bias=True,
)


def chosen(logits, moe, bias=None):
    ids, mix = route(jnp.asarray([logits], jnp.float32), moe, None if bias is None else jnp.asarray(bias, jnp.float32))
    return ids[0].tolist(), np.asarray(mix[0])


@pytest.mark.parametrize(
    ("changes", "mix"),
    [
        ({}, [0.473991, 0.287490]),
        ({"normalize": True}, [0.622459, 0.377541]),
        ({"router": "softmax_chosen"}, [0.622459, 0.377541]),
        ({"normalize": True, "scaling": 2.5}, [2.5 * 0.622459, 2.5 * 0.377541]),
    ],
)
def test_softmax_weights(changes, mix):
    ids, got = chosen([1.0, 0.5, 0.0, -1.0], dataclasses.replace(SMALL, **changes))
    assert ids == [0, 1]
    np.testing.assert_allclose(got, mix, atol=1e-6)


def group_logits():
    logits = [-6.0] * 16
    logits[0], logits[4], logits[5] = 2.0, 0.6, 0.5
    return logits


def test_a_group_is_worth_its_best_two():
    ids, mix = chosen(group_logits(), GROUPED, [0.0] * 16)
    assert ids == [4, 5]
    np.testing.assert_allclose(mix, [0.5092, 0.4908], atol=1e-4)
    assert chosen(group_logits(), dataclasses.replace(GROUPED, group_score="max"), [0.0] * 16)[0][0] == 0


def test_excluded_groups_never_win_with_negative_scores():
    ids, mix = chosen(group_logits(), GROUPED, [-2.0] * 16)
    assert ids == [4, 5]
    np.testing.assert_allclose(mix, [0.5092, 0.4908], atol=1e-4)


def test_the_bias_enters_the_choice_only():
    bias = [0.0] * 16
    bias[8], bias[9] = 12.0, 12.0
    logits = [-18.0] * 16
    ids, mix = chosen(logits, GROUPED, bias)
    assert ids == [8, 9]
    np.testing.assert_allclose(mix, [0.5, 0.5], atol=1e-6)


def test_near_ties_are_told_apart_and_ties_take_the_lowest():
    assert chosen([0.0, 1e-4, 0.0, 0.0], SMALL)[0] == [1, 0]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_grouped_products(dtype):
    rng = np.random.default_rng(0)
    sizes = np.array([3, 0, 17, 1, 0, 8])
    kernel = rng.normal(size=(6, 24, 40)).astype(dtype)
    rows = rng.normal(size=(sizes.sum(), 40)).astype(dtype).astype(np.float32)
    expected = np.concatenate(
        [
            part @ matrix.astype(np.float32).T
            for part, matrix in zip(np.split(rows, np.cumsum(sizes)[:-1]), kernel, strict=True)
        ]
    )
    held = jnp.asarray(kernel.view(np.uint16) if dtype != np.float32 else kernel)
    compiled = jax.jit(grouped_linear).lower(jnp.asarray(rows), held, jnp.asarray(sizes)).compile()
    np.testing.assert_allclose(compiled(jnp.asarray(rows), held, jnp.asarray(sizes)), expected, atol=1e-4)
    copies = [
        line
        for line in (compiled.as_text() or "").splitlines()
        if "[6,24,40]" in line and ("copy(" in line or "convert(" in line)
    ]
    assert not copies
