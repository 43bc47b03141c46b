"""Counting a compiled program: small programs whose work is known by hand, from the CPU, TPU and NVIDIA compilers."""

import subprocess
import sys
from pathlib import Path

import pytest

from precast.runtime import hlo

SCRIPT = Path(__file__).with_name("hlo_programs.py")
CHIPS = ["cpu", "v6e", "h200"]
LAYER = 512 * 512 * 4


@pytest.fixture(scope="module", params=CHIPS)
def chip(request):
    return request.param


@pytest.fixture(scope="module")
def texts(chip, tmp_path_factory):
    """Name of a program of ``hlo_programs`` -> its text."""
    folder = tmp_path_factory.mktemp(chip)
    done = subprocess.run([sys.executable, str(SCRIPT), chip, str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_product_reads_its_operands_and_writes_its_result(texts):
    account = hlo.account(texts["product"])
    assert account.flops == 2 * 256 * 512 * 1024
    # on TPU both operands are copied into VMEM first, which counts once
    assert account.bytes == 4 * (256 * 512 + 512 * 1024 + 256 * 1024)


def test_a_loop_counts_as_often_as_it_runs(texts, chip):
    account = hlo.account(texts["layers"])
    assert account.flops == 12 * 2 * 8 * 512 * 512 and account.unknown_loops == ()
    copies = hlo.copies(texts["layers"], LAYER)
    if chip == "v6e":
        # each layer's weights once; the rest stays in VMEM
        assert 12 * LAYER < account.bytes < 12 * LAYER * 1.01 and not copies
    else:
        # these compilers take each layer's weights out of the stack first: read, written, read
        assert 3 * 12 * LAYER < account.bytes < 3 * 12 * LAYER * 1.05
        assert [copy.bytes for copy in copies] == [LAYER]


def test_a_loop_without_a_noted_count_is_calculated(texts):
    text = texts["layers"].replace('"known_trip_count"', '"unknown_trip_count"')
    assert hlo.account(text).flops == 12 * 2 * 8 * 512 * 512


def test_a_loop_that_depends_on_data_is_named(texts):
    once, often = (hlo.account(texts["until_small"], trip_count=n) for n in (1, 10))
    assert len(once.unknown_loops) == 1 and once.unknown_loops[0].startswith("while")
    assert often.bytes > 2 * once.bytes


def test_an_update_in_place_moves_the_update(texts):
    account = hlo.account(texts["update"])
    assert 2 * 4096 <= account.bytes < 2 * 4096 + 64
    assert hlo.aliased_parameters(texts["update"]) == {0: 4096 * 1024 * 4}
    assert hlo.copies(texts["update"], 1 << 20) == ()


def test_an_update_of_an_array_that_is_not_donated_copies_it(texts):
    (copy,) = hlo.copies(texts["undonated"], 4096 * 1024 * 4)
    assert copy.kind == "copy" and copy.shape == "f32[4096,1024]" and copy.bytes == 4096 * 1024 * 4
    assert hlo.aliased_parameters(texts["undonated"]) == {}
    assert hlo.account(texts["undonated"]).bytes >= 2 * 4096 * 1024 * 4


def test_a_gather_reads_the_rows_it_takes(texts):
    assert 2 * 16 * 128 * 4 <= hlo.account(texts["rows"]).bytes < 2 * 16 * 128 * 4 + 256


def test_a_conversion_of_a_weight_is_a_copy(texts):
    (copy,) = hlo.copies(texts["narrowed"], 1 << 20)
    assert copy.shape == "bf16[1024,1024]" and copy.bytes == 2 << 20
    assert hlo.copies(texts["narrowed"], (2 << 20) + 1) == ()


def test_collectives_in_a_loop(texts):
    text = texts["summed"]
    assert hlo.collectives(text) == {"all-reduce": 3} and hlo.collectives(text, static=True) == {"all-reduce": 1}
    assert hlo.account(text).collective_bytes == 3 * 64 * 128 * 4


def test_a_kernel_counts_what_it_is_told(texts, chip):
    if chip == "cpu":
        assert "kernel" not in texts
        return
    target = {"v6e": "tpu_custom_call", "h200": "mosaic_gpu_v2"}[chip]
    assert hlo.custom_calls(texts["kernel"]) == {target: 1}
    live = 100 * 512 * 2
    told = hlo.account(texts["kernel"], kernels={"precast_paged_attention": hlo.Cost(live, 7)})
    # queries and results beside the pages; on NVIDIA the parts of a split context too
    assert live < told.bytes < live + 100_000 and told.flops == 7
    if chip == "v6e":
        # four full rows of 32 pages with 16 tokens; queries and results
        estimate = 4 * 32 * 16 * 512 * 2 + 2 * 4 * 8 * 128 * 2
        assert estimate <= hlo.account(texts["kernel"]).bytes < estimate + 4096


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        hlo.account("HloModule nothing")
