"""Dense products on weights that lie packed in panels.

XLA's CPU backend packs a weight anew in every product, and on processors with AMX the order of its sums depends on
the number of rows.  Here a weight is packed once, when it is loaded, and an output is one sum over the inputs in
order, whatever the number of rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from precast.kernels_pallas.native import library

# As in dense_product.cc.
PANEL, INPUTS = 32, 32
NO_GATE, GATES = 0, {"silu": 1, "gelu_tanh": 2}


def packed_shape(outputs: int, inputs: int, dtype: np.dtype) -> jax.ShapeDtypeStruct:
    """Of a packed ``[outputs, inputs]`` matrix: float32 ``[panels, inputs, PANEL]``; bfloat16 as its uint16 bits
    ``[panels, inputs / 2, PANEL, 2]``, the inputs filled up to a multiple of INPUTS."""
    panels = -(-outputs // PANEL)
    if dtype == np.float32:
        return jax.ShapeDtypeStruct((panels, inputs, PANEL), np.float32)
    return jax.ShapeDtypeStruct((panels, -(-inputs // INPUTS) * INPUTS // 2, PANEL, 2), np.uint16)


def pack(matrix: np.ndarray, out: np.ndarray) -> None:
    """Packs ``matrix [outputs, inputs]``, float32 or bfloat16 and contiguous, into ``out`` of ``packed_shape``."""
    outputs, inputs = matrix.shape
    assert matrix.dtype in (np.float32, jnp.bfloat16) and matrix.flags.c_contiguous and out.flags.c_contiguous
    assert out.shape == packed_shape(outputs, inputs, matrix.dtype).shape
    name = "precast_pack_f32" if matrix.dtype == np.float32 else "precast_pack_bf16"
    library.function(name)(matrix.ctypes.data, out.ctypes.data, outputs, inputs)


def dense_product(x: jax.Array, packed: jax.Array, outputs: int) -> jax.Array:
    """``[rows, inputs]`` times a packed matrix: ``[rows, outputs]`` float32; x is rounded to the matrix's dtype."""
    return _product(x, packed, outputs, outputs, NO_GATE)


def can_gate(activation: str, outputs: int) -> bool:
    """Whether there is a ``gated_product`` of this activation and so many outputs of both products together."""
    return activation in GATES and outputs % (2 * PANEL) == 0


def gated_product(x: jax.Array, packed: jax.Array, outputs: int, activation: str) -> jax.Array:
    """``activation(gate) * up`` of the two halves of ``dense_product``: ``[rows, outputs / 2]`` float32."""
    return _product(x, packed, outputs, outputs // 2, GATES[activation])


def _product(x: jax.Array, packed: jax.Array, outputs: int, columns: int, gate: int) -> jax.Array:
    result = jax.ShapeDtypeStruct((len(x), columns), jnp.float32)
    call = jax.ffi.ffi_call(library.target(library.DENSE, packed), result)
    return call(x.astype(jnp.float32), packed, outputs=np.int64(outputs), gate=np.int64(gate))


def packed_rows(packed: jax.Array, indices: jax.Array, inputs: int) -> jax.Array:
    """Rows ``indices [n]`` of a packed matrix, ``[n, inputs]`` float32."""
    result = jax.ShapeDtypeStruct((indices.shape[0], inputs), jnp.float32)
    return jax.ffi.ffi_call(library.target(library.ROWS, packed), result)(packed, indices)
