"""Whether a deployment fits each device's memory, and what would make it fit, from what the compiler says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from precast.runtime.config import ConfigError
from precast.runtime.machine import Machine
from precast.runtime.programs import CREATE, Program

# Part of a device's memory that is left alone.  A GPU's holds the CUDA context, NCCL's buffers and the libraries'
# workspaces; a host's the process itself and everybody else.  A TPU's runtime has taken its part before.
_MARGINS = {"tpu": 0.02, "gpu": 0.08, "cpu": 0.1}
# A step is launched before the last one's results are read.
_STEPS_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device's memory, and what they go to.

    Attributes:
      device_bytes: what programs can use at most.
      margin_bytes: of that, what is left alone.
      weight_bytes, state_bytes: the weights; the slots' sampling state.
      temp_bytes, temp_program: of the program with the largest temporaries.
      output_bytes: results, beyond what reuses arguments, of the steps in flight.
      code_bytes: of all programs.
      padding_bytes: what arguments take beyond their elements, as the compiler lays them out.
      page_bytes, num_pages: one KV page; how many, the scratch page included.
    """

    device_bytes: int
    margin_bytes: int
    weight_bytes: int
    state_bytes: int
    temp_bytes: int
    temp_program: str
    output_bytes: int
    code_bytes: int
    padding_bytes: int
    page_bytes: int
    num_pages: int

    @classmethod
    def of(
        cls,
        machine: Machine,
        programs: Sequence[Program],
        entries: Mapping[str, Mapping[str, Any]],
        *,
        weights: Any,
        state: Any,
        page_bytes: int,
        num_pages: int,
    ) -> MemoryPlan:
        """Adds up.

        Args:
          machine: whose memory it is.
          programs: those compiled.
          entries: what the compiler says of each, see ``compiling``; where some are missing, each is taken to have
            as much code as the largest of those that are there.
          weights, state: pytrees of arrays or shapes, shardings included.
          page_bytes: of one device.
          num_pages: the scratch page included.
        """
        device = machine.memory_bytes
        sizes = {name: one["temp_bytes"] for name, one in entries.items()}
        worst = max(sizes, key=sizes.__getitem__, default="none compiled yet")
        code = [one["code_bytes"] for one in entries.values()]
        # CREATE's results are the cache and the state themselves.
        results = [one["output_bytes"] - one["alias_bytes"] for name, one in entries.items() if name != CREATE]
        padding = [
            entries[program.name]["argument_bytes"] - device_bytes(program.arguments)
            for program in programs
            if program.name in entries
        ]
        return cls(
            device_bytes=device,
            margin_bytes=int(device * _MARGINS[machine.target.backend]),
            weight_bytes=device_bytes(weights),
            state_bytes=device_bytes(state),
            temp_bytes=sizes.get(worst, 0),
            temp_program=worst,
            output_bytes=_STEPS_IN_FLIGHT * max(results, default=0),
            code_bytes=sum(code) + max(code, default=0) * (len(programs) - len(code)),
            padding_bytes=max(0, *padding, 0),
            page_bytes=page_bytes,
            num_pages=num_pages,
        )

    @property
    def fixed_bytes(self) -> int:
        """All but the pages."""
        parts = (self.weight_bytes, self.state_bytes, self.temp_bytes, self.output_bytes)
        return sum(parts) + self.code_bytes + self.padding_bytes

    @property
    def spare_bytes(self) -> int:
        """What is left beside the margin; below 0 where it does not fit."""
        return self.device_bytes - self.margin_bytes - self.fixed_bytes - self.page_bytes * self.num_pages

    @property
    def most_pages(self) -> int:
        """Pages that the memory holds, the scratch page included."""
        return max(0, (self.device_bytes - self.margin_bytes - self.fixed_bytes) // self.page_bytes)

    def conversations(self, num_tokens: int, page_size: int) -> int:
        """How many conversations of so many tokens the pages hold at a time."""
        return (self.num_pages - 1) // -(-num_tokens // page_size)

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError, which says what each setting is worth, where it does not fit."""
        if self.spare_bytes >= 0:
            return
        worth = "; ".join(f"{name} {change} frees {gib(size)}" for name, change, size in self.knobs(settings))
        pages, other = self.page_bytes * self.num_pages, self.fixed_bytes - self.weight_bytes - self.temp_bytes
        raise ConfigError(
            f"the deployment takes {gib(-self.spare_bytes)} too much of each device, which has "
            f"{gib(self.device_bytes)} less a margin of {gib(self.margin_bytes)}: weights {gib(self.weight_bytes)}, "
            f"temporaries {gib(self.temp_bytes)} ({self.temp_program}), {self.num_pages} KV pages {gib(pages)}, other "
            f"{gib(other)}. On each device {worth}"
        )

    def knobs(self, settings: Mapping[str, Any]) -> list[tuple[str, str, int]]:
        """(setting, change, bytes that it frees on each device); about, where programs would be other ones."""
        pages = self.page_bytes * self.num_pages
        longest, slots = settings["max_model_len"], settings["slots"]
        table = -(-longest // settings["page_size"])
        tensor = settings["mesh"]["tensor"]
        used = min(pages, table * slots * self.page_bytes)
        found = [
            ("mesh", f"tensor={2 * tensor}", (self.weight_bytes + pages) // 2),
            ("token_budget", "halved", self.temp_bytes // 2),
            ("slots", f"{slots} -> {slots // 2}", self.state_bytes // 2 + used // 2 if slots > 1 else 0),
            ("max_model_len", f"{longest} -> {longest // 2}", used // 2 if longest > 2 else 0),
        ]
        if settings["kv_cache_memory"] is not None:
            found.append(("kv_cache_memory", "halved", pages // 2))
        if settings["dtype"] == "float32":
            found.insert(0, ("dtype", "bfloat16", (self.weight_bytes + pages) // 2))
        return [knob for knob in found if knob[2] > 0]


def device_bytes(arrays: Any) -> int:
    """Bytes that arrays, or their shapes, take on one device, without padding."""
    return sum(math.prod(_shard_shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def _shard_shape(leaf: Any) -> Iterable[int]:
    sharding = getattr(leaf, "sharding", None)
    return leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 27 else f"{size / 2**20:.1f} MiB"
