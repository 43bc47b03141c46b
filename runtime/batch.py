"""From a step's plan to its arrays: packed and padded to a planned shape.

Arrays are made anew for every step: one in flight may still be read by the device.
"""

from __future__ import annotations

import numpy as np

from precast.models.cache import Segment
from precast.runtime.config import Shapes
from precast.runtime.programs import MAX_BANNED_IDS
from precast.runtime.request import MAX_LOGIT_BIAS
from precast.runtime.sample import Rows, SlotOptions
from precast.runtime.scheduler import Chunk, StepPlan
from precast.runtime.sequence import Sequence
from precast.runtime.step import BackboneInputs, DecodeInputs

# Dividing by less than this can overflow float32; such a temperature picks the likeliest token anyway.
GREEDY_BELOW = 1e-5


def pack(plan: StepPlan, shapes: Shapes) -> BackboneInputs:
    """The backbone's inputs for a step."""
    decode = _pack_decodes(plan, shapes) if plan.decode_rows else None
    prefill, ends = _pack_chunks(plan, shapes) if plan.prefill_tokens else (None, [])
    select = np.zeros(shapes.head_rows, np.int32)
    selected = [*range(len(plan.decodes)), *(plan.decode_rows + end for end in ends)]
    select[: len(selected)] = selected
    return BackboneInputs(decode=decode, prefill=prefill, select=select)


def pack_rows(plan: StepPlan, shapes: Shapes) -> Rows:
    """The head's rows for a step, padded to a planned number with the dummy slot."""
    sampling = plan.sampling
    size = next(rows for rows in shapes.decode_rows if rows >= len(sampling))
    slots = np.full(size, shapes.slots, np.int32)
    num_sampled = np.zeros(size, np.int32)
    slots[: len(sampling)] = [one.sequence.held_slot for one in sampling]
    num_sampled[: len(sampling)] = [one.num_sampled for one in sampling]
    return Rows(slots=slots, num_sampled=num_sampled)


def pack_targets(plan: StepPlan, shapes: Shapes) -> np.ndarray:
    """``[prefill tokens]`` int32: the token after each of the segment's, for scoring; 0 where there is none."""
    targets = np.zeros(plan.prefill_tokens, np.int32)
    for chunk, first in zip(plan.chunks, chunk_offsets(plan, shapes), strict=True):
        known = chunk.sequence.token_ids(chunk.start + 1, chunk.start + 1 + chunk.length)
        targets[first : first + len(known)] = known
    return targets


def chunk_offsets(plan: StepPlan, shapes: Shapes) -> list[int]:
    """Where each chunk starts in the prefill segment."""
    offsets, at = [], 0
    for chunk in plan.chunks:
        offsets.append(at)
        at += -(-chunk.length // shapes.prefill_block) * shapes.prefill_block
    return offsets


def slot_options(sequence: Sequence) -> SlotOptions:
    """A sequence's sampling options as the device keeps them."""
    params = sequence.request.params
    bias_ids = np.zeros(MAX_LOGIT_BIAS, np.int32)
    bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    for i, (token_id, value) in enumerate((params.logit_bias or {}).items()):
        bias_ids[i], bias_values[i] = token_id, value
    banned = np.full(MAX_BANNED_IDS, -1, np.int32)
    banned[: len(sequence.stop_ids)] = sorted(sequence.stop_ids)
    seed = sequence.seed % 2**64
    return SlotOptions(
        temperature=np.float32(params.temperature if params.temperature >= GREEDY_BELOW else 0.0),
        top_k=np.int32(min(max(params.top_k, 0), 2**31 - 1)),
        top_p=np.float32(params.top_p),
        min_p=np.float32(params.min_p),
        repetition_penalty=np.float32(params.repetition_penalty),
        presence_penalty=np.float32(params.presence_penalty),
        frequency_penalty=np.float32(params.frequency_penalty),
        seed=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        bias_ids=bias_ids,
        bias_values=bias_values,
        banned_ids=banned,
        min_tokens=np.int32(min(params.min_tokens, 2**31 - 1)),
        want_logprobs=np.bool_(params.logprobs is not None),
    )


def admitted_tokens(sequence: Sequence, shapes: Shapes) -> np.ndarray:
    """``[max_model_len]`` int32: the sequence's known tokens, padded."""
    token_ids = np.zeros(shapes.max_model_len, np.int32)
    known = sequence.token_ids(0, sequence.num_known_tokens)
    token_ids[: len(known)] = known
    return token_ids


def _pack_decodes(plan: StepPlan, shapes: Shapes) -> DecodeInputs:
    rows, live = plan.decode_rows, len(plan.decodes)
    slots = np.full(rows, shapes.slots, np.int32)
    starts = np.zeros(rows, np.int32)
    lengths = np.zeros(rows, np.int32)
    page_table = np.zeros((rows, shapes.table_width), np.int32)
    slots[:live] = [one.sequence.held_slot for one in plan.decodes]
    starts[:live] = [one.position for one in plan.decodes]
    lengths[:live] = 1
    for row, one in enumerate(plan.decodes):
        page_table[row] = one.sequence.page_table
    _check_pages(page_table, shapes)
    return DecodeInputs(slots=slots, starts=starts, lengths=lengths, page_table=page_table)


def _pack_chunks(plan: StepPlan, shapes: Shapes) -> tuple[Segment, list[int]]:
    """The prefill segment, and for each chunk that samples the index of its last token in it."""
    block = shapes.prefill_block
    blocks = plan.prefill_tokens // block
    token_ids = np.zeros((blocks, block), np.int32)
    starts = np.zeros(blocks, np.int32)
    lengths = np.zeros(blocks, np.int32)
    page_table = np.zeros((blocks, shapes.table_width), np.int32)
    ends = []
    for chunk, offset in zip(plan.chunks, chunk_offsets(plan, shapes), strict=True):
        first = offset // block
        rows = slice(first, first + -(-chunk.length // block))
        token_ids.reshape(-1)[offset : offset + chunk.length] = _tokens(chunk)
        starts[rows] = np.arange(chunk.start, chunk.start + chunk.length, block)
        lengths[rows] = np.minimum(block, chunk.start + chunk.length - starts[rows])
        page_table[rows] = chunk.sequence.page_table
        if chunk.samples:
            ends.append(offset + chunk.length - 1)
    _check_pages(page_table, shapes)
    return Segment(token_ids=token_ids, starts=starts, lengths=lengths, page_table=page_table), ends


def _tokens(chunk: Chunk) -> np.ndarray:
    return chunk.sequence.token_ids(chunk.start, chunk.start + chunk.length)


def _check_pages(page_table: np.ndarray, shapes: Shapes) -> None:
    """JAX clips or drops an index out of range without a word, so it is caught here."""
    if page_table.min() < 0 or page_table.max() >= shapes.num_pages:
        raise IndexError(
            f"page table holds {page_table.min()} to {page_table.max()}: pages are 0 to {shapes.num_pages - 1}"
        )
