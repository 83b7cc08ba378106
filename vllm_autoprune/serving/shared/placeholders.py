"""Placeholders of an image: how many tokens, in how many tiles, before any model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from vllm_autoprune.serving.shared.part_shares import split_over_parts

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
    have at most K tokens; None where N does not follow the size closely enough. Where text stands
    between the tiles of an image, ``first`` is the tile that takes what does not divide of K.
    """

    count: Callable[[BaseProcessingInfo, ImageSize, Mapping[str, object]], TokenCount]
    count_largest: Callable[[BaseProcessingInfo], TokenCount]
    token: Callable[[BaseProcessingInfo], int]
    unsplittable: str = ""
    resize: Callable[[BaseProcessingInfo, ImageSize, int], ImageSize] | None = None
    first: int = 0


def shorten_placeholders(
    content: PromptUpdateDetails, budget: int, first: int = 0
) -> PromptUpdateDetails:
    """Keep K placeholders of one image's prompt text, and all other tokens.

    Where other tokens stand between them, each run of placeholders is a tile and keeps its share of
    K, which is what the worker selects of the tile.
    """
    is_embed = (
        [True] * len(content.full)
        if content.is_embed is None
        else content.is_embed(content.full).tolist()
    )
    if sum(is_embed) <= budget:
        return content
    runs = [sum(1 for _ in run) for placeholder, run in groupby(is_embed) if placeholder]
    shares = split_over_parts(budget, runs, [1] * len(runs), first % len(runs))
    left, kept = iter(shares), []
    for placeholder, run in groupby(zip(is_embed, content.full, strict=True), key=itemgetter(0)):
        tokens = [token for _, token in run]
        kept += tokens[: next(left)] if placeholder else tokens
    return replace(content, full=kept)
