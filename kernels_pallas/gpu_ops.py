"""Five operations that Mosaic GPU and its interpreter spell differently, behind one name each.

On a GPU values live in registers under a layout and products run on the tensor cores; the interpreter of JAX 0.10 has
neither layouts nor transposed operands.  Kernels take an ``Ops`` and stay one text for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclass(frozen=True)
class Ops:
    interpret: bool

    def cast(self, x: jax.Array, layout) -> jax.Array:
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def full(self, shape: tuple[int, ...], value, layout) -> jax.Array:
        return self.cast(jnp.full(shape, value, jnp.float32), layout)

    def iota(self, shape: tuple[int, ...], axis: int, layout) -> jax.Array:
        if self.interpret:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    def load(self, ref, layout) -> jax.Array:
        return ref[...] if self.interpret else plgpu.load(ref, (), layout=layout)

    def product(self, a, b, shape: tuple[int, int], *, a_t: bool = False, b_t: bool = False, acc=None) -> jax.Array:
        """``a @ b`` (or ``acc + a @ b``) in float32; ``a`` is a shared-memory ref or registers, ``b`` a ref.

        ``a_t`` and ``b_t`` transpose a ref first.
        """
        if self.interpret:
            left, right = a[...], b[...]
            out = jnp.dot(left.T if a_t else left, right.T if b_t else right, preferred_element_type=jnp.float32)
            return out if acc is None else acc + out
        left = plgpu.transpose_ref(a, (1, 0)) if a_t else a
        right = plgpu.transpose_ref(b, (1, 0)) if b_t else b

        def multiply(acc_ref):
            plgpu.wgmma(acc_ref, left, right)
            return acc_ref[...] if acc is None else None

        if acc is None:
            return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        out: Any = pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(acc))
        return out

    def store_transposed(self, ref, x: jax.Array) -> None:
        """``ref[...] = x.T`` into shared memory, visible to the tensor cores afterwards."""
        if self.interpret:
            ref[...] = x.T
        else:
            plgpu.transpose_ref(ref, (1, 0))[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()

    @property
    def params(self):
        """What a kernel passes as ``interpret``."""
        return InterpretGPUParams(detect_races=True) if self.interpret else None
