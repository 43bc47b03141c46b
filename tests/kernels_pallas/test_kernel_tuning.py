"""Where block sizes come from, and what the scripts say on a host without an accelerator."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from precast.kernels_pallas.paged_attention import AttentionConfig, tuning
from precast.kernels_pallas.targets import GPU_CHIPS, TPU_CHIPS

CONFIG = AttentionConfig(num_kv_heads=8, scale=1.0)


def call(q: int = 1, rows: int = 32, page_size: int = 16, head_dim: int = 128, dtype=jnp.bfloat16):
    queries = jax.ShapeDtypeStruct((rows, q, 32, head_dim), jnp.bfloat16)
    return queries, jax.ShapeDtypeStruct((100, page_size, 16 * head_dim), dtype)


@pytest.mark.parametrize("chip", TPU_CHIPS.values(), ids=lambda chip: chip.name)
def test_tpu_blocks_fit_the_chip(chip):
    for q in (1, 4, 16, 512):
        queries, pages = call(q)
        kv_block, q_block = tuning.tpu_blocks(queries, pages, CONFIG, chip)
        assert kv_block % pages.shape[1] == 0 and q_block <= q
        assert tuning.tpu_vmem_bytes(queries, pages, CONFIG, kv_block, q_block) < chip.vmem_bytes


def test_gpu_splits_fill_the_chip_and_no_more():
    chip = GPU_CHIPS["h200"]
    one_row = tuning.gpu_blocks(*call(rows=1), 131072, CONFIG, chip)
    many_rows = tuning.gpu_blocks(*call(rows=256), 131072, CONFIG, chip)
    short = tuning.gpu_blocks(*call(rows=1), 512, CONFIG, chip)
    assert one_row.splits * 8 >= 4 * chip.num_sms and many_rows.splits == 1 and short.splits == 1
    assert one_row.swapped and not tuning.gpu_blocks(*call(q=512), 8192, CONFIG, chip).swapped
    assert 2 * one_row.smem_bytes <= chip.smem_bytes


def test_measured_sizes_win_over_analysis_and_the_caller_over_both(monkeypatch):
    measured = {"few-128-bfloat16": {"kv_block": 256}, "chunk-128-bfloat16": {"kv_block": 1024, "q_block": 64}}
    monkeypatch.setattr(tuning, "tuned", lambda chip: measured if chip == "v6e" else {})
    v6e, v5e = TPU_CHIPS["v6e"], TPU_CHIPS["v5e"]
    assert tuning.tpu_blocks(*call(), CONFIG, v6e) == (256, 1)
    assert tuning.tpu_blocks(*call(q=512), CONFIG, v6e) == (1024, 64)
    assert tuning.tpu_blocks(*call(q=512, dtype=jnp.int8), CONFIG, v6e) == tuning.tpu_blocks(
        *call(q=512, dtype=jnp.int8), CONFIG, v5e
    )
    given = AttentionConfig(num_kv_heads=8, scale=1.0, kv_block=128)
    assert tuning.tpu_blocks(*call(), given, v6e) == (128, 1)


@pytest.mark.parametrize("script", ["bench_kernels", "tune_kernels"])
def test_scripts_say_that_there_is_no_accelerator(script):
    path = Path(__file__).parents[2] / "scripts" / script
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no known accelerator here" in done.stdout, done.stdout + done.stderr
