"""Runs an exported model: prefill, then a token at a time.  It needs this folder, jax, flatbuffers and safetensors.

python example.py --token_ids 1,2,3 --steps 16 --temperature 0.8 --seed 1
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.flax
from jax import export


class Exported:
    """The functions and the weights of one platform.

    folder: what ``runtime-export`` wrote.
    platform: "cpu", "tpu" or "cuda".
    """

    def __init__(self, folder: pathlib.Path, platform: str):
        self.about = json.loads((folder / "export.json").read_text())
        if platform not in self.about["platforms"]:
            raise SystemExit(f"{folder} has functions for {', '.join(self.about['platforms'])}, not for {platform}")
        if platform == "cuda":
            # It tells XLA where the kernels' runtime lies.
            importlib.import_module("jax.experimental.mosaic.gpu")
        parts = self.about["platforms"][platform]
        self.prefill, self.decode, self.sample = (
            export.deserialize(bytearray((folder / parts["functions"][name]).read_bytes()))
            for name in ("prefill", "decode", "sample")
        )
        self.weights = _weights(folder, parts["weights"])
        self._cache = parts["cache"]

    def new_cache(self) -> list[jax.Array]:
        return [jnp.zeros(one["shape"], one["dtype"]) for one in self._cache]


def _weights(folder: pathlib.Path, arguments: list[dict[str, Any]]) -> list[jax.Array]:
    """The list that the functions take, made of the stored tensors."""
    tensors: dict[str, jax.Array] = {}
    for path in sorted((folder / "weights").glob("*.safetensors")):
        tensors |= safetensors.flax.load_file(path)
    if not tensors:
        raise SystemExit(f"{folder / 'weights'} is not there: export again without --noweights")
    return [
        jnp.stack([tensors[name] for name in argument["tensors"]]) if argument["stacked"]
        else tensors[argument["tensors"][0]]
        for argument in arguments
    ]  # fmt: skip


def generate(
    model: Exported, prompts: list[list[int]], steps: int, *, temperature: float = 0.0, seed: int = 0
) -> list[list[int]]:
    """``steps`` token ids after each prompt; at most as many prompts as the functions take at a time."""
    batch, chunk = model.about["batch"], model.about["prefill_tokens"]
    if len(prompts) > batch:
        raise SystemExit(f"{len(prompts)} prompts: the functions take {batch} at a time")
    prompts = prompts + [prompts[0]] * (batch - len(prompts))
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    if lengths.max() + steps > model.about["max_tokens"]:
        raise SystemExit(f"{lengths.max()} + {steps} tokens: there is room for {model.about['max_tokens']}")
    prefill = jax.jit(model.prefill.call, donate_argnums=1)
    decode = jax.jit(model.decode.call, donate_argnums=1)
    sample = jax.jit(model.sample.call)

    cache = model.new_cache()
    logits = jnp.zeros((batch, model.about["vocab_size"]), jnp.float32)
    for first in range(0, int(lengths.max()), chunk):
        token_ids = np.zeros((batch, chunk), np.int32)
        for row, prompt in enumerate(prompts):
            part = prompt[first : first + chunk]
            token_ids[row, : len(part)] = part
        live = np.clip(lengths - first, 0, chunk).astype(np.int32)
        new_logits, cache = prefill(model.weights, cache, token_ids, np.full(batch, first, np.int32), live)
        logits = jnp.where((live > 0)[:, None], new_logits, logits)

    options = {
        "temperature": np.full(batch, temperature, np.float32),
        "top_k": np.zeros(batch, np.int32),
        "top_p": np.ones(batch, np.float32),
        "min_p": np.zeros(batch, np.float32),
        "seed": np.tile(np.array([0, seed], np.uint32), (batch, 1)),
    }
    chosen = []
    for step in range(steps):
        token_ids = sample(logits, options | {"num_sampled": np.full(batch, step, np.int32)})
        chosen.append(np.asarray(token_ids))
        logits, cache = decode(model.weights, cache, token_ids, lengths + np.int32(step))
    return np.stack(chosen, axis=1).tolist()


def main() -> None:
    """Prints the token ids, one line a prompt; the text too where there is a tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--token_ids", action="append", required=True, help="a prompt's ids, such as 1,2,3; repeatable")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prompts = [[int(word) for word in text.split(",")] for text in arguments.token_ids]
    backend = jax.default_backend()
    model = Exported(pathlib.Path(__file__).parent, "cuda" if backend == "gpu" else backend)
    steps, temperature, seed = arguments.steps, arguments.temperature, arguments.seed
    for token_ids in generate(model, prompts, steps, temperature=temperature, seed=seed)[: len(prompts)]:
        print(",".join(map(str, token_ids)))


if __name__ == "__main__":
    main()
