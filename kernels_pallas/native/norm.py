"""Norms over rows, one call where XLA's operations are five."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from precast.kernels_pallas.native import library


def norm(x: jax.Array, scale: jax.Array, eps: float, *, is_centred: bool) -> jax.Array:
    """Root-mean-square norm (arXiv:1910.07467), or layer norm without bias (arXiv:1607.06450) if it is centred.

    ``x [rows, width]``, ``scale [width]`` -> ``[rows, width]``, all float32; a row's result does not depend on the
    number of rows.
    """
    call = jax.ffi.ffi_call(library.NORM, jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return call(x.astype(jnp.float32), scale.astype(jnp.float32), eps=np.float32(eps), is_centred=is_centred)
