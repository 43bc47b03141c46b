"""The few operations that Hopper, Blackwell, Mosaic GPU's interpreter and the releases of JAX from 0.10 to 0.12 spell
differently, behind one name each.

On a chip values live in registers under a layout and products run on the tensor cores, whose results Hopper leaves in
registers and Blackwell in a memory of their own; the interpreter of JAX 0.10 has neither layouts nor transposed
operands.  Kernels take an ``Ops`` and stay one text for all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# JAX 0.10 asks for an index, 0.12 takes none
_LOAD_INDEX = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
# JAX 0.12 asks for whole cache lines unless told otherwise
_STORE = getattr(plgpu, "store", None)
# JAX 0.10 has no place for it
_TAKES_COST = "cost_estimate" in inspect.signature(plgpu.kernel).parameters


def _transposed(ref):
    # the function is deprecated where the method exists
    return ref.transpose((1, 0)) if jax.__version_info__ >= (0, 11, 2) else plgpu.transpose_ref(ref, (1, 0))


@dataclass(frozen=True)
class Ops:
    """``sm``: the architecture that is compiled for; ``interpret``: run in the interpreter instead."""

    sm: str
    interpret: bool

    @property
    def blackwell(self) -> bool:
        return self.sm.startswith("sm_10")

    @property
    def layout(self):
        """How the result of a product lies in registers."""
        return plgpu.Layout.TCGEN05 if self.blackwell else plgpu.Layout.WGMMA

    @property
    def params(self):
        """What a kernel passes as ``interpret``."""
        return InterpretGPUParams(detect_races=True) if self.interpret else None

    @property
    def compiler_params(self) -> plgpu.CompilerParams:
        # the default semantics change with JAX 0.11
        return plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)

    def kernel(self, body: Callable[..., None], cost: pl.CostEstimate, **options: Any) -> Callable[..., Any]:
        """``plgpu.kernel`` for this target; ``options`` are its own."""
        if _TAKES_COST:
            options["cost_estimate"] = cost
        return plgpu.kernel(body, compiler_params=self.compiler_params, interpret=self.params, **options)

    def product_scratch(self, shape: tuple[int, int]) -> dict[str, Any]:
        """What ``product`` needs for a result of a shape, by name, to be allocated by the kernel."""
        if not self.blackwell or self.interpret:
            return {}
        return {"tensor_memory": plgpu.TMEM(shape, jnp.float32), "multiplied": plgpu.Barrier(orders_tensor_core=True)}

    def cast(self, x: jax.Array, layout) -> jax.Array:
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def full(self, shape: tuple[int, ...], value, layout) -> jax.Array:
        return self.cast(jnp.full(shape, value, jnp.float32), layout)

    def spread(self, x: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
        """Repeat a vector that lies along ``axis`` over a product's shape."""
        return self.cast(lax.broadcast_in_dim(x, shape, [axis]), self.layout)

    def iota(self, shape: tuple[int, ...], axis: int, layout=None) -> jax.Array:
        if self.interpret:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout or self.layout)

    def load(self, ref, layout) -> jax.Array:
        return ref[...] if self.interpret else plgpu.load(ref, *_LOAD_INDEX, layout=layout)

    def store(self, ref, x: jax.Array) -> None:
        """``ref[...] = x`` into device memory, in pieces of any size."""
        if self.interpret or _STORE is None:
            ref[...] = x
        else:
            _STORE(ref, x, optimized=False)

    def product(self, a, b, shape: tuple[int, int], refs, *, a_t=False, b_t=False, acc=None) -> jax.Array:
        """``a @ b`` (or ``acc + a @ b``) in float32; ``a`` is a shared-memory ref or registers, ``b`` a ref.

        ``a_t`` and ``b_t`` transpose a ref first; ``refs`` hold what ``product_scratch`` asked for.
        """
        if self.interpret:
            left, right = a[...], b[...]
            # the tensor cores read as bulk copies do; the interpreter is told so for the copy that comes next
            plgpu.commit_smem()
            out = jnp.dot(left.T if a_t else left, right.T if b_t else right, preferred_element_type=jnp.float32)
            return out if acc is None else acc + out
        left = _transposed(a) if a_t else a
        right = _transposed(b) if b_t else b
        if self.blackwell:
            plgpu.tcgen05_mma(refs["tensor_memory"], left, right, refs["multiplied"], accumulate=False)
            plgpu.barrier_wait(refs["multiplied"])
            out = plgpu.async_load_tmem(refs["tensor_memory"], layout=self.layout)
            plgpu.wait_load_tmem()
            return out if acc is None else acc + out

        def multiply(acc_ref):
            plgpu.wgmma(acc_ref, left, right)
            return acc_ref[...] if acc is None else None

        if acc is None:
            return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        summed: Any = pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(acc))
        return summed

    def store_transposed(self, ref, x: jax.Array) -> None:
        """``ref[...] = x.T`` into shared memory, visible to the tensor cores afterwards."""
        if self.interpret:
            ref[...] = x.T
        else:
            layout = plgpu.Layout.TCGEN05_TRANSPOSED if self.blackwell else plgpu.Layout.WGMMA_TRANSPOSED
            _transposed(ref)[...] = plgpu.layout_cast(x, layout)
        plgpu.commit_smem()
