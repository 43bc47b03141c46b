"""A compiled program's HLO text (``compiled.as_text()``) as small records, for every back end's way of printing it.

Only what ``hlo`` counts with is kept: instructions with their shapes, operands and attributes, by computation, and how
often each loop runs.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w-]*)\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) .*\{$")
_NAME = re.compile(r"%([\w.\-]+)")
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class Array:
    """One array of a shape. ``layout`` is printed text such as ``{1,0:T(8,128)(2,1)S(1)}``, or empty."""

    dtype: str
    dims: tuple[int, ...]
    layout: str

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits of an element; 0 for tokens."""
        digits = re.search(r"\d+", self.dtype)
        return int(digits.group()) if digits else 8 * (self.dtype == "pred")

    @property
    def bytes(self) -> int:
        """Bytes of the values, without padding of tiles."""
        return -(-self.elements * self.bits // 8)

    @property
    def on_chip(self) -> bool:
        """Whether a TPU holds it in a memory of its cores (``S(1)`` is VMEM); NVIDIA's ``S(1)`` is device memory."""
        space = re.search(r"S\((\d+)\)", self.layout)
        # 5 is the host's memory
        return bool(space) and "T(" in self.layout and space.group(1) not in ("0", "5")

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line. ``arrays``: the result's arrays, a tuple's in order; ``inside``: the text between the parentheses."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    inside: str
    attributes: str

    def attribute(self, pattern: str) -> str | None:
        """First group of a pattern in the attributes, or None."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None

    def called(self, attribute: str) -> str | None:
        """Name of the computation that an attribute (``calls``, ``body``, ...) names, or None."""
        return self.attribute(rf"\b{attribute}=%?([\w.\-]+)")

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from: ``jit(step)/while/body/dot_general``."""
        return self.attribute(r'op_name="([^"]*)"') or ""


@dataclass(frozen=True)
class Computation:
    """A list of instructions in the order of execution; ``root`` is the result."""

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.inside): i for i in self.instructions.values() if i.opcode == "parameter"}


@dataclass(frozen=True)
class Module:
    """A whole program. ``header`` is its first line."""

    header: str
    computations: Mapping[str, Computation]
    entry: Computation

    def trip_count(self, loop: Instruction, inside: Computation) -> int | None:
        """How often a ``while`` of the computation ``inside`` runs its body: what the compiler noted, or else what its
        scalar arithmetic gives from constants; None where it depends on data."""
        noted = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        if noted:
            return int(noted)
        start = inside.instructions[loop.operands[0]]
        condition, body = (self.computations[str(loop.called(part))] for part in ("condition", "body"))
        if start.opcode != "tuple" or body.root.opcode != "tuple":
            return None
        state: list[int | None] = [self._value(inside, name, []) for name in start.operands]
        for step in range(_MOST_STEPS):
            more = self._value(condition, condition.root.name, [state])
            if more is None:
                return None
            if not more:
                return step
            # what is not a number stays unknown
            state = [
                None if old is None else self._value(body, name, [state])
                for old, name in zip(state, body.root.operands, strict=True)
            ]
        return None

    def _value(self, computation: Computation, name: str, parameters: Sequence) -> int | None:
        """An integer scalar from constants and the given parameters (a number, or a tuple's list); else None."""
        instruction = computation.instructions[name]
        opcode, operands = instruction.opcode, instruction.operands
        if opcode != "parameter" and [array.elements for array in instruction.arrays] != [1]:
            return None
        if opcode == "constant":
            if re.fullmatch(r"-?\d+", instruction.inside):
                return int(instruction.inside)
            return {"true": 1, "false": 0}.get(instruction.inside)
        if opcode == "parameter":
            value = parameters[int(instruction.inside)] if parameters else None
            return value if isinstance(value, int) else None
        if opcode == "get-tuple-element":
            source = computation.instructions[operands[0]]
            if source.opcode != "parameter" or not parameters:
                return None
            return parameters[int(source.inside)][int(instruction.attribute(r"index=(\d+)") or 0)]
        values = []
        if opcode in _ARITHMETIC or opcode in ("fusion", "call", "compare"):
            values = [self._value(computation, operand, parameters) for operand in operands]
        if opcode in ("fusion", "call"):
            called = self.computations[str(instruction.called("calls") or instruction.called("to_apply"))]
            return self._value(called, called.root.name, values)
        if not values or None in values:
            return None
        if opcode == "compare":
            compare = _COMPARE[instruction.attribute(r"direction=(\w+)") or ""]
            return int(compare(*values))
        return int(_ARITHMETIC[opcode](*values))


_COMPARE = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt,
    "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip
_ARITHMETIC = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "minimum": min, "maximum": max,
    "and": operator.and_, "or": operator.or_, "copy": int, "convert": int, "bitcast": int, "reshape": int,
    "select": lambda chosen, yes, no: yes if chosen else no,
}  # fmt: skip


def parse(text: str) -> Module:
    """Reads a program.

    Raises ValueError where there is no entry computation, so no HLO.
    """
    computations: dict[str, Computation] = {}
    entry = header = None
    name, is_entry = "", False
    instructions: dict[str, Instruction] = {}
    root: Instruction | None = None
    for line in text.splitlines():
        if header is None:
            header = line
        elif line.startswith("}") and instructions:
            last = root or list(instructions.values())[-1]
            computations[name] = Computation(name, instructions, last)
            entry = computations[name] if is_entry else entry
            instructions, root = {}, None
        elif found := _INSTRUCTION.match(line):
            instruction = _instruction(found.group(2), line[found.end() :])
            instructions[instruction.name] = instruction
            root = instruction if found.group(1) else root
        elif found := _COMPUTATION.match(line):
            is_entry, name = bool(found.group(1)), found.group(2)
    if entry is None or header is None:
        raise ValueError("hlo: the text has no entry computation; it must be that of compiled.as_text()")
    return Module(header, computations, entry)


def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a printed shape, a tuple's in order."""
    return tuple(
        Array(dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim), layout)
        for dtype, dims, layout in _ARRAY.findall(shape)
    )


def _instruction(name: str, rest: str) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    found = _OPCODE.match(rest, end)
    if found is None:
        raise ValueError(f"hlo: instruction {name} has no opcode: {rest[:80]!r}")
    close = _closing(rest, found.end() - 1)
    inside = rest[found.end() : close]
    operands = tuple(_NAME.findall(inside)) if found.group(1) != "constant" else ()
    return Instruction(name, found.group(1), arrays(rest[:end]), operands, inside, rest[close + 1 :])


def _closing(text: str, start: int) -> int:
    """Where the parenthesis at ``start`` closes."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found.group() == "(" else -1
        if not depth:
            return found.start()
    raise ValueError(f"hlo: a parenthesis is never closed: {text[start : start + 80]!r}")
