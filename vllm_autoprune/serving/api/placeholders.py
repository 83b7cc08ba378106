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
from vllm_autoprune.serving.plan import MAX_TEXT_IDS, ItemPlan
from vllm_autoprune.tpdsl.tokens import split_over_parts

if TYPE_CHECKING:
    from vllm.multimodal.parse import ImageSize
    from vllm.multimodal.processing import BaseProcessingInfo
    from vllm.multimodal.processing.processor import PromptUpdateDetails


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Visual tokens N of an image or video before pruning, and the tiles that they form.

    ``remaining`` are those after cells were dropped before the tower; None where none were.
    ``frames`` is T of a video, 0 of an image.
    """

    tokens: int
    tiles: int = 1
    remaining: int | None = None
    frames: int = 0

    @property
    def encoded(self) -> int:
        """Tokens that the tower makes: M of N."""
        return self.tokens if self.remaining is None else self.remaining


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Placeholder rules of one backbone.

    ``count`` gives the token count of an image from its size and a request's processor arguments;
    ``count_largest`` that of the largest image; ``token`` is the id of the placeholder token.
    ``unsplittable`` says why an image cannot be several items of a prompt, empty where it can.
    ``resize`` gives the size to which the model's processor would shrink an image of that size to
    have at most K tokens; None where N does not follow the size closely enough. ``text`` is what
    stands for an item in a prompt before it is processed, where it is no token. ``embeds_text``
    says that the worker makes the rows of text between the tokens of a pruned item as well: only
    there it is known how many tokens are kept before each. vLLM's own pruning of Qwen3-VL's videos
    does so (``Qwen3VLMultiModalProcessor.get_video_repl``). ``video_token`` is the token of videos;
    None where videos are left whole. ``measure`` gives the size of a processed image or video; None
    where frames are not counted and every row has a position of its own.
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

    @depends_on("vllm.multimodal.processing.processor", "PromptUpdateDetails")
    def lay_out(
        self, content: PromptUpdateDetails, plan: ItemPlan
    ) -> tuple[PromptUpdateDetails, ItemPlan]:
        """Keep K placeholders of one item's prompt text, and all other tokens.

        Where other tokens stand between them, each run of placeholders keeps an equal share of K,
        which is what the worker selects of a tile, unless it embeds the text too: the ids then say
        how many rows there are, and the plan which text is among them. All ids of a video are then
        placeholders, by which its rows are placed. Memory profiling needs room for all of them.
        """
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
