"""The engine's settings as flags, for the commands that have them."""

from __future__ import annotations

import re
from typing import Any

from absl import flags

from precast.runtime.config import DTYPES, KERNELS, ConfigError, EngineConfig

_DEFAULTS = EngineConfig()
_NAMES = ("slots", "max_model_len", "page_size", "token_budget", "kv_cache_memory", "dtype", "kernels", "mesh")


def define(values: flags.FlagValues) -> None:
    """Adds the flags to a command's own."""

    def integer(name: str, default: int | None, text: str) -> None:
        flags.DEFINE_integer(name, default, text, flag_values=values)

    integer("slots", _DEFAULTS.slots, "Requests that run at a time.")
    integer("max_model_len", None, "Longest prompt plus output in tokens; the model's own limit unless given.")
    integer("page_size", _DEFAULTS.page_size, "Tokens a KV cache page.")
    integer(
        "token_budget", _DEFAULTS.token_budget, "Most tokens a step computes, prompts' and running requests' together."
    )
    flags.DEFINE_string(
        "kv_cache_memory", None, "Memory of each device for the KV cache, such as 2GiB; chosen by what is free "
        "unless given.", flag_values=values,
    )  # fmt: skip
    flags.DEFINE_enum(
        "dtype", _DEFAULTS.dtype, DTYPES, "Of weights and KV cache; auto follows the file.", flag_values=values
    )
    flags.DEFINE_enum(
        "kernels", _DEFAULTS.kernels, KERNELS, "auto takes the target's own; reference plain XLA operations, for chips "
        "that the kernels do not cover.", flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string(
        "mesh", _DEFAULTS.mesh, "Devices along each axis, such as tensor=8; one device unless given.",
        flag_values=values,
    )  # fmt: skip


def given(values: flags.FlagValues) -> dict[str, Any]:
    """Those that the command line has, by the names of EngineConfig's fields; ConfigError for one out of its range."""
    settings: dict[str, Any] = {name: values[name].value for name in _NAMES if values[name].present}
    if settings.get("kv_cache_memory") is not None:
        settings["kv_cache_memory"] = _bytes("kv_cache_memory", settings["kv_cache_memory"])
    EngineConfig(**settings)
    return settings


def _bytes(flag: str, text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{flag} is {text!r}: it must be a number of bytes, such as 2GiB or 500MiB")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
