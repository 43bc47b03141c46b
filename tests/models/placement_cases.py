"""Run in a process of its own with 8 CPU devices: one model per case under several placements, against one CPU device.

Prints a line of JSON for each: case, placement, the largest difference of logits, the largest logit.
"""

import json
import os
import sys

os.environ["PJRT_NPROC"] = "16"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from precast.kernels_pallas.targets import Target
from precast.models import cache as kv_cache
from precast.models import layout, transformer
from precast.models.cache import Segment
from precast.models.config import MlaConfig, ModelConfig, MoeConfig, RopeConfig
from precast.models.params import param_specs
from precast.models.placement import Placement
from precast.sharding.mesh import MeshSpec

BASE = {
    "model_type": "case",
    "vocab_size": 331,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 100,
    "max_position_embeddings": 256,
}
ALTERNATING = {"num_layers": 4, "layer_kinds": ("sliding", "full") * 2, "sliding_window": 5}
CASES = {
    "llama": ModelConfig(**(BASE | {"num_heads": 9, "num_kv_heads": 3}), tie_embeddings=True),
    "gemma": ModelConfig(
        **(BASE | ALTERNATING),
        attention_soft_cap=20.0,
        logits_soft_cap=30.0,
        norm_offset=True,
        norm_placement="both",
        rope_sliding=RopeConfig(theta=100.0),
    ),
    "olmo": ModelConfig(**(BASE | {"num_kv_heads": 6}), qk_norm="all", norm_placement="post"),
    "cohere": ModelConfig(
        **BASE,
        norm_kind="layer",
        norm_placement="parallel",
        qk_norm="per_head",
        rope=RopeConfig(interleaved=True),
        mlp_bias=True,
        qkv_bias=True,
        output_bias=True,
    ),
    "gpt_oss": ModelConfig(
        **(BASE | ALTERNATING),
        attention_sinks=True,
        qkv_bias=True,
        output_bias=True,
        activation="swiglu_clamped",
        moe=MoeConfig(8, 2, 40, (True,) * 4, router="softmax_chosen", router_bias=True, expert_bias=True),
    ),
    "deepseek": ModelConfig(
        **(BASE | {"num_layers": 3, "num_kv_heads": 6, "head_dim": 24}),
        rope=RopeConfig(interleaved=True, rotary_dim=8),
        mla=MlaConfig(24, 32, 16, 8, 12),
        moe=MoeConfig(
            *(8, 2, 40, (False, True, True)),
            router="sigmoid",
            correction_bias=True,
            normalize=True,
            shared_intermediate_size=48,
            num_groups=4,
            groups_kept=2,
        ),
    ),
}
PLACEMENTS = {
    "llama": [("reference", 1), ("cpu", 2), ("cpu", 8), ("reference", 3)],
    "olmo": [("cpu", 2)],
    "gpt_oss": [("cpu", 3), ("reference", 2)],
}
# Two chunks of one sequence, another's first tokens, a row of padding; then a token more of both.
PREFILL = {"starts": [0, 8, 0, 0], "lengths": [8, 5, 8, 0], "page_table": [[1, 2], [1, 2], [3, 4], [5, 6]]}
DECODE = {"starts": [13, 8], "lengths": [1, 1], "page_table": [[1, 2], [3, 4]]}
LIVE = np.r_[0:13, 16:24, 32:34]


def segment(token_ids, fields):
    return Segment(token_ids, **{name: np.array(values, np.int32) for name, values in fields.items()})


def logits(config, placement):
    rng = np.random.default_rng(1)
    arrays = {}
    for name, spec in param_specs(config).items():
        is_norm = "norm" in name
        arrays[name] = (rng.standard_normal(spec.shape) * (0.1 if is_norm else 0.3) + is_norm).astype(np.float32)

    def read(name, index=None):
        return arrays[name] if index is None else arrays[name][index]

    placement.check(config)
    mesh = placement.mesh.build(np.array(jax.devices()))
    settings = {"dtype": "float32", "num_positions": 64, "placement": placement, "mesh": mesh}
    weights = layout.build(config, read, **settings)
    described = layout.shapes(config, **settings)
    for built, shape in zip(jax.tree.leaves(weights), jax.tree.leaves(described), strict=True):
        assert (built.shape, built.dtype) == (shape.shape, shape.dtype)
        assert built.sharding.is_equivalent_to(shape.sharding, built.ndim)
    spec = kv_cache.CacheSpec.of(config, num_pages=9, page_size=8, dtype="float32", placement=placement)
    rng = np.random.default_rng(0)
    prompt = segment(rng.integers(0, 300, (4, 8)).astype(np.int32), PREFILL)
    following = segment(rng.integers(0, 300, (2, 1)).astype(np.int32), DECODE)

    def run(weights):
        cache, first = transformer.forward(
            weights, kv_cache.create(spec), (prompt,), config=config, placement=placement
        )
        cache, second = transformer.forward(weights, cache, (following,), config=config, placement=placement)
        found = transformer.unembed(weights, jnp.concatenate([first, second]), config, placement)
        return placement.shard.gather(found, "vocab", 1)

    specs = jax.tree.map(lambda x: x.sharding.spec, described)
    program = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False))
    return np.asarray(program(weights))[LIVE, : config.vocab_size]


def main(cases):
    jax.config.update("jax_num_cpu_devices", 8)
    for name in cases:
        expected = logits(CASES[name], Placement())
        for backend, tensor in PLACEMENTS.get(name, [("reference", 2)]):
            found = logits(CASES[name], Placement(Target(backend), MeshSpec(tensor=tensor)))
            difference = float(np.abs(found - expected).max())
            placement = f"{backend} tensor={tensor}"
            print(json.dumps([name, placement, difference, float(np.abs(expected).max())]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
