"""Reading a published ``config.json`` so that nothing in it is overlooked.

``ConfigKeys`` hands out values by name and remembers which were asked for.  What is left over at the
end is either known to have no effect on the forward pass, or set to a value that switches it off, or
it is a trait that we do not implement: then ``finish`` says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from precast.models.errors import CheckpointError

_REQUIRED = object()

# Keys without effect on the forward pass at inference: bookkeeping, training, generation defaults, text.
_WITHOUT_EFFECT = re.compile(
    r"""_.*|architectures|model_type|transformers_version|transformers\.js_config|torch_dtype|dtype|.*_token_id
    |.*_token_index|.*dropout.*|.*_pdrop|initializer_.*|init_.*|.*_loss_.*|.*_loss|use_cache|pretraining_tp|tokenizer_class
    |is_decoder|is_encoder_decoder|add_cross_attention|chunk_size_feed_forward|output_.*|return_dict.*|id2label|label2id
    |problem_type|task_specific_params|gradient_checkpointing|unsloth_.*|is_llama_config|cache_implementation
    |name|license|language|router_jitter_noise|seq_aux|ep_size|use_kernel.*|experts_implementation|max_length|min_length
    |temperature|top_k|top_p|do_sample|num_beams|repetition_penalty|suppress_tokens|begin_suppress_tokens|bad_words_ids
    |keys_to_ignore_at_inference|finetuning_task|prefix|sep_token|decoder_start_token|summary_.*|tie_encoder_decoder
    |pruned_heads|cross_attention_hidden_size|torchscript|use_bfloat16|tf_legacy_loss|diversity_penalty|early_stopping
    |encoder_no_repeat_ngram_size|exponential_decay_length_penalty|forced_.*|length_penalty|no_repeat_ngram_size
    |num_beam_groups|num_return_sequences|remove_invalid_values|typical_p|attn_implementation|mlp_type|max_sequence_length
    |training_.*|parallelization_.*|vision_config|mm_tokens_per_image|model_max_length|auto_map""",
    re.VERBOSE,
)


class ConfigKeys:
    """The keys of one ``config.json``; every problem is a CheckpointError that names file and key."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw = flatten_text_config(raw, where)
        self.where = where
        self._taken: set[str] = set()

    def error(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} is {_shown(self.raw.get(key))}: {why}")

    def take(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value as it stands; null counts as absent."""
        self._taken.add(key)
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"{self.where}: {key} is missing")
        return default

    def ignore(self, *names: str) -> None:
        """Marks keys as read that say nothing beyond what others say."""
        self._taken.update(names)

    def integer(self, key: str, default: Any = _REQUIRED, low: int = 1) -> Any:
        value = self.take(key, default)
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.error(key, f"it must be an integer of at least {low}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self.take(key, default)
        return value if value is default else as_number(value, f"{self.where}: {key}")

    def boolean(self, key: str, default: Any = _REQUIRED) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "it must be true or false")
        return value

    def sequence(self, key: str, length: int) -> list[Any] | None:
        value = self.take(key, None)
        if value is not None and (not isinstance(value, list) or len(value) != length):
            raise self.error(key, f"it must be a list with one entry a layer, {length}")
        return value

    def require(self, key: str, allowed: Any, default: Any) -> None:
        """For a trait of which one value is implemented."""
        if self.take(key, default) != allowed:
            raise self.error(key, f"only {_shown(allowed)} is implemented")

    def activation(self, key: str = "hidden_act", default: str = "silu") -> Any:
        names = {
            "silu": "silu",
            "swish": "silu",
            "gelu": "gelu",
            "gelu_new": "gelu_tanh",
            "gelu_pytorch_tanh": "gelu_tanh",
        }
        value = self.take(key, default)
        if not isinstance(value, str) or value not in names:
            raise self.error(key, f"this activation is not implemented; implemented: {', '.join(names)}")
        return names[value]

    def finish(self) -> None:
        """Raises CheckpointError for a key that was not read and is not known to be without effect."""
        for key, value in self.raw.items():
            if key in self._taken or not value or _WITHOUT_EFFECT.fullmatch(key):
                continue
            raise self.error(
                key,
                f"this trait is not implemented for model_type {self.raw.get('model_type')!r}; "
                "if it has no effect on the model's outputs, remove the key from the file",
            )


def flatten_text_config(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A composite config's ``text_config`` laid over its top level, so that both spellings read alike."""
    text = raw.get("text_config")
    if text is None:
        return dict(raw)
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{where}: text_config is {_shown(text)}: it must be an object")
    outer = {key: value for key, value in raw.items() if key != "text_config"}
    return outer | {key: value for key, value in text.items() if value is not None}


def as_number(value: Any, what: str) -> float:
    """A finite float from a JSON number, or from a string that spells one (some configs quote them)."""
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if number != number or number in (float("inf"), float("-inf")):
        raise CheckpointError(f"{what} is {_shown(value)}: it must be a finite number")
    return number


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
