"""``runtime-plan``: what a plan's memory goes to, how much it serves, and what other choices would give."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from precast.kernels_pallas.targets import Target
from precast.models import cache as kv_cache
from precast.models import layout
from precast.models.config import from_values
from precast.runtime import manifest, planning
from precast.runtime.config import ConfigError
from precast.runtime.manifest import Sealed
from precast.runtime.memory import MemoryPlan, device_bytes, gib
from precast.server import command
from precast.sharding.mesh import MeshSpec

_COMMAND = "runtime-plan"
_SUMMARY = """
Usage: runtime-plan DIRECTORY [flags]

Shows what is in a plan: its programs, what each device's memory goes to, and how many conversations
fit.  With --mesh or --weights it says what that would change, computed from the configs alone.
"""
_BAR = 60
_FLAGS = flags.FlagValues()
_CONTEXT = flags.DEFINE_integer("context", 4096, "Tokens of a conversation.", 1, flag_values=_FLAGS)
_MESH = flags.DEFINE_string("mesh", None, "Another mesh, such as tensor=4.", flag_values=_FLAGS)
_WEIGHTS = flags.DEFINE_enum(
    "weights", None, ("float32", "bfloat16", "int8"), "Another type of the dense weights.", flag_values=_FLAGS
)


def run(argv: Sequence[str] | None = None) -> None:
    """Console entry point; ends the program with one line where there is no whole plan."""
    arguments = command.parse(_COMMAND, _SUMMARY, _FLAGS, argv)
    if len(arguments) != 1:
        command.fail(_COMMAND, f"it takes one plan's folder, not {len(arguments)} (--help says more)", status=2)
    try:
        sealed = manifest.read(arguments[0])
        facts = sealed.manifest["facts"]
        print(f"{facts['model']['model_type']} for {facts['target']}, mesh {manifest.mesh_of(sealed)}, "
              f"{facts['settings']['dtype']}, jax {facts['jax']}\nmanifest sha256 {sealed.sha256}\n")  # fmt: skip
        print(programs_table(sealed))
        print(memory_table(sealed))
        print(_fits(memory_of(sealed), sealed))
        if _MESH.value is not None or _WEIGHTS.value is not None:
            print(_changed(sealed))
    except (ConfigError, ValueError) as error:
        command.fail(_COMMAND, str(error))


def memory_of(sealed: Sealed) -> MemoryPlan:
    """The memory plan that was made when the programs were compiled."""
    return MemoryPlan(**sealed.manifest["memory"])


def programs_table(sealed: Sealed) -> str:
    """A line for each program: what it took to compile, and what one run of it costs on each device."""
    target = manifest.machine_of(sealed).target
    lines = [
        f"{'program':<10}{'shape':>12}{'compile s':>11}{'MB moved':>11}{'GFLOP':>10}{'temp MB':>10}{'step ms':>10}"
    ]
    for name, one in sealed.manifest["programs"].items():
        kind, _, shape = name.partition("-")
        seconds = step_seconds(target, one)
        step = "-" if seconds is None else f"{seconds * 1e3:.3f}"
        lines.append(
            f"{kind:<10}{shape:>12}{one['compile_seconds']:>11.1f}{one['bytes_accessed'] / 1e6:>11.1f}"
            f"{one['flops'] / 1e9:>10.2f}{one['temp_bytes'] / 1e6:>10.1f}{step:>10}"
        )
    return "\n".join(lines) + "\n"


def step_seconds(target: Target, entry: dict[str, Any]) -> float | None:
    """How long one run takes at the chip's peak rates, at least; None for a host's processor, whose rates vary."""
    chip = {"tpu": lambda: target.tpu, "gpu": lambda: target.gpu}.get(target.backend)
    if chip is None:
        return None
    return max(entry["bytes_accessed"] / chip().hbm_bytes_per_second, entry["flops"] / chip().flops_per_second)


def memory_table(sealed: Sealed) -> str:
    """What each device's memory goes to, as a table and as a bar."""
    memory = memory_of(sealed)
    rows = [
        ("weights", memory.weight_bytes, "W"),
        (f"KV pages ({memory.num_pages} of {gib(memory.page_bytes)})", memory.page_bytes * memory.num_pages, "K"),
        (f"temporaries ({memory.temp_program})", memory.temp_bytes, "T"),
        ("sampling state", memory.state_bytes, "S"),
        ("results in flight", memory.output_bytes, "R"),
        ("code", memory.code_bytes, "C"),
        ("padding", memory.padding_bytes, "P"),
        ("margin", memory.margin_bytes, "m"),
        ("free", memory.spare_bytes, "."),
    ]
    total = memory.device_bytes
    lines = [f"{letter} {name:<44}{gib(size):>12}{size / total:>8.1%}" for name, size, letter in rows]
    ends, bar = 0, ""
    for _, size, letter in rows:
        ends += size
        bar += letter * (round(ends / total * _BAR) - len(bar))
    return "\n".join([*lines, f"  {'each device':<44}{gib(total):>12}", f"  [{bar}]", ""])


def _fits(memory: MemoryPlan, sealed: Sealed) -> str:
    page_size = sealed.manifest["facts"]["settings"]["page_size"]
    tokens, longest = (memory.num_pages - 1) * page_size, planning.shapes_of(sealed).max_model_len
    if _CONTEXT.value > longest:
        return f"no conversation of {_CONTEXT.value} tokens: max_model_len is {longest} ({tokens} tokens in KV pages)"
    return (
        f"{memory.conversations(_CONTEXT.value, page_size)} conversations of {_CONTEXT.value} tokens fit at a time "
        f"({tokens} tokens in KV pages)"
    )


def _changed(sealed: Sealed) -> str:
    """The memory plan with another mesh or type of weights; temporaries and code are taken to stay as they are."""
    facts, old = sealed.manifest["facts"], memory_of(sealed)
    spec = manifest.mesh_of(sealed) if _MESH.value is None else MeshSpec.parse(_MESH.value)
    model, settings = from_values(facts["model"]), facts["settings"]
    machine = manifest.machine_of(sealed)
    # Those of a host share its memory.
    device = dataclasses.replace(machine, num_devices=max(machine.num_devices, spec.num_devices)).memory_bytes
    is_native = facts["native_library"] is not None
    placement = planning.place(machine, spec, settings["kernels"], is_native=is_native)
    placement.check(model)
    mesh: Any = jax.sharding.AbstractMesh(tuple(spec.degrees().values()), tuple(spec.degrees()))
    dtype = _WEIGHTS.value or settings["dtype"]
    weights = layout.shapes(
        model, dtype="bfloat16" if dtype == "int8" else dtype, num_positions=planning.shapes_of(sealed).max_model_len,
        placement=placement, mesh=mesh,
    )  # fmt: skip
    size = device_bytes(weights)
    if dtype == "int8":
        # A byte for two, and a float32 scale for each output, which are few.
        kernels = [leaf for leaf in jax.tree.leaves(weights["layers"]) if leaf.dtype.itemsize == 2]
        size -= device_bytes(kernels) // 2
    cache = kv_cache.CacheSpec.of(
        model, num_pages=0, page_size=settings["page_size"], dtype=settings["dtype"], placement=placement
    )
    margin = old.margin_bytes * device // old.device_bytes
    new = dataclasses.replace(
        old, device_bytes=device, margin_bytes=margin, weight_bytes=size, page_bytes=cache.page_bytes
    )
    most = dataclasses.replace(new, num_pages=new.most_pages)
    names = f"mesh {spec}, {dtype} weights"
    if spec.num_devices > machine.num_devices:
        names += f" on {spec.num_devices} devices, of which {machine} has {machine.num_devices}"
    return (
        f"with {names}: weights {gib(old.weight_bytes)} -> {gib(size)}, a KV page {gib(old.page_bytes)} -> "
        f"{gib(new.page_bytes)} on each device; up to {old.most_pages} -> {new.most_pages} pages, which hold "
        f"{dataclasses.replace(old, num_pages=old.most_pages).conversations(_CONTEXT.value, settings['page_size'])} -> "
        f"{most.conversations(_CONTEXT.value, settings['page_size'])} conversations of {_CONTEXT.value} tokens"
    )
