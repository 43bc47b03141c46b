"""Small random models of transformers, the reference implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

torch.set_num_threads(1)


def make(config: Any, directory: str, seed: int = 0) -> Any:
    """Builds the model of ``config`` with weights large enough that logits are not flat, and saves it."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point() or "inv_freq" in name or "embed_scale" in name:
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        with torch.no_grad():
            if tensor.ndim < 2 or "norm" in name:
                tensor.copy_((tensor.abs().mean() > 0.5).float() + 0.3 * noise)
            else:
                tensor.copy_(noise if "embed" in name else noise * 1.5 / tensor.shape[-1] ** 0.5)
    model.save_pretrained(directory)
    return model.eval()


@torch.no_grad()
def logits(model: Any, token_ids: list[int]) -> np.ndarray:
    """``[tokens, vocab]`` float32."""
    return model(torch.tensor([token_ids])).logits[0].float().numpy()


def greedy(model: Any, token_ids: list[int], steps: int) -> list[int]:
    """Greedy ids, end tokens ignored; without a cache, so that nothing but the forward pass is asked."""
    ids = list(token_ids)
    for _ in range(steps):
        ids.append(int(logits(model, ids)[-1].argmax()))
    return ids[len(token_ids) :]
