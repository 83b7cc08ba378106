"""Placeholders of an image: how many tokens, in how many tiles, before any model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.multimodal.parse import ImageSize
    from vllm.multimodal.processing import BaseProcessingInfo
    from vllm.multimodal.processing.processor import PromptUpdateDetails


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Visual tokens N of an image before pruning, and the tiles of the vision tower they form."""

    tokens: int
    tiles: int = 1


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Placeholder rules of one backbone.

    ``count`` gives the token count of an image from its size and a request's processor arguments;
    ``count_largest`` that of the largest image; ``token`` is the id of the placeholder token.
    ``unsplittable`` says why an image cannot be several items of a prompt, empty where it can.
    ``resize`` gives the size to which the model's processor would shrink an image of that size to
    have at most K tokens; None where N does not follow the size closely enough.
    """

    count: Callable[[BaseProcessingInfo, ImageSize, Mapping[str, object]], TokenCount]
    count_largest: Callable[[BaseProcessingInfo], TokenCount]
    token: Callable[[BaseProcessingInfo], int]
    unsplittable: str = ""
    resize: Callable[[BaseProcessingInfo, ImageSize, int], ImageSize] | None = None


def shorten_placeholders(content: PromptUpdateDetails, budget: int) -> PromptUpdateDetails:
    """Keep the first K placeholders of one image's prompt text, and all other tokens."""
    is_embed = (
        [True] * len(content.full)
        if content.is_embed is None
        else content.is_embed(content.full).tolist()
    )
    if sum(is_embed) <= budget:
        return content
    left, kept = budget, []
    for token, is_placeholder in zip(content.full, is_embed, strict=True):
        if not is_placeholder or left > 0:
            kept.append(token)
            left -= is_placeholder
    return replace(content, full=kept)
