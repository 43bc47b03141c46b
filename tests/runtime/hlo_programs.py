"""Compiles small programs whose work is known by hand: ``python hlo_programs.py CHIP FOLDER`` writes their HLO texts.

CHIP is ``cpu`` (eight devices of it), a TPU generation or an NVIDIA chip; a process compiles for one.
"""

import os
import sys
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from precast.kernels_pallas import aot
from precast.kernels_pallas.paged_attention import AttentionConfig, paged_attention
from precast.kernels_pallas.targets import GPU_CHIPS, TPU_CHIPS, Target

CHIP = sys.argv[1] if __name__ == "__main__" else "cpu"
CONFIG = AttentionConfig(num_kv_heads=2, scale=1.0)
F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32


def product(x, w):
    return jnp.dot(x, w, preferred_element_type=F32)


def layers(x, weights):
    return lax.scan(lambda x, w: (jnp.tanh(product(x, w)), None), x, weights)[0]


def update(cache, row, at):
    return lax.dynamic_update_slice(cache, row, (at, 0))


def rows(table, ids):
    return table[ids]


def narrowed(w):
    return w.astype(BF16)


def until_small(x):
    return lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x * 0.5, x)


def summed(x):
    return lax.fori_loop(0, 3, lambda _, x: lax.psum(x * 0.5, "x"), x)


def attention(queries, pages, table, lens, starts):
    target = Target("tpu" if CHIP in TPU_CHIPS else "gpu", CHIP)
    return paged_attention(queries, pages, table, lens, starts, config=CONFIG, target=target)


# name: function, argument shapes and dtypes, donated arguments
PROGRAMS = {
    "product": (product, [((256, 512), F32), ((512, 1024), F32)], ()),
    "layers": (layers, [((8, 512), F32), ((12, 512, 512), F32)], ()),
    "update": (update, [((4096, 1024), F32), ((1, 1024), F32), ((), I32)], (0,)),
    "undonated": (update, [((4096, 1024), F32), ((1, 1024), F32), ((), I32)], ()),
    "rows": (rows, [((1 << 20, 128), F32), ((16,), I32)], ()),
    "narrowed": (narrowed, [((1024, 1024), F32)], ()),
    "until_small": (until_small, [((128,), F32)], ()),
    "summed": (summed, [((64, 128), F32)], ()),
}
KERNEL = (
    attention,
    [((4, 1, 8, 128), BF16), ((512, 16, 512), BF16), ((4, 32), I32), ((4,), I32), ((4,), I32)],
    (),
)


def main(folder: Path) -> None:
    devices = np.array(jax.devices())
    programs = PROGRAMS
    if CHIP != "cpu":
        devices = aot.topology_devices(Target("tpu" if CHIP in TPU_CHIPS else "gpu", CHIP))
        programs = PROGRAMS | {"kernel": KERNEL}
    mesh = Mesh(devices.reshape(-1)[:8], ("x",))
    everywhere = PartitionSpec()
    # one product, one call of the vendor's library
    options = {"xla_gpu_enable_triton_gemm": False} if CHIP in GPU_CHIPS else None
    for name, (function, arguments, donated) in programs.items():
        call = jax.shard_map(function, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
        shapes = [jax.ShapeDtypeStruct(*a, sharding=NamedSharding(mesh, everywhere)) for a in arguments]
        compiled = jax.jit(call, donate_argnums=donated).lower(*shapes).compile(options)
        (folder / name).write_text(compiled.as_text())


if __name__ == "__main__":
    main(Path(sys.argv[2]))
