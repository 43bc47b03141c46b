"""Attention of new queries over a paged cache: decode, verify and chunk prefill behind one function."""

from precast.kernels_pallas.paged_attention.api import AttentionConfig, paged_attention

__all__ = ["AttentionConfig", "paged_attention"]
