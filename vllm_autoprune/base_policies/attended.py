"""What policies share that read the language model's first layers over [image, instruction].

Knows nothing about what a policy makes of it.

Such methods were published as pruning inside the language model. Here the same scores are read
before it runs, so that what is removed never enters the KV cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_autoprune.errors import SelectionError
from vllm_autoprune.tpdsl.language import LanguagePrefix

MOST_LAYERS = 128
"""Largest layer that a parameter may name; the served model may have fewer."""


def checked_layer(language: LanguagePrefix, layer: int) -> int:
    """``layer``, or an error where the language model has no such layer."""
    if not 0 <= layer < language.layers:
        raise SelectionError(
            f"the base policy reads layer {layer}, but this language model has layers 0 to "
            f"{language.layers - 1}: set the policy's parameter 'layer' to a smaller one"
        )
    return layer


def visual_span(language: LanguagePrefix, values: Tensor, count: int, dim: int = -1) -> Tensor:
    """The N visual positions of ``(..., L, ...)``."""
    return values.narrow(dim, language.start, count)


def text_span(language: LanguagePrefix, values: Tensor, count: int, dim: int = -1) -> Tensor:
    """The Lt positions after the image of ``(..., L, ...)``."""
    return values.narrow(dim, language.start + count, language.text.shape[1])


def attended_by_last(language: LanguagePrefix, layer: int, count: int) -> Tensor:
    """``(B, N)`` float32: attention that the last text token pays, averaged over heads."""
    rows = language.attention(checked_layer(language, layer)).float()
    return visual_span(language, last_row(rows, language.text).mean(dim=1), count)


def last_row(rows: Tensor, text: Tensor) -> Tensor:
    """Rows ``(B, H, Lt, L)`` at each sequence's last token that is no padding, ``(B, H, L)``."""
    places = torch.arange(text.shape[1], device=text.device)
    last = torch.where(text, places, 0).amax(dim=1)
    where = last[:, None, None, None].expand(-1, rows.shape[1], 1, rows.shape[3])
    return rows.gather(2, where)[:, :, 0]


def surviving(kept: Tensor, start: int, count: int, length: int) -> Tensor:
    """``(B, S + K + Lt)``: absolute positions that are left of L once the visual ones are pruned.

    kept ``(B, K)`` counts from the first of ``count`` visual tokens; positions keep their order.
    """
    batch, device = kept.shape[0], kept.device
    before = torch.arange(start, device=device).expand(batch, -1)
    after = torch.arange(start + count, length, device=device).expand(batch, -1)
    return torch.cat([before, kept.sort(dim=1).values + start, after], dim=1)
