"""The least work of a step, by the published sizes of models, and times by the chips' rates."""

import dataclasses

import pytest

from precast.kernels_pallas.targets import Target
from precast.models.config import MlaConfig, ModelConfig, MoeConfig
from precast.runtime.hlo import Account, Cost, Item
from precast.runtime.roofline import Step, kernel_costs, least, predict

LLAMA = ModelConfig("llama", 128256, 4096, 32, 32, 8, 128, 14336, 131072)
# a layer: queries and outputs, keys and values, gate, up and down
LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
TOKEN = 2 * 8 * 128


def test_decode_reads_the_weights_and_the_live_cache_once():
    work = least(LLAMA, Step(rows=64, queries=1, context=1000))
    assert work.weight_bytes == 2 * (32 * LAYER + 64 * 4096)
    assert work.cache_bytes == 2 * 64 * 1000 * 32 * TOKEN
    assert work.flops == 2 * 64 * 32 * (LAYER + 1000 * 32 * 256)
    assert work.bytes == work.weight_bytes + work.cache_bytes


def test_devices_share_heads_feed_forward_and_vocabulary():
    step = Step(rows=64, queries=1, context=1000, head=True)
    one, eight = least(LLAMA, step), least(LLAMA, step, tensor=8)
    assert one.weight_bytes - least(LLAMA, dataclasses.replace(step, head=False)).weight_bytes == 2 * 4096 * 128256
    assert eight.cache_bytes * 8 == one.cache_bytes and eight.flops * 8 == one.flops
    # the embedding's rows come to every device
    embedded = 2 * 64 * 4096
    assert (eight.weight_bytes - embedded) * 8 == one.weight_bytes - embedded
    # a KV head is held by two devices
    assert least(LLAMA, step, tensor=16).cache_bytes == eight.cache_bytes


def test_packed_weights_and_cache():
    work = least(LLAMA, Step(1, 1, 10), itemsize=0.5, cache_itemsize=1)
    assert work.weight_bytes == (32 * LAYER + 4096) // 2 and work.cache_bytes == 10 * 32 * TOKEN


def test_prefill_sees_half_of_its_own_keys():
    work = least(LLAMA, Step(rows=1, queries=512, context=512))
    assert work.flops == 2 * 512 * 32 * LAYER + 2 * 32 * 32 * 256 * 512 * 513 // 2


def test_a_window_bounds_the_live_cache():
    config = dataclasses.replace(LLAMA, num_layers=2, layer_kinds=("sliding", "full"), sliding_window=100)
    work = least(config, Step(rows=3, queries=1, context=1000))
    assert work.cache_bytes == 2 * 3 * (100 + 1000) * TOKEN


def test_a_mixture_reads_the_experts_that_tokens_visit():
    moe = MoeConfig(num_experts=16, experts_per_token=4, intermediate_size=512, layers=(True,) * 32)
    config = dataclasses.replace(LLAMA, moe=moe)
    attention, expert = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 4096 * 16, 3 * 4096 * 512
    for rows, experts in ((1, 4), (3, 12), (64, 16)):
        work = least(config, Step(rows, 1, 1))
        assert work.weight_bytes == 2 * (32 * (attention + experts * expert) + rows * 4096)
        assert work.flops == 2 * rows * 32 * (attention + 4 * expert + 32 * 256)


def test_a_latent_is_held_by_every_device():
    mla = MlaConfig(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    config = dataclasses.replace(LLAMA, mla=mla)
    one, eight = (least(config, Step(4, 1, 100), tensor=tensor) for tensor in (1, 8))
    assert one.cache_bytes == eight.cache_bytes == 2 * 4 * 100 * 32 * 576
    cost = kernel_costs(config, Step(4, 1, 100), tensor=8)["precast_paged_attention"]
    # 576 numbers fill 640 lanes; keys have 576, values 512
    assert cost == Cost(2 * 4 * 100 * 640, 2 * 4 * 100 * 4 * (576 + 512))


def test_time_is_that_of_the_slower_of_memory_and_products_and_of_the_links():
    items = (
        Item("main", "dot", "dot", "", 2, Cost(820 * 10**6, 10**9), 0),
        Item("main", "sum", "all-reduce", "", 4, Cost(0), 10**6),
    )
    prediction = predict(Account(items, ()), Target("tpu", "v6e"), devices=8)
    assert prediction is not None
    assert prediction.memory == pytest.approx(1e-3)
    # ring: each device passes on 2 * 7 / 8 of what it puts in
    assert prediction.collectives == pytest.approx(4 * 10**6 * 2 * 7 / 8 / 224e9)
    assert prediction.seconds == prediction.memory + prediction.collectives
    assert predict(Account(items, ()), Target("cpu")) is None
