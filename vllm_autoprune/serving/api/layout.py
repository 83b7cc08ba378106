"""Layout of a prompt: placeholders of images, their cores and deltas, recalls of later turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from vllm_autoprune.serving.api.positions import ItemFields, ItemSize, find_placeholders
from vllm_autoprune.serving.api.request import RecallTurn, split_shared_budget
from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.plan import (
    ENTRY,
    MAX_RECALLS,
    MAX_TEXT_IDS,
    ItemPlan,
    Part,
    refuse,
)
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET
from vllm_autoprune.tpdsl.cost import state_cost
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import split_over_parts

if TYPE_CHECKING:
    from vllm.multimodal.parse import ImageSize
    from vllm.multimodal.processing import BaseProcessingInfo
    from vllm.multimodal.processing.processor import PromptUpdateDetails

# Placeholders of an image: how many tokens, in how many tiles, before any model runs.


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Visual tokens N of an image before pruning, and the tiles of the vision tower they form.

    ``left`` are those after cells were dropped before the tower; None where none were.
    """

    tokens: int
    tiles: int = 1
    left: int | None = None

    @property
    def encoded(self) -> int:
        """Tokens that the tower makes: M of N."""
        return self.tokens if self.left is None else self.left


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
    does so (``Qwen3VLMultiModalProcessor.get_video_repl``). ``video_token`` is the token of clips;
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
        how many rows there are, and the plan which text is among them. All ids of a clip are then
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
        places = tuple(
            (at, token) for at, token, placeholder in text if not placeholder
        )
        if len(places) > MAX_TEXT_IDS:
            what = f"has {len(places)} tokens of text, and {MAX_TEXT_IDS} are allowed"
            kind, fix = (
                ("video", "fewer frames") if plan.frames else ("image", "a smaller one")
            )
            raise refuse(kind, what, f"send {fix}")
        if plan.frames:
            shortened = [content.full[is_embed.index(True)]] * len(shortened)
        return replace(content, full=shortened, is_embed=None), replace(
            plan, text=places
        )


@dataclass(frozen=True, slots=True)
class Slot:
    """One item of the prompt: ``budget`` tokens of an image, all it keeps or a part of them.

    ``core`` is K_c of the image: for a whole one what its state asks for, 0 where it cannot be
    split; for a part what was made of it. ``turn`` of a whole image is equal for images of one user
    turn, which one question follows, and for no others; of a recall it is the number of its turn.
    """

    image: int
    budget: int
    part: Part = "whole"
    core: int = 0
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """An item of a request: its image or clip and plan, and what caches hold it by.

    ``identity`` is that of its tokens, ``key`` that of its processed tensors, which all items of an
    image have in common.
    """

    image: int
    plan: ItemPlan
    identity: str
    key: str


# Split of a request's images into cores, which questions share, and deltas behind them.
#
# An image becomes two items of the prompt. vLLM's prefix cache keys a block by the items that
# overlap it (``kv_cache_utils._gen_mm_extra_hash_keys``), so every block that ends within the cores
# is shared by all questions about the images::
#
#     one item    [text][      K tokens chosen by the question      ][question]
#     two items   [text][ K_c for every question ][ K - K_c by this one ][question]
#
# Cores of several images come first, where the images stand; all deltas follow the last of them.


def split_slots(
    ids: Sequence[int], image_token: int, slots: Sequence[Slot], block: int
) -> tuple[list[int], list[Slot]] | None:
    """Token ids and items with whole images split, or None where that shares nothing.

    ``ids`` has one image token an item. The last core of a turn ends on the edge of a KV block of
    ``block`` tokens, so its K_c may differ from the state's; an image without such an edge inside
    stays whole.
    """
    places = [at for at, token in enumerate(ids) if token == image_token]
    if len(places) != len(slots) or not any(slot.core for slot in slots):
        return None
    new_ids: list[int] = []
    new_slots: list[Slot] = []
    # in the prompt that the model sees; in ids
    position = 0
    done = 0
    for _, turn in groupby(
        range(len(slots)), key=lambda i: (slots[i].part, slots[i].turn)
    ):
        deltas: list[Slot] = []
        members = list(turn)
        for i in members:
            position += places[i] - done
            new_ids += ids[done : places[i] + 1]
            done = places[i] + 1
            slot = slots[i]
            core = slots[i].core
            if i == members[-1] and core:
                core = align_core(position, slot.budget, core, block)
            if core:
                new_slots.append(Slot(slot.image, core, "core", core))
                deltas.append(Slot(slot.image, slot.budget - core, "delta", core))
            else:
                new_slots.append(replace(slot, core=0))
            position += core or slot.budget
        new_ids += [image_token] * len(deltas)
        new_slots += deltas
        position += sum(delta.budget for delta in deltas)
    if not any(slot.core for slot in new_slots):
        return None
    return new_ids + list(ids[done:]), new_slots


def align_core(start: int, budget: int, core: int, block: int) -> int:
    """K_c for which a core that begins at token ``start`` ends on a block's edge, 0 without one.

    The edge nearest to the state's own K_c, inside the image of K tokens.
    """
    beyond = -(-(start + 1) // block) * block
    edges = range(beyond, start + budget, block)
    return min(
        (edge - start for edge in edges), key=lambda size: abs(size - core), default=0
    )


# Recall: a later user turn without an image gets more tokens of the images before it.
#
# They are chosen by the turn's own text among the tokens that are not kept yet, and stand in front
# of it, so that the prefix of the conversation is as it was::
#
#     [turn 1: K tokens of the image, question 1] ... [turn 2: K_r more tokens, question 2] ...
#
# The chat renderer marks these turns with an image token each, before the chat template is applied;
# the processor gives every mark its items, one for each image.

_MAX_TURNS = 256
"""Turns of a conversation that may recall, the first ones: more would take seconds to plan."""

MAX_ITEMS = 64
"""Items that the turns of a request recall."""

_DEAREST = 2
"""What all recalls of a request by a state of its own may cost: as much as so many images with the
dearest state that it may bring (``--autoprune-request-cost``)."""


def limit_recalls(state: PruningState, bound: float) -> int:
    """Number of items that a request may recall by a state of its own.

    ``bound`` is the cost of one selection that requests may have, in milliseconds.
    """
    return max(_DEAREST, min(MAX_ITEMS, int(_DEAREST * bound / state_cost(state))))


def choose_recalls(
    turns: Sequence[RecallTurn],
    recall: int,
    plans: Sequence[ItemPlan],
    contents: Sequence[str],
    most: int = MAX_BUDGET,
    limit: int = MAX_ITEMS,
) -> list[Slot]:
    """The items of every turn: ``recall`` tokens, split over the images before it.

    An image that is shown several times is recalled after its last place. Nothing is recalled of an
    image that has ``most`` tokens or no tokens left, that ``MAX_RECALLS`` turns have recalled, or
    that is resized. What a turn recalls does not depend on later ones. There are at most ``limit``
    items.
    """
    slots: list[Slot] = []
    room = [
        0 if plan.keep == "resized" else max(0, min(plan.tokens, most) - plan.budget)
        for plan in plans
    ]
    times = [0] * len(plans)
    for number, turn in enumerate(turns[:_MAX_TURNS]):
        last = {contents[i]: i for i in range(min(turn.images, len(plans)))}
        images = [
            i for i in sorted(last.values()) if room[i] and times[i] < MAX_RECALLS
        ]
        budgets = split_shared_budget(recall, [room[i] for i in images])
        of_turn = [
            Slot(i, budget, "recall", turn=number)
            for i, budget in zip(images, budgets, strict=True)
            if budget
        ]
        for slot in of_turn[: limit - len(slots)]:
            slots.append(slot)
            room[slot.image] -= slot.budget
            times[slot.image] += 1
    return slots


def expand_marks(
    ids: Sequence[int],
    token: int,
    images: Sequence[Slot],
    turns: Sequence[RecallTurn],
    recalls: Sequence[Slot],
) -> tuple[list[int], list[Slot]]:
    """Token ids with an image token for every item, and the items in their order.

    Raises RequestError where ``ids`` does not have one image token for every image and every turn.
    """
    marks: list[list[Slot]] = []
    """The items that each image token stands for: a turn's follow the images before it."""
    images_before = 0
    for number, turn in enumerate(turns):
        marks += [[slot] for slot in images[images_before : turn.images]]
        marks.append([slot for slot in recalls if slot.turn == number])
        images_before = turn.images
    marks += [[slot] for slot in images[images_before:]]
    places = [turn.images for turn in turns]
    if (
        ids.count(token) != len(marks)
        or places != sorted(places)
        or max(places) > len(images)
    ):
        found = f"{len(turns)} turns and {len(images)} images"
        what = f"{found} in a prompt of {ids.count(token)} marks"
        fix = "keep every message in the chat template, or send recall 0"
        raise refuse(f"{ENTRY}/recall_turns", what, fix)
    unread = iter(marks)
    expanded: list[int] = []
    for token_id in ids:
        expanded += [token] * len(next(unread)) if token_id == token else [token_id]
    return expanded, [slot for items in marks for slot in items]
