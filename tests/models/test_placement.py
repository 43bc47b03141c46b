"""The parts that devices hold, and the same logits under every placement."""

import json
import pathlib
import subprocess
import sys

import pytest

from precast.models.config import ModelConfig
from precast.models.placement import Placement
from precast.models.runs import runs
from precast.sharding.mesh import MeshSpec

SIZES = {
    "model_type": "case",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "head_dim": 8,
}


def model(num_heads=9, num_kv_heads=3, num_layers=2, **traits):
    return ModelConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, num_layers=num_layers, **SIZES, **traits)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (32, 8), (8, 8), (12, 1), (6, 2)])
def test_every_head_is_held_with_its_kv_head(heads, kv_heads):
    config = model(heads, kv_heads)
    group = heads // kv_heads
    for tensor in range(1, heads + 1):
        placement = Placement(mesh=MeshSpec(tensor=tensor))
        placement.check(config)
        held_heads, held_kv_heads = placement.local_heads(config)
        seen = []
        for device in range(tensor):
            queries = units(placement.pieces(config, "heads", heads, device))
            keys = units(placement.pieces(config, "kv_heads", kv_heads, device))
            assert (len(queries), len(keys)) == (held_heads, held_kv_heads)
            for i, head in enumerate(queries):
                if head is not None:
                    assert keys[i // (held_heads // held_kv_heads)] == head // group
                    seen.append(head)
        assert sorted(seen) == list(range(heads)), tensor


def units(pieces):
    return [
        unit
        for piece in pieces
        for unit in ([None] * piece if isinstance(piece, int) else range(piece.start, piece.stop))
    ]


@pytest.mark.parametrize("size", [1, 7, 8, 100, 49152])
@pytest.mark.parametrize("tensor", [1, 2, 3, 8])
def test_every_row_of_a_vocabulary_is_held_once(size, tensor):
    placement = Placement(mesh=MeshSpec(tensor=tensor))
    held = [units(placement.pieces(model(), "vocab", size, device)) for device in range(tensor)]
    assert len({len(one) for one in held}) == 1
    assert sorted(unit for one in held for unit in one if unit is not None) == list(range(size))


@pytest.mark.parametrize(
    ("traits", "mesh", "words"),
    [
        ({}, MeshSpec(tensor=10), "tensor is 10: the model has 9 heads; choose 1 to 9"),
        ({"qk_norm": "all"}, MeshSpec(tensor=2), "tensor is 2: .* choose one of 1, 3$"),
        ({}, MeshSpec(data=2), "data is 2: only tensor can be above 1"),
        ({}, MeshSpec(expert=4), "expert is 4: only tensor can be above 1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(traits, mesh, words):
    with pytest.raises(ValueError, match=words):
        Placement(mesh=mesh).check(model(**traits))


@pytest.mark.parametrize("text", ["tensor", "tensor=0", "tensor=-1", "tensor=2,tensor=2", "heads=2", "tensor=2.0"])
def test_a_mesh_that_makes_no_sense_is_refused(text):
    with pytest.raises(ValueError, match=r"^mesh"):
        MeshSpec.parse(text)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["full"] * 5, [(0, 1, 5)]),
        (["sliding", "full"] * 3, [(0, 2, 3)]),
        (["sliding"] * 5 + ["full"], [(0, 1, 5), (5, 1, 1)]),
        ((["sliding"] * 2 + ["full"]) * 2 + ["sliding"], [(0, 3, 2), (6, 1, 1)]),
    ],
)
def test_like_layers_are_stacked(kinds, expected):
    config = model(num_layers=len(kinds), layer_kinds=tuple(kinds), sliding_window=8)
    found = runs(config, True)
    assert [(run.first, len(run.positions), run.repeats) for run in found] == expected
    layers = sorted(layer for run in found for position in run.positions for layer in position.layers)
    assert layers == list(range(len(kinds)))
    assert all(run.repeats == 1 for run in runs(config, False))


@pytest.mark.parametrize("cases", [["llama"], ["gemma", "cohere", "olmo"], ["gpt_oss", "deepseek"]])
def test_every_placement_gives_the_logits_of_one_device(cases):
    script = pathlib.Path(__file__).with_name("placement_cases.py")
    child = subprocess.run([sys.executable, script, *cases], capture_output=True, text=True, timeout=500)
    assert child.returncode == 0, child.stderr[-2000:]
    results = [json.loads(line) for line in child.stdout.splitlines()]
    assert {name for name, *_ in results} == set(cases)
    for name, placement, difference, largest in results:
        assert difference < 5e-5 * largest, (name, placement)
