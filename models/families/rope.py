"""RoPE from the many spellings that published configs use.

The base may stand at the top level, in ``rope_parameters`` or in ``rope_scaling``; either of those may be
one object for all layers or one a layer kind; the kind's key is ``rope_type`` or ``type``.  Two places that
disagree are an error, and an absent base is that family's documented default.
"""

from __future__ import annotations

import math
from typing import Any, get_args

from precast.models.config import RopeConfig, RopeKind
from precast.models.errors import CheckpointError
from precast.models.families.keys import ConfigKeys, as_number

_PLACES = ("rope_parameters", "rope_scaling")
_ALIASES = {"su": "longrope"}


def read_rope(
    keys: ConfigKeys,
    head_dim: int,
    *,
    theta: float,
    partial: float = 1.0,
    interleaved: bool = False,
    layer_type: str | None = None,
    theta_key: str = "rope_theta",
    scaled: bool = True,
) -> RopeConfig:
    """The RoPE of one kind of layer.

    Args:
      keys: the config.
      head_dim: size of the head that it turns.
      theta, partial: the family's defaults for the base and for the fraction of the head that turns.
      interleaved: which pairs the family's checkpoints turn.
      layer_type: "full_attention" or "sliding_attention" where a config may hold one object for each.
      theta_key: the top-level key of the base.
      scaled: an object for all layers is meant for this kind too.

    Raises:
      CheckpointError: unknown kinds, missing or conflicting values.
    """
    options = _options(keys, layer_type, scaled)
    base = _agreed(keys, "rope_theta", keys.take(theta_key, None), options.pop("rope_theta", None))
    fraction = _agreed(
        keys,
        "partial_rotary_factor",
        keys.take("partial_rotary_factor", None),
        options.pop("partial_rotary_factor", None),
    )
    rotary_dim = int(head_dim * (partial if fraction is None else fraction))
    kind = _kind(keys, options)
    rope = RopeConfig(
        theta=theta if base is None else base,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        interleaved=interleaved,
    )
    if rope.theta <= 0:
        raise CheckpointError(f"{keys.where}: rope_theta is {rope.theta}: it must be above 0")
    return _stretched(keys, rope, kind, options, rotary_dim)


def _options(keys: ConfigKeys, layer_type: str | None, scaled: bool) -> dict[str, Any]:
    """The merged objects of both places, for the given kind of layer."""
    merged: dict[str, Any] = {}
    for place in _PLACES:
        value = keys.take(place, None)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise keys.error(place, "it must be an object")
        nested = [key for key in value if isinstance(value[key], dict)]
        if nested:
            if layer_type is None and len({repr(value[key]) for key in nested}) > 1:
                raise keys.error(place, "different RoPE for different layers is not implemented for this family")
            value = value.get(layer_type if layer_type in nested else nested[0], {})
        elif not scaled:
            continue
        for key, item in value.items():
            if item is None:
                continue
            if key in merged and merged[key] != item:
                raise CheckpointError(
                    f"{keys.where}: {key} is {merged[key]} in {_PLACES[0]} and {item} in {place}: they must agree"
                )
            merged[key] = item
    return merged


def _agreed(keys: ConfigKeys, name: str, *values: Any) -> float | None:
    given = {as_number(value, f"{keys.where}: {name}") for value in values if value is not None}
    if len(given) > 1:
        raise CheckpointError(
            f"{keys.where}: {name} has different values in different places, {sorted(given)}: they must agree"
        )
    return given.pop() if given else None


def _kind(keys: ConfigKeys, options: dict[str, Any]) -> RopeKind:
    new, old = options.pop("rope_type", None), options.pop("type", None)
    kind: Any = new or old or "default"
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in get_args(RopeKind):
        raise CheckpointError(
            f"{keys.where}: rope_type is {kind!r}: not implemented; implemented: {', '.join(get_args(RopeKind))}"
        )
    return kind


def _stretched(
    keys: ConfigKeys, rope: RopeConfig, kind: RopeKind, options: dict[str, Any], rotary_dim: int
) -> RopeConfig:
    """``rope`` with the options of its kind; every option must belong to it."""

    def number(key: str, default: float | None = None) -> float:
        value = options.pop(key, default)
        if value is None:
            raise CheckpointError(f"{keys.where}: {key} is missing: RoPE of kind {kind} needs it")
        return as_number(value, f"{keys.where}: {key}")

    def factors(key: str) -> tuple[float, ...]:
        value = options.pop(key, None)
        if not isinstance(value, list) or len(value) != rotary_dim // 2:
            raise CheckpointError(
                f"{keys.where}: {key} must be a list of {rotary_dim // 2} numbers, half the rotary dimension"
            )
        return tuple(as_number(item, f"{keys.where}: {key}") for item in value)

    values: dict[str, Any] = {"kind": kind}
    trained = keys.take("original_max_position_embeddings", None)
    longest = keys.integer("max_position_embeddings", None)
    if kind in ("llama3", "yarn", "longrope"):
        inner = options.pop("original_max_position_embeddings", None)
        original = trained if trained is not None else inner if inner is not None else longest
        values["original_max_position_embeddings"] = int(
            as_number(original, f"{keys.where}: original_max_position_embeddings")
        )
        if values["original_max_position_embeddings"] < 1:
            raise CheckpointError(
                f"{keys.where}: original_max_position_embeddings is {original}: it must be at least 1"
            )
    else:
        options.pop("original_max_position_embeddings", None)
        values["original_max_position_embeddings"] = longest or 0
    if kind in ("linear", "dynamic", "llama3"):
        values["factor"] = number("factor")
    if kind == "llama3":
        values["low_freq_factor"], values["high_freq_factor"] = number("low_freq_factor"), number("high_freq_factor")
    if kind in ("yarn", "longrope"):
        ratio = (longest or 0) / values["original_max_position_embeddings"]
        values["factor"] = number("factor", ratio)
    if kind == "yarn":
        values |= {"beta_fast": number("beta_fast", 32.0), "beta_slow": number("beta_slow", 1.0)}
        values |= {"truncate": bool(options.pop("truncate", True))}
        values["attention_factor"] = _yarn_attention_factor(values["factor"], options, number)
    if kind == "longrope":
        values |= {"short_factor": factors("short_factor"), "long_factor": factors("long_factor")}
        values["attention_factor"] = number(
            "attention_factor", _longrope_attention_factor(values["factor"], values["original_max_position_embeddings"])
        )
    if kind == "default":
        options.pop("factor", None)
    left = {key: value for key, value in options.items() if value not in (None, False) and key not in _UNUSED}
    if left:
        raise CheckpointError(f"{keys.where}: {', '.join(sorted(left))}: not implemented for RoPE of kind {kind}")
    return RopeConfig(**{**vars(rope), **values})


# Options that some published configs carry although their kind does not read them.
_UNUSED = frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "finetuned", "truncate"})


def _yarn_attention_factor(factor: float, options: dict[str, Any], number: Any) -> float:
    """The temperature of arXiv:2309.00071 in the form that transformers defines."""

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = options.pop("attention_factor", None)
    numerator, denominator = options.pop("mscale", None), options.pop("mscale_all_dim", None)
    if given is not None:
        return as_number(given, "attention_factor")
    if numerator and denominator:
        return magnitude(float(numerator)) / magnitude(float(denominator))
    return magnitude(1.0)


def _longrope_attention_factor(factor: float, original: int) -> float:
    """arXiv:2402.13753: sqrt(1 + ln(factor) / ln(original length))."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
