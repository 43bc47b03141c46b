"""What the compiler made of the programs: nothing large is copied, the cache is updated in place."""

import itertools

import jax
import numpy as np
import pytest
import toy_models

from precast.models import cache as kv_cache
from precast.models import layout, transformer
from precast.models.placement import Placement
from precast.runtime import hlo, planning
from precast.runtime.config import EngineConfig, derive_shapes
from precast.runtime.programs import enumerate_programs

# Larger than any activation of the small model's steps, smaller than its larger weights.
LARGE_BYTES = 300_000


@pytest.fixture(scope="module", params=itertools.product(["float32", "bfloat16"], [False, True]), ids=str)
def compiled(request, tmp_path_factory):
    """The programs of a model whose weights and pages are larger than its activations, with its cache's bytes."""
    model = toy_models.random_llama(
        tmp_path_factory.mktemp("m"), vocab_size=4096, hidden_size=64, intermediate_size=2048, head_dim=16
    )
    dtype, is_native = request.param
    assert planning.own_library() is not None
    settings = EngineConfig(slots=2, token_budget=34, max_model_len=256, page_size=16, dtype=dtype)
    shapes = derive_shapes(settings, max_model_len=256, num_pages=33)
    placement = Placement(is_native=is_native)
    weights = layout.build(model.config, model.read, dtype=dtype, num_positions=256, placement=placement)
    spec = kv_cache.CacheSpec.of(model.config, num_pages=33, page_size=16, dtype=dtype, placement=placement)
    programs = enumerate_programs(model.config, shapes, weights, spec)
    chosen = [one for one in programs if one.name.startswith(("backbone", "head"))]
    return weights, spec, {one.name: one.lower().compile() for one in chosen}


def test_no_weight_and_no_cache_is_copied(compiled):
    weights, _, programs = compiled
    assert max(leaf.nbytes for leaf in jax.tree.leaves(weights)) > LARGE_BYTES
    for name, program in programs.items():
        assert not hlo.copies(program.as_text(), LARGE_BYTES), name


def test_the_cache_is_updated_in_place(compiled):
    _, spec, programs = compiled
    cache_bytes = spec.num_pages * spec.page_bytes
    for name, program in programs.items():
        analysis = program.memory_analysis()
        if name.startswith("backbone"):
            assert analysis.alias_size_in_bytes >= cache_bytes, name
        assert analysis.temp_size_in_bytes < cache_bytes + 2e6, name


def test_pages_are_as_large_as_the_spec_says():
    spec = kv_cache.CacheSpec(num_layers=3, num_pages=5, page_size=16, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    arrays = jax.tree.leaves(kv_cache.create(spec))
    assert sum(array.nbytes for array in arrays) == spec.num_pages * spec.page_bytes


@pytest.mark.parametrize(
    ("slots", "budget", "length"),
    [(1, 2, 64), (1, 33, 64), (4, 5, 64), (7, 23, 317), (32, 512, 2048), (256, 2048, 8192)],
)
def test_shapes_stay_within_the_budget_and_cover_what_can_happen(slots, budget, length):
    config = EngineConfig(slots=slots, token_budget=budget)
    shapes = derive_shapes(config, max_model_len=length, num_pages=9)
    assert shapes.decode_rows[-1] >= slots
    assert all(size % shapes.prefill_block == 0 for size in (*shapes.prefill_tokens, *shapes.mixed_tokens))
    # Two rows is the least that a program has, whatever the budget.
    assert shapes.prefill_tokens[-1] <= max(budget, 2)
    assert shapes.mixed_tokens[-1] + slots <= max(budget, slots + 2)


def test_head_weights_are_what_unembed_reads():
    weights = {"embed": np.zeros((4, 2)), "layers": (), "final_norm": np.zeros(2)}
    assert set(transformer.head_weights(weights)) == {"embed"}
    assert set(transformer.head_weights({**weights, "head": np.zeros((4, 2))})) == {"head"}
