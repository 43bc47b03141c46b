"""Sorted rows by their group's matrix, for mixtures of experts: the compiler's and JAX's kernels behind one function.

How the matrices lie is the backend's: ``[groups, in, out]`` where ``inputs_first`` says so, else ``[groups, out, in]``;
in the other order the TPU compiler copies all of them, and the GPU kernel reads either.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from precast.kernels_pallas.targets import Target

# The GPU kernel's tiles: rows, outputs (the largest that divides) and inputs.
_TILE_ROWS = 64
_TILE_OUTPUTS = (128, 64)
_TILE_INPUTS = 64
_STAGES = 4
# Widths of an expert that every backend takes without a copy are multiples of this.
WIDTH_MULTIPLE = 64


def inputs_first(target: Target) -> bool:
    """Whether the backend wants ``[groups, in, out]``."""
    return target.backend in ("tpu", "reference")


def grouped_product(rows: jax.Array, matrices: jax.Array, sizes: jax.Array, *, target: Target) -> jax.Array:
    """Group g's matrix times its ``sizes[g]`` rows.

    Args:
      rows: ``[rows, in]``, those of one group after the other; the sizes add up to all rows.
      matrices: one a group, in the backend's order of dimensions; the rows are cast to its dtype.
      sizes: ``[groups]`` int32.
      target: a TPU or Hopper GPU, or "reference".

    Returns:
      ``[rows, out]`` float32.

    Raises:
      NotImplementedError: a case that the target's kernel does not cover; the message names the limit.
    """
    rows = rows.astype(matrices.dtype)
    if inputs_first(target):
        return jax.lax.ragged_dot(rows, matrices, sizes, preferred_element_type=jnp.float32)
    if target.backend != "gpu" or not target.gpu.sm.startswith("sm_90"):
        raise NotImplementedError(f"grouped_product: {target.backend} {target.chip} has no kernel; Hopper GPUs have")
    # Its module needs the GPU part of Pallas, which other targets do without.
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    _, outputs, inputs = matrices.shape
    tile = next((size for size in _TILE_OUTPUTS if outputs % size == 0), None)
    if tile is None or inputs % _TILE_INPUTS or matrices.dtype.itemsize != 2:
        raise NotImplementedError(
            f"grouped_product: matrices {matrices.dtype.name} {matrices.shape} on {target.chip}: outputs must be a "
            f"multiple of {_TILE_OUTPUTS[-1]}, inputs of {_TILE_INPUTS}, the dtype 16 bits wide"
        )
    static = {
        "block_m": _TILE_ROWS,
        "block_n": tile,
        "block_k": _TILE_INPUTS,
        "max_concurrent_steps": _STAGES,
        "grid_block_n": 1,
        "transpose_rhs": True,
    }
    # like layers of a program share one trace and one lowering
    product = jax.jit(ragged_dot_mgpu.ragged_dot, static_argnames=tuple(static))
    out = product(
        rows,
        matrices,
        group_sizes=sizes,
        **static,
    )
    return out.astype(jnp.float32)
