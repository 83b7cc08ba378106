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
class Extent:
    """Size of an image in the prompt: N tokens, in T tiles of the vision tower."""

    tokens: int
    tiles: int = 1


@dataclass(frozen=True, slots=True)
class Placeholders:
    """How one backbone writes images into a prompt.

    ``extent`` of an image of some size under a request's processor arguments; ``most`` of any
    image; ``token`` is the id that holds the place of visual tokens.
    """

    extent: Callable[[BaseProcessingInfo, ImageSize, Mapping[str, object]], Extent]
    most: Callable[[BaseProcessingInfo], Extent]
    token: Callable[[BaseProcessingInfo], int]


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
