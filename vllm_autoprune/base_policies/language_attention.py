"""Attention scores of the language model's first layers, shared by several base policies.

These methods were published as pruning inside the language model. Here the same scores are computed
before prefill, so that removed tokens never enter the KV cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_autoprune.errors import SelectionError
from vllm_autoprune.tpdsl.language_prefix import LanguagePrefix

MOST_LAYERS = 128
"""Largest layer that a parameter may name; the served model may have fewer layers."""


def require_layer(language: LanguagePrefix, layer: int) -> int:
    """``layer``; raises :class:`SelectionError` if the language model has no such layer."""
    if not 0 <= layer < language.layers:
        raise SelectionError(
            f"the base policy reads layer {layer}, but this language model has layers 0 to "
            f"{language.layers - 1}: set the policy's parameter 'layer' to a smaller one"
        )
    return layer


def visual_span(language: LanguagePrefix, values: Tensor, count: int, dim: int = -1) -> Tensor:
    """Slice the N visual positions of ``(..., L, ...)``."""
    return values.narrow(dim, language.start, count)


def text_span(language: LanguagePrefix, values: Tensor, count: int, dim: int = -1) -> Tensor:
    """Slice the Lt text positions after the image of ``(..., L, ...)``."""
    return values.narrow(dim, language.start + count, language.text.shape[1])


def last_token_attention(language: LanguagePrefix, layer: int, count: int) -> Tensor:
    """Attention of the last text token, averaged over heads, ``(B, N)`` float32."""
    rows = language.attention(require_layer(language, layer)).float()
    return visual_span(language, last_token_rows(rows, language.text).mean(dim=1), count)


def last_token_rows(rows: Tensor, text: Tensor) -> Tensor:
    """Rows ``(B, H, Lt, L)`` at the last text token that is not padding, ``(B, H, L)``."""
    positions = torch.arange(text.shape[1], device=text.device)
    last = torch.where(text, positions, 0).amax(dim=1)
    where = last[:, None, None, None].expand(-1, rows.shape[1], 1, rows.shape[3])
    return rows.gather(2, where)[:, :, 0]
