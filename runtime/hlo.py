"""What a compiled program moves and computes, counted from its HLO text, per device and per run.

XLA's own ``cost_analysis`` counts the body of a loop once and is missing on NVIDIA; here loops count as often as they
run.  An instruction moves what it reads and writes in the device's memory:

* a fusion that only slices or gathers from an operand reads the slice; an update in place writes the update;
* what a TPU keeps in VMEM or SMEM costs nothing there, so a weight prefetched into VMEM is counted when it is copied
  in and not again when it is used;
* bitcasts, tuples and parameters cost nothing; the start of an asynchronous operation counts, its end does not;
* a Pallas kernel moves what the caller says, else what its cost estimate says (which assumes full page tables), else
  its operands and results.

What the caches of a GPU or CPU save is not subtracted, and padding of tiles is not added.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from precast.runtime.hlo_text import Computation, Instruction, Module, parse
from precast.runtime.hlo_work import COLLECTIVES, Cost, called, instruction_cost, kernel_cost, results

__all__ = ["COLLECTIVES", "Account", "Copy", "Cost", "Item", "account", "aliased_parameters", "collectives", "copies",
           "custom_calls"]  # fmt: skip

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "add-dependency", "domain",
}  # fmt: skip
# What moves values without computing with them; in a fusion they may stand beside _FREE and what indices take.
_MOVES = {
    "copy", "transpose", "convert", "bitcast-convert", "reshape", "slice", "dynamic-slice", "pad", "concatenate",
    "reverse",
}  # fmt: skip
_BESIDE_MOVES = {*_FREE, "broadcast", "iota"}


@dataclass(frozen=True)
class Item:
    """One instruction that does work: the cost of one run of it, of which there are ``times``.

    kind: its opcode (of an asynchronous one, without ``-start``); for a custom call ``custom-call:<target>``.
    sent_bytes: what a collective takes in; 0 for others.
    """

    computation: str
    name: str
    kind: str
    op_name: str
    times: int
    cost: Cost
    sent_bytes: int

    @property
    def bytes(self) -> int:
        return self.times * self.cost.bytes

    def __str__(self) -> str:
        return f"{self.bytes} bytes: {self.times} x {self.name} ({self.kind}) in {self.computation}, {self.op_name}"


@dataclass(frozen=True)
class Account:
    """What one run of a program does on one device.

    items: the instructions that do work, those that move most first.
    unknown_loops: names of loops whose count depends on data.
    """

    items: tuple[Item, ...]
    unknown_loops: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes read and written in the device's memory."""
        return sum(item.bytes for item in self.items)

    @property
    def flops(self) -> int:
        """Operations of matrix products and kernels; an addition and a multiplication are two."""
        return sum(item.times * item.cost.flops for item in self.items)

    @property
    def collectives(self) -> dict[str, int]:
        """Collectives that are run, by kind."""
        return _counts((item.kind, item.times) for item in self.items if item.kind in COLLECTIVES)

    @property
    def collective_bytes(self) -> int:
        """Bytes that go into collectives."""
        return sum(item.times * item.sent_bytes for item in self.items)

    @property
    def custom_calls(self) -> dict[str, int]:
        """Custom calls that are run, by target."""
        calls = [item for item in self.items if item.kind.startswith("custom-call:")]
        return _counts((item.kind.partition(":")[2], item.times) for item in calls)


@dataclass(frozen=True)
class Copy:
    """An instruction that only moves values into the device's memory; ``bytes`` of ``shape``, its result."""

    computation: str
    name: str
    kind: str
    shape: str
    bytes: int
    op_name: str

    def __str__(self) -> str:
        return f"{self.name} = {self.shape} {self.kind} in {self.computation}, {self.op_name}"


def account(text: str, *, kernels: Mapping[str, Cost] | None = None, trip_count: int = 1) -> Account:
    """Counts a program.

    Args:
      text: ``compiled.as_text()``.
      kernels: for paged kernels, by a part of the name in the traced program such as ``precast_paged_attention``, what
        one call moves of the pages, and its flops; it stands above the estimate in the text.
      trip_count: how often loops run whose count depends on data.

    Raises ValueError where the text is not HLO.
    """
    walk = _Walk(parse(text), kernels or {}, trip_count)
    items = walk.items(walk.module.entry, 1)
    return Account(tuple(sorted(items, key=lambda item: -item.bytes)), tuple(dict.fromkeys(walk.unknown_loops)))


def collectives(text: str, *, static: bool = False) -> dict[str, int]:
    """Collectives by kind: how many one run performs, or with ``static`` how many stand in the program."""
    items = [item for item in account(text).items if item.kind in COLLECTIVES]
    return _counts((item.kind, 1 if static else item.times) for item in items)


def custom_calls(text: str) -> dict[str, int]:
    """Custom calls that one run performs, by target."""
    return account(text).custom_calls


def aliased_parameters(text: str) -> dict[int, int]:
    """Entry parameters whose buffers results reuse, with the bytes of each: what is donated in fact."""
    module = parse(text)
    aliases = module.header.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
    numbers = sorted(map(int, re.findall(r"\}: \((\d+), \{", aliases)))
    return {n: sum(array.bytes for array in module.entry.parameters[n].arrays) for n in numbers}


def copies(text: str, least_bytes: int) -> tuple[Copy, ...]:
    """Instructions that only move or convert values (copies, transposes, slices taken out of an array, fusions of such)
    and whose result, in the device's memory, is at least ``least_bytes``.

    With the size of the smallest weight, or of the cache, it finds each copy of one.  What a TPU copies to VMEM is not
    among them.
    """
    module = parse(text)
    found = []
    for computation in _executed(module):
        for instruction in computation.instructions.values():
            made = results(computation, instruction)
            large = [array for array in made if array.bytes >= least_bytes and not array.on_chip]
            if large and _is_move(module, instruction):
                kind = instruction.opcode.removesuffix("-start")
                place = (computation.name, instruction.name, kind)
                found.append(Copy(*place, str(large[0]), large[0].bytes, instruction.op_name))
    return tuple(found)


def _is_move(module: Module, instruction: Instruction) -> bool:
    if instruction.opcode != "fusion":
        return instruction.opcode.removesuffix("-start") in _MOVES
    inside = called(module, instruction).instructions.values()
    rest = [each for each in inside if each.opcode not in _BESIDE_MOVES]
    return bool(rest) and all(_is_move(module, each) for each in rest)


def _executed(module: Module) -> Iterator[Computation]:
    """The computations whose instructions run as they stand: the entry, and bodies, branches and calls below it."""
    names = [module.entry.name]
    for name in names:
        computation = module.computations[name]
        yield computation
        below = [each for i in computation.instructions.values() for each in _handed_over(i)]
        names += [each for each in dict.fromkeys(below) if each not in names]


def _handed_over(instruction: Instruction) -> list[str]:
    """Names of the computations that control flow hands over to."""
    if instruction.opcode == "while":
        return [str(instruction.called("condition")), str(instruction.called("body"))]
    if instruction.opcode == "conditional":
        listed = instruction.attribute(r"branch_computations=\{([^}]*)\}")
        if listed is not None:
            return re.findall(r"%?([\w.\-]+)", listed)
        return [str(instruction.called(f"{truth}_computation")) for truth in ("true", "false")]
    if instruction.opcode in ("call", "call-start", "async-start"):
        return [str(instruction.called("to_apply") or instruction.called("calls"))]
    return []


def _counts(pairs) -> dict[str, int]:
    counts: collections.Counter[str] = collections.Counter()
    for name, times in pairs:
        counts[name] += times
    return dict(sorted(counts.items()))


class _Walk:
    """Follows the control flow of a module and makes the items."""

    def __init__(self, module: Module, kernels: Mapping[str, Cost], trip_count: int):
        self.module, self.kernels, self.trip_count = module, kernels, trip_count
        self.unknown_loops: list[str] = []

    def items(self, computation: Computation, times: int) -> list[Item]:
        items = []
        for instruction in computation.instructions.values():
            below = [self.module.computations[name] for name in _handed_over(instruction)]
            if instruction.opcode == "while":
                trips = self.module.trip_count(instruction, computation)
                if trips is None:
                    self.unknown_loops.append(instruction.name)
                    trips = self.trip_count
                condition, body = below
                items += self.items(condition, times * (trips + 1)) + self.items(body, times * trips)
            elif below:
                # of a conditional's branches the one that moves most
                lists = [self.items(branch, times) for branch in below]
                items += max(lists, key=lambda branch: sum(item.bytes for item in branch))
            elif instruction.opcode not in _FREE and not instruction.opcode.endswith(("-done", "-update")):
                items.append(self._item(computation, instruction, times))
        return items

    def _item(self, computation: Computation, instruction: Instruction, times: int) -> Item:
        kind = instruction.opcode.removesuffix("-start")
        cost, sent = instruction_cost(self.module, computation, instruction), 0
        if kind == "custom-call":
            kind += ":" + (instruction.attribute(r'custom_call_target="([^"]*)"') or "")
            cost = self._kernel_cost(computation, instruction) or cost
        inside, collective = self._collective(computation, instruction)
        if collective is not None:
            kind = collective.opcode.removesuffix("-start")
            operands = [inside.instructions[name] for name in collective.operands]
            sent = sum(array.bytes for operand in operands for array in operand.arrays)
        return Item(computation.name, instruction.name, kind, instruction.op_name, times, cost, sent)

    def _collective(self, computation: Computation, instruction: Instruction) -> tuple[Computation, Instruction | None]:
        """The collective that an instruction is, or that a TPU has fused with its neighbours."""
        if instruction.opcode == "fusion":
            computation = called(self.module, instruction)
            inside = computation.instructions.values()
        else:
            inside = [instruction]
        return computation, next((i for i in inside if i.opcode.removesuffix("-start") in COLLECTIVES), None)

    def _kernel_cost(self, computation: Computation, call: Instruction) -> Cost | None:
        for name, cache in self.kernels.items():
            if name in call.op_name:
                return kernel_cost(computation, call, cache)
        estimate = call.attribute(r'"cost_estimate":\{([^}]*)\}')
        if estimate is None:
            return None
        numbers = dict(re.findall(r'"(\w+)":"(\d+)"', estimate))
        return Cost(int(numbers.get("bytes_accessed", 0)), int(numbers.get("flops", 0)))
