"""Placeholders of images and videos: how many tokens, in how many tiles, before any model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from vllm_autoprune.errors import RequestError
from vllm_autoprune.serving.api.positions import ItemFields, ItemSize, find_placeholders
from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.plan import MAX_TEXT_IDS, Ids, ItemPlan
from vllm_autoprune.tpdsl.tokens import split_over_parts

if TYPE_CHECKING:
    from vllm.multimodal.parse import ImageSize
    from vllm.multimodal.processing import BaseProcessingInfo
    from vllm.multimodal.processing.processor import PromptUpdateDetails


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Visual tokens N of an image or video before pruning, and the number of its tiles.

    ``remaining`` is M, the number of tokens after cells were dropped before the tower, or None if
    none were. ``frames`` is T of a video, and 0 for an image.
    """

    tokens: int
    tiles: int = 1
    remaining: int | None = None
    frames: int = 0

    @property
    def encoded(self) -> int:
        """Number of tokens that the tower encodes: M of N."""
        return self.tokens if self.remaining is None else self.remaining


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Placeholder rules of one backbone.

    ``count``: token count of an image, from its size and a request's processor arguments.
    ``count_largest``: token count of the largest image. ``token``: id of the placeholder token.
    ``unsplittable``: why an image cannot be several items of a prompt; empty if it can.
    ``resize``: the size to which the model's processor would shrink an image of a given size to at
    most K tokens; None if N does not follow the size closely enough.
    ``text``: the text of an item in an unprocessed prompt, for models without a placeholder token.
    ``embeds_text``: whether the worker also makes the rows of text between the tokens of a pruned
    item, because only the worker knows how many tokens are kept before each text. vLLM's own
    pruning of Qwen3-VL's videos does so (``Qwen3VLMultiModalProcessor.get_video_repl``).
    ``video_token``: id of the placeholder token of videos; None if videos are left whole.
    ``measure``: size of a processed image or video; None if frames are not counted and every row
    has its own position. ``marks``: ids of the rows that begin and end an image, for models whose
    prompts have placeholders for these too; the worker makes them, as it embeds text.
    """

    count: Callable[[BaseProcessingInfo, ImageSize, Mapping[str, object]], TokenCount]
    count_largest: Callable[[BaseProcessingInfo], TokenCount]
    token: Callable[[BaseProcessingInfo], int]
    unsplittable: str = ""
    resize: Callable[[BaseProcessingInfo, ImageSize, int], ImageSize] | None = None
    text: str = ""
    embeds_text: bool = False
    video_token: Callable[[BaseProcessingInfo], int] | None = None
    measure: Callable[[BaseProcessingInfo, ItemFields], ItemSize] | None = None
    marks: Callable[[BaseProcessingInfo], Ids] | None = None

    @depends_on("vllm.multimodal.processing.processor", "PromptUpdateDetails")
    def lay_out(
        self, content: PromptUpdateDetails, plan: ItemPlan, marks: Ids = ()
    ) -> tuple[PromptUpdateDetails, ItemPlan]:
        """Keep K placeholders of one item's prompt text, and all other tokens.

        If other tokens stand between the placeholders, each run of placeholders keeps an equal
        share of K, which is what the worker selects in a tile. If the worker also embeds the text,
        the ids only say how many rows there are, and the plan says which text is among them. All
        ids of a video are then placeholders, because its rows are placed by them. Memory profiling
        needs room for all tokens. ``marks`` are the ids that :attr:`marks` gives.
        """
        if marks:
            return _frame_by_marks(content, plan, marks)
        is_embed = find_placeholders(content)
        unpruned = plan.profile or sum(is_embed) <= plan.budget
        runs = [
            sum(1 for _ in run) for placeholder, run in groupby(is_embed) if placeholder
        ]
        embeds_text = self.embeds_text and (len(runs) > 1 or plan.frames > 0)
        if unpruned and not (plan.profile and embeds_text):
            return content, plan
        budget = sum(is_embed) if unpruned else plan.budget
        shares = iter(split_over_parts(budget, runs, [1] * len(runs)))
        shortened: list[int] = []
        tokens_by_kind = zip(is_embed, content.full, strict=True)
        for placeholder, run in groupby(tokens_by_kind, key=itemgetter(0)):
            tokens = [token for _, token in run]
            shortened += tokens[: next(shares)] if placeholder else tokens
        if not embeds_text:
            return replace(content, full=shortened), plan
        text = zip(accumulate(map(int, is_embed)), content.full, is_embed, strict=True)
        places = tuple((i, token) for i, token, is_row in text if not is_row)
        if len(places) > MAX_TEXT_IDS:
            what = f"has {len(places)} tokens of text, and {MAX_TEXT_IDS} are allowed"
            if plan.frames:
                raise RequestError.of("video", what, "send fewer frames")
            raise RequestError.of("image", what, "send a smaller one")
        if plan.frames:
            shortened = [content.full[is_embed.index(True)]] * len(shortened)
        return replace(content, full=shortened, is_embed=None), replace(
            plan, text=places
        )


def _frame_by_marks(
    content: PromptUpdateDetails, plan: ItemPlan, marks: Ids
) -> tuple[PromptUpdateDetails, ItemPlan]:
    """Keep K placeholders, and one for each of the rows that begin and end the image."""
    start, end = marks
    tokens = len(content.full) - len(marks)
    budget = tokens if plan.profile else min(plan.budget, tokens)
    shortened = content.full[: budget + len(marks)]
    framed = replace(plan, text=((0, start), (tokens, end)))
    return replace(content, full=shortened), framed
