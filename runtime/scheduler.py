"""Decides what each step computes: decode rows first, then prefill chunks in what is left of the token budget.

Order is by priority, then arrival, and strict: the head of the queue is never overtaken, so that everybody's
wait is bounded.  When pages run out the last in that order is preempted; it forgets its pages, not its tokens,
and resumes by computing them again.
"""

from __future__ import annotations

import bisect
import dataclasses

from precast.runtime import prefix
from precast.runtime.config import Shapes
from precast.runtime.pages import PagePool
from precast.runtime.sequence import Sequence

# Beyond this size a prefill segment that would be filled less than _LEAST_FILL takes the next smaller size, and the
# rest waits for the next step.
_SMALL_SEGMENT = 128
_LEAST_FILL = 0.75


@dataclasses.dataclass(frozen=True)
class Decode:
    """One token of a running sequence: its input stands at ``position``; num_sampled counts those before it."""

    sequence: Sequence
    position: int
    num_sampled: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens ``[start, start + length)`` of a sequence's known ones; the last chunk samples the next token."""

    sequence: Sequence
    start: int
    length: int
    samples: bool
    num_sampled: int


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step: its rows, and the shape that holds them (decode_rows or prefill_tokens 0 for no segment)."""

    decodes: tuple[Decode, ...]
    chunks: tuple[Chunk, ...]
    decode_rows: int
    prefill_tokens: int
    admitted: tuple[Sequence, ...]

    @property
    def sampling(self) -> tuple[Decode | Chunk, ...]:
        """What samples a token, in the order of the head's rows."""
        return (*self.decodes, *(chunk for chunk in self.chunks if chunk.samples))


class Scheduler:
    """Waiting and running sequences, and the pages and slots between them."""

    def __init__(self, shapes: Shapes, *, prefix_caching: bool) -> None:
        self.pool = PagePool(shapes.num_pages)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._shapes = shapes
        self._prefix_caching = prefix_caching
        self._free_slots = list(range(shapes.slots - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda one: one.order)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that has ended; its slot and pages are free at once.

        A step in flight may still write to them.  Steps run in order, and whoever gets a page writes each place
        before reading it, so that nothing of this is ever seen.
        """
        if sequence.slot is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
        else:
            self._vacate(sequence)

    def plan(self) -> StepPlan | None:
        """The next step, counted as launched from now on; None when nothing can run."""
        preempted_before = self.num_preemptions
        decodes = self._plan_decodes()
        may_admit = self.num_preemptions == preempted_before
        chunks, used, admitted = self._plan_chunks(bool(decodes), may_admit)
        if not decodes and not chunks:
            return None
        sizes = self._shapes.mixed_tokens if decodes else self._shapes.prefill_tokens
        rows = self._shapes.decode_rows
        return StepPlan(
            decodes=tuple(decodes),
            chunks=tuple(chunks),
            # Beside a prefill segment the decode segment has one size only, so that fewer programs are needed.
            decode_rows=(rows[-1] if chunks else _least(rows, len(decodes))) if decodes else 0,
            prefill_tokens=_least(sizes, used) if chunks else 0,
            admitted=tuple(admitted),
        )

    def remember_pages(self, sequence: Sequence) -> None:
        """Lets others find the full pages whose tokens are known and computed (or about to be)."""
        if not self._prefix_caching or sequence.slot is None:
            return
        full = min(sequence.num_launched, sequence.num_known_tokens) // self._shapes.page_size
        self._extend_keys(sequence, full)
        for page in range(sequence.num_remembered, full):
            self.pool.remember(sequence.page_ids[page], sequence.page_keys[page])
        sequence.num_remembered = max(full, sequence.num_remembered)

    def check_integrity(self) -> None:
        """Raises AssertionError unless pages and slots are all accounted for."""
        self.pool.check_integrity(sequence.page_ids for sequence in self.running)
        slots = [sequence.slot for sequence in self.running if sequence.slot is not None]
        assert sorted([*slots, *self._free_slots]) == list(range(self._shapes.slots)), "a slot is lost or taken twice"
        assert all(sequence.slot is None and not sequence.page_ids for sequence in self.waiting), "a waiter holds"

    def _plan_decodes(self) -> list[Decode]:
        decodes = []
        for sequence in list(self.running):
            if not sequence.is_decoding or not self._make_room(sequence):
                continue
            decodes.append(Decode(sequence, sequence.num_launched, sequence.num_sampled))
            sequence.num_launched += 1
            sequence.num_sampled += 1
        return decodes

    def _make_room(self, sequence: Sequence) -> bool:
        """Holds a page for the sequence's next token, preempting from the end; False if it went itself."""
        if sequence.num_launched // self._shapes.page_size < len(sequence.page_ids):
            return True
        while not self.pool.num_available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.hold(self.pool.allocate(1))
        return True

    def _plan_chunks(self, beside_decode: bool, may_admit: bool) -> tuple[list[Chunk], int, list[Sequence]]:
        """Chunks in order, the tokens of the segment that they fill, and who was admitted for them."""
        capacity = self._capacity(self._shapes.mixed_tokens if beside_decode else self._shapes.prefill_tokens)
        chunks: list[Chunk] = []
        admitted: list[Sequence] = []
        used = 0
        candidates = [sequence for sequence in self.running if sequence.num_unprefilled > 0]
        while used < capacity:
            if candidates:
                sequence = candidates.pop(0)
            elif may_admit and self.waiting and self._admit(self.waiting[0]):
                sequence = self.waiting.pop(0)
                admitted.append(sequence)
            else:
                break
            length = min(sequence.num_unprefilled, capacity - used)
            ends = length == sequence.num_unprefilled
            samples = ends and sequence.num_sampled < sequence.max_output
            chunks.append(Chunk(sequence, sequence.num_launched, length, samples, sequence.num_sampled))
            sequence.num_launched += length
            sequence.num_sampled += samples
            self.remember_pages(sequence)
            used += self._in_blocks(length)
        return chunks, used, admitted

    def _capacity(self, sizes: tuple[int, ...]) -> int:
        """Tokens of prefill to fill in this step: the size that holds all that waits, or one that pads less."""
        wanted = 0
        for sequence in [*self.running, *self.waiting]:
            remaining = sequence.num_known_tokens if sequence.slot is None else max(sequence.num_unprefilled, 0)
            wanted += self._in_blocks(remaining)
            if wanted >= sizes[-1]:
                return sizes[-1]
        size = _least(sizes, wanted)
        smaller = [one for one in sizes if one < size]
        if size > _SMALL_SEGMENT and smaller and wanted < _LEAST_FILL * size:
            return smaller[-1]
        return size

    def _admit(self, sequence: Sequence) -> bool:
        """Gives the sequence a slot and pages for all its known tokens and one more, or nothing."""
        if not self._free_slots:
            return False
        shared = self._find_prefix(sequence)
        pages = sequence.num_known_tokens // self._shapes.page_size + 1
        # An idle shared page is counted as available, but taking it up uses it.
        idle = sum(self.pool.is_idle(page_id) for page_id in shared)
        if pages - len(shared) + idle > self.pool.num_available:
            return False
        self.pool.share(shared)
        sequence.hold(shared)
        sequence.hold(self.pool.allocate(pages - len(shared)))
        sequence.slot = self._free_slots.pop()
        sequence.prefill_end = sequence.num_known_tokens
        sequence.num_launched = len(shared) * self._shapes.page_size
        sequence.num_sampled = len(sequence.output_ids)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_launched
        bisect.insort(self.running, sequence, key=lambda one: one.order)
        return True

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Pages that already hold the sequence's first tokens; at least one token is left to compute."""
        if not self._prefix_caching or sequence.is_scoring:
            return []
        found = []
        for page in range((sequence.num_known_tokens - 1) // self._shapes.page_size):
            self._extend_keys(sequence, page + 1)
            page_id = self.pool.find(sequence.page_keys[page])
            if page_id is None:
                break
            found.append(page_id)
        return found

    def _extend_keys(self, sequence: Sequence, count: int) -> None:
        size = self._shapes.page_size
        while len(sequence.page_keys) < count:
            page = len(sequence.page_keys)
            parent = sequence.page_keys[-1] if page else prefix.root_key(sequence.request.salt)
            tokens = sequence.token_ids(page * size, (page + 1) * size)
            sequence.page_keys.append(prefix.next_key(parent, tokens))

    def _preempt(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        self.num_preemptions += 1
        self.add(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_slots.append(sequence.held_slot)
        sequence.slot = None
        self.pool.release(sequence.let_go())

    def _in_blocks(self, tokens: int) -> int:
        """Tokens of a segment that a chunk takes up, rounded up to whole blocks."""
        block = self._shapes.prefill_block
        return -(-tokens // block) * block


def _least(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest size that holds ``wanted``."""
    return next(size for size in sizes if size >= wanted)
