"""What one instruction of a compiled program reads, writes and computes. ``hlo`` tells by which rules."""

from __future__ import annotations

import collections
import math
import re
from dataclasses import dataclass

import numpy as np

from precast.kernels_pallas.native import library
from precast.runtime.hlo_text import Array, Computation, Instruction, Module

COLLECTIVES = (
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
    "reduce-scatter",
)  # fmt: skip
_SLICES = ("slice", "dynamic-slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")
# an element of the result depends on more of an operand than the elements at its place
_MIXING = (
    "dot", "convolution", "reduce", "reduce-window", "broadcast", "sort", "fft", "custom-call", "cholesky",
    "triangular-solve", "select-and-scatter", *_UPDATES, *COLLECTIVES,
)  # fmt: skip
_ALL = 1 << 62


@dataclass(frozen=True)
class Cost:
    """Work of one run on one device: bytes read and written in its memory, and operations of its matrix products."""

    bytes: int
    flops: int = 0


def instruction_cost(module: Module, inside: Computation, instruction: Instruction) -> Cost:
    """The cost of one run of an instruction of the computation ``inside`` that is no control flow."""
    return Cost(_moved(module, inside, instruction), _flops(module, inside, instruction))


def kernel_cost(inside: Computation, call: Instruction, cache: Cost) -> Cost:
    """The cost of a paged kernel that moves ``cache.bytes`` of its pages and their scales: with its other operands and
    results.  The pages are the largest operand; what has as many rows is paged too."""
    operands = [inside.instructions[name].arrays for name in call.operands]
    pages = max((arrays[0] for arrays in operands), key=lambda array: array.bytes)
    others = [() if arrays[0].dims[:1] == pages.dims[:1] else arrays for arrays in operands]
    return Cost(_custom_call_bytes(call, others) + cache.bytes, cache.flops)


def results(inside: Computation, instruction: Instruction) -> tuple[Array, ...]:
    """The arrays that an instruction makes: the start of an asynchronous one lists more."""
    arrays = instruction.arrays
    if instruction.opcode == "copy-start":
        return arrays[:1]
    if not instruction.opcode.endswith("-start") or len(arrays) == 1:
        return arrays
    # (operands, results, contexts); contexts are scalars
    after = arrays[sum(len(inside.instructions[name].arrays) for name in instruction.operands) :]
    return tuple(array for array in after if array.dims) or arrays[-1:]


def called(module: Module, instruction: Instruction) -> Computation:
    """The computation of a fusion."""
    return module.computations[str(instruction.called("calls"))]


def _moved(module: Module, inside: Computation, instruction: Instruction) -> int:
    operands = [inside.instructions[name].arrays for name in instruction.operands]
    if instruction.opcode == "copy-start":
        return _device_bytes(instruction.arrays[:2])
    if instruction.opcode == "custom-call":
        return _custom_call_bytes(instruction, operands)
    written = results(inside, instruction)
    read = _reads(module, instruction, sum(array.elements for array in written))
    total = 0
    for arrays, elements in zip(operands, read, strict=True):
        total += sum(_part(array, elements) for array in arrays if not array.on_chip)
    sizes = _writes(module, inside, instruction, written)
    return total + sum(size for array, size in zip(written, sizes, strict=True) if not array.on_chip)


def _device_bytes(arrays: tuple[Array, ...]) -> int:
    return sum(array.bytes for array in arrays if not array.on_chip)


def _part(array: Array, elements: int) -> int:
    return -(-min(elements, array.elements) * array.bits // 8)


def _custom_call_bytes(call: Instruction, operands: list[tuple[Array, ...]]) -> int:
    """Operands and results, without those that are one buffer and without a library's workspace."""
    aliasing = call.attributes.partition("output_to_operand_aliasing={")[2].partition(")}")[0]
    pairs = re.findall(r"\{([\d, ]*)\}: \((\d+)", aliasing)
    inputs = {int(operand) for _, operand in pairs}
    outputs = {int(output.split(",")[0] or 0) for output, _ in pairs}
    if f'"{library.ATTENTION}_' in call.attributes:
        # How much of the pages is read depends on the contexts.
        inputs |= {1, 2}
    if f'"{library.ROWS}_' in call.attributes:
        # Of the table as much as is written.
        inputs.add(0)
    if "__cublas$" in call.attributes and len(call.arrays) > 1:
        outputs.add(len(call.arrays) - 1)
    total = sum(_device_bytes(arrays) for n, arrays in enumerate(operands) if n not in inputs)
    return total + _device_bytes(tuple(array for n, array in enumerate(call.arrays) if n not in outputs))


def _reads(module: Module, instruction: Instruction, wanted: int, in_place: bool = True) -> list[int]:
    """Elements of each operand that are read for ``wanted`` elements of the result; what is more than all is all."""
    opcode, count = instruction.opcode.removesuffix("-start"), len(instruction.operands)
    if not wanted:
        return [0] * count
    if opcode == "fusion":
        return _fusion_reads(module, instruction, wanted)
    if opcode in _SLICES:
        return [wanted, *[_ALL] * (count - 1)]
    if opcode in _UPDATES and in_place:
        return [0, *[_ALL] * (count - 1)]
    return [_ALL if opcode in _MIXING else wanted] * count


def _fusion_reads(module: Module, fusion: Instruction, wanted: int) -> list[int]:
    inside = called(module, fusion)
    demand = collections.Counter({inside.root.name: wanted})
    in_place = {update.name for update in _updates_in_place(module, inside) if update is not None}
    for instruction in reversed(list(inside.instructions.values())):
        size = sum(array.elements for array in instruction.arrays)
        reads = _reads(module, instruction, min(demand[instruction.name], size), instruction.name in in_place)
        for operand, elements in zip(instruction.operands, reads, strict=True):
            demand[operand] += elements
    return [demand[inside.parameters[n].name] for n in range(len(fusion.operands))]


@dataclass(frozen=True)
class _Update:
    """An array of a fusion's result that is one of its parameters but for ``bytes``."""

    name: str
    bytes: int


def _updates_in_place(module: Module, inside: Computation) -> list[_Update | None]:
    """For each array of a fusion's result, what is updated of a parameter, where it is one."""
    root = inside.root
    names = root.operands if root.opcode == "tuple" else (root.name,)
    return [_update_in_place(module, inside, name) for name in names]


def _update_in_place(module: Module, inside: Computation, name: str) -> _Update | None:
    update = _behind_bitcasts(inside, name)
    if update.opcode in _UPDATES:
        base = _behind_bitcasts(inside, update.operands[0])
        return _Update(update.name, _update_bytes(inside, update)) if base.opcode == "parameter" else None
    if update.opcode == "fusion":
        nested = _updates_in_place(module, called(module, update))
        if len(nested) == 1 and nested[0] is not None:
            return _Update(update.name, nested[0].bytes)
    return None


def _behind_bitcasts(inside: Computation, name: str) -> Instruction:
    instruction = inside.instructions[name]
    while instruction.opcode == "bitcast":
        instruction = inside.instructions[instruction.operands[0]]
    return instruction


def _update_bytes(inside: Computation, update: Instruction) -> int:
    """What is written: the update of a dynamic-update-slice, the last third of a scatter's operands."""
    first = 1 if update.opcode == "dynamic-update-slice" else len(update.operands) // 3 * 2 + 1
    last = 2 if update.opcode == "dynamic-update-slice" else None
    arrays = [array for name in update.operands[first:last] for array in inside.instructions[name].arrays]
    return sum(array.bytes for array in arrays)


def _writes(module: Module, inside: Computation, instruction: Instruction, written: tuple[Array, ...]) -> list[int]:
    """Bytes written of each array of the result."""
    if instruction.opcode in _UPDATES and len(written) == 1:
        return [_update_bytes(inside, instruction)]
    whole = [array.bytes for array in written]
    if instruction.opcode != "fusion":
        return whole
    updates = _updates_in_place(module, called(module, instruction))
    if len(updates) != len(whole):
        return whole
    return [size if update is None else update.bytes for size, update in zip(whole, updates, strict=True)]


def _flops(module: Module, inside: Computation, instruction: Instruction) -> int:
    """Operations of matrix products and convolutions; an addition and a multiplication are two."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "fusion":
        nested = called(module, instruction)
        return sum(_flops(module, nested, each) for each in nested.instructions.values())
    if opcode == "dot":
        return _product_flops(inside, instruction, r"lhs_contracting_dims=\{([\d,]*)\}")
    if opcode == "custom-call" and "__cublas$" in instruction.attributes:
        return _product_flops(inside, instruction, r'"lhs_contracting_dimensions":\[([\d",]*)\]')
    if opcode == "custom-call" and f'"{library.DENSE}_' in instruction.attributes:
        # Of the packed weight, what fills up its panels included.
        return 2 * instruction.arrays[0].dims[0] * inside.instructions[instruction.operands[1]].arrays[0].elements
    if opcode == "convolution":
        return _convolution_flops(inside, instruction)
    return 0


def _product_flops(inside: Computation, instruction: Instruction, pattern: str) -> int:
    lhs = inside.instructions[instruction.operands[0]].arrays[0]
    contracted = [int(n.strip('"')) for n in (instruction.attribute(pattern) or "").split(",") if n]
    return 2 * instruction.arrays[0].elements * math.prod(lhs.dims[n] for n in contracted)


def _convolution_flops(inside: Computation, instruction: Instruction) -> int:
    """TPU's form of matrix products: batch dimensions become windows of which most places fall beside the input."""
    lhs, kernel = (inside.instructions[name].arrays[0].dims for name in instruction.operands)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0
    lhs_labels, kernel_labels, out_labels = labels.groups()
    out = instruction.arrays[0].dims
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", instruction.attribute(r"window=\{([^}]*)\}") or ""))

    def setting(name: str, dim: int, default: int) -> int:
        return int(window[name].split("x")[dim]) if name in window else default

    places = 1
    for dim in range(len(lhs_labels) - 2):
        size, dilation = lhs[lhs_labels.index(str(dim))], setting("lhs_dilate", dim, 1)
        low = int(window["pad"].split("x")[dim].split("_")[0]) if "pad" in window else 0
        starts = np.arange(out[out_labels.index(str(dim))]) * setting("stride", dim, 1) - low
        offsets = np.arange(kernel[kernel_labels.index(str(dim))]) * setting("rhs_dilate", dim, 1)
        at = starts[:, None] + offsets
        places *= int(np.count_nonzero((at >= 0) & (at <= (size - 1) * dilation) & (at % dilation == 0)))
    groups = int(instruction.attribute(r"batch_group_count=(\d+)") or 1)
    batch, features = out[out_labels.index("b")], out[out_labels.index("f")]
    return 2 * places * batch * features * kernel[kernel_labels.index("i")] // groups
