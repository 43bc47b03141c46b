"""How one engine is set up: a small frozen dataclass, resolved once at start."""

from __future__ import annotations

import dataclasses

DTYPES = ("auto", "float32", "bfloat16")
KERNELS = ("auto", "reference")
MAX_PREFILL_BLOCK = 32
# XLA's CPU backend sums one row of a product in another order than two or more (see models.layers.linear).
MIN_ROWS = 2


class ConfigError(ValueError):
    """A setting that cannot work: the message names it, its value, the limit and the way out."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
      slots: requests that run at a time.
      max_model_len: longest prompt plus output in tokens; None is what the model is made for.  Lowered to what
        the page pool can hold.
      page_size: tokens a KV page.
      token_budget: most tokens a step computes, decode rows and prefill together.
      kv_cache_memory: bytes for KV pages on each device; None chooses by the memory that is there.
      dtype: of weights, activations' products and cache; "auto" follows the checkpoint.
      kernels: "auto" takes the target's own; "reference" the accelerators' layout with plain XLA operations, for chips
        that the kernels do not cover.
      prefix_caching: reuse the pages of equal prompt prefixes.
      mesh: degrees of parallelism, such as "tensor=8"; empty for one device.
      plan_dir: folder for the plans that are compiled where none is given; None puts them beside the model.
      plan: a plan's folder, compiled before; None looks in plan_dir, and compiles one where there is none.
      plan_sha256: what the SHA-256 of that plan's manifest must be; None believes the folder.
    """

    slots: int = 32
    max_model_len: int | None = None
    page_size: int = 64
    token_budget: int = 512
    kv_cache_memory: int | None = None
    dtype: str = "auto"
    kernels: str = "auto"
    prefix_caching: bool = True
    mesh: str = ""
    plan_dir: str | None = None
    plan: str | None = None
    plan_sha256: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a value outside its range."""
        _within("slots", self.slots, 1, 1024)
        _within("page_size", self.page_size, 1, 1024)
        _within("token_budget", self.token_budget, 1, 1 << 20)
        if self.max_model_len is not None:
            _within("max_model_len", self.max_model_len, 2, 1 << 24)
        if self.kv_cache_memory is not None:
            _within("kv_cache_memory", self.kv_cache_memory, 1, 1 << 50)
        if self.plan_sha256 is not None and self.plan is None:
            raise ConfigError(f"plan_sha256 is {self.plan_sha256}: it goes with plan, which is not given")
        for field, legal in (("dtype", DTYPES), ("kernels", KERNELS)):
            if getattr(self, field) not in legal:
                raise ConfigError(f"{field} is {getattr(self, field)!r}: it must be one of {', '.join(legal)}")


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes that programs are compiled for, all derived from an EngineConfig.

    Attributes:
      slots, max_model_len, page_size, num_pages: as resolved; num_pages counts the scratch page.
      prefill_block: queries a row of the prefill segment; a chunk takes as many rows as it needs.
      decode_rows: sizes of the decode segment in a step without prefill, ascending; the last holds all slots.
      prefill_tokens: sizes of the prefill segment in a step without decode rows, ascending.
      mixed_tokens: sizes of the prefill segment beside a full decode segment, ascending.
    """

    slots: int
    max_model_len: int
    page_size: int
    num_pages: int
    prefill_block: int
    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    mixed_tokens: tuple[int, ...]

    @property
    def head_rows(self) -> int:
        """Hidden states that a step hands to the head: one a slot, padded to what a program takes."""
        return self.decode_rows[-1]

    @property
    def table_width(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_model_len // self.page_size)


def derive_shapes(config: EngineConfig, *, max_model_len: int, num_pages: int, whole_pages: bool = False) -> Shapes:
    """Lists the shapes that the scheduler can reach.

    whole_pages: a row of the prefill segment is one page, for targets on which no two rows may write to one.
    """
    beside_decode = config.token_budget - config.slots
    if beside_decode < 1:
        raise ConfigError(
            f"token_budget is {config.token_budget}: it must be above slots, {config.slots}, or running requests "
            "would stall while a prompt is read; raise token_budget or lower slots"
        )
    block = config.page_size if whole_pages else MAX_PREFILL_BLOCK
    if whole_pages and block > beside_decode:
        raise ConfigError(
            f"token_budget is {config.token_budget}: it must be at least {config.slots + block}, slots "
            f"({config.slots}) and one page ({block}) together; raise token_budget or lower slots or page_size"
        )
    while block > beside_decode:
        block //= 2
    longest = -(-(max_model_len - 1) // block) * block * config.slots
    return Shapes(
        slots=config.slots,
        max_model_len=max_model_len,
        page_size=config.page_size,
        num_pages=num_pages,
        prefill_block=block,
        decode_rows=_decode_sizes(config.slots),
        prefill_tokens=_prefill_sizes(min(config.token_budget, longest), block),
        mixed_tokens=_prefill_sizes(min(beside_decode, longest), block),
    )


def _decode_sizes(slots: int) -> tuple[int, ...]:
    """The least, then doubling from 8 on: up to there a step takes about as long, as long as the weights take."""
    rest = _growing(8, slots, by=2) if slots > 8 else (max(slots, MIN_ROWS),)
    return rest if rest[0] == MIN_ROWS else (MIN_ROWS, *rest)


def _prefill_sizes(most: int, block: int) -> tuple[int, ...]:
    """Sizes from one block to the largest whole number of blocks within ``most``."""
    first = max(block, MIN_ROWS)
    return _growing(first, max(most // block * block, first), by=4)


def _growing(first: int, last: int, *, by: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= by
    return (*sizes, last)


def _within(field: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{field} is {value!r}: it must be an integer from {low} to {high}")
