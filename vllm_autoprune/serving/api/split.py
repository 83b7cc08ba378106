"""Items of a prompt: cores that questions share, deltas behind them, recalls of later turns."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from vllm_autoprune.serving.api.choices import ImageChoice, split_shared_budget
from vllm_autoprune.serving.api.instruction import message_parts, part_text, shows_image
from vllm_autoprune.serving.api.request import REQUEST_FIELD, RecallTurn, request_error
from vllm_autoprune.serving.plan import MAX_RECALLS, Part
from vllm_autoprune.tpdsl.cost import state_cost
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET
from vllm_autoprune.tpdsl.state import PruningState

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


@dataclass(frozen=True, slots=True)
class SplitImage:
    """One image before it is split: K of N tokens, K_c of them core, 0 where it cannot be split.

    ``turn`` is equal for images of one user turn, which one question follows, and for no others.
    """

    budget: int
    core: int
    turn: Hashable


@dataclass(frozen=True, slots=True)
class Slot:
    """One item of the prompt: which image, what of it, and K_c where it is a part."""

    image: int
    part: Part = "whole"
    core: int = 0


@dataclass(frozen=True, slots=True)
class SplitPrompt:
    """Token ids with one image token an item, and the items in their order."""

    ids: list[int]
    slots: tuple[Slot, ...]


def split_images(
    ids: Sequence[int], image_token: int, images: Sequence[SplitImage], block: int
) -> SplitPrompt | None:
    """Split images of a prompt, or None where that shares nothing.

    ``ids`` has one image token an image. The last core of a turn ends on the edge of a KV block of
    ``block`` tokens, so its K_c may differ from the state's; an image without such an edge inside
    stays whole.
    """
    places = [at for at, token in enumerate(ids) if token == image_token]
    if len(places) != len(images) or not any(image.core for image in images):
        return None
    new_ids: list[int] = []
    slots: list[Slot] = []
    position, done = 0, 0  # in the prompt that the model sees; in ids
    for _, turn in groupby(range(len(images)), key=lambda i: images[i].turn):
        deltas: list[Slot] = []
        members = list(turn)
        for i in members:
            position += places[i] - done
            new_ids += ids[done : places[i] + 1]
            done = places[i] + 1
            core = images[i].core
            if i == members[-1] and core:
                core = align_core(position, images[i], block)
            slots.append(Slot(i, "core", core) if core else Slot(i))
            position += core or images[i].budget
            if core:
                deltas.append(Slot(i, "delta", core))
        new_ids += [image_token] * len(deltas)
        slots += deltas
        position += sum(images[slot.image].budget - slot.core for slot in deltas)
    if not any(slot.core for slot in slots):
        return None
    return SplitPrompt(new_ids + list(ids[done:]), tuple(slots))


def align_core(start: int, image: SplitImage, block: int) -> int:
    """K_c for which a core that begins at token ``start`` ends on a block's edge, 0 without one.

    The edge nearest to the state's own K_c, inside the image.
    """
    beyond = -(-(start + 1) // block) * block
    edges = range(beyond, start + image.budget, block)
    return min((edge - start for edge in edges), key=lambda core: abs(core - image.core), default=0)


# Recall: a later user turn without an image gets more tokens of the images before it.
#
# They are chosen by the turn's own text among the tokens that are not kept yet, and stand in front
# of it, so that the prefix of the conversation is as it was::
#
#     [turn 1: K tokens of the image, question 1] ... [turn 2: K_r more tokens, question 2] ...
#
# The chat renderer marks these turns with an image token each, before the chat template is applied;
# the processor gives every mark its items, one for each image.


MAX_TURNS = 256
"""Turns of a conversation that may recall, the first ones: more would take seconds to plan."""

MAX_ITEMS = 64
"""Items that the turns of a request recall."""

DEAREST = 2
"""What all recalls of a request by a state of its own may cost: as much as so many images with the
dearest state that it may bring (``--autoprune-request-cost``)."""

_WORDS = ("refusal", "thinking", "tool_reference")
"""Kinds of parts that are words, though no instruction."""

_EMBEDDINGS = "image_embeds"
"""Kind of a part that brings an image without the signals that states read."""


@dataclass(frozen=True, slots=True)
class RecallItem:
    """Tokens of one image that a turn recalls; ``image`` and ``turn`` are indices."""

    image: int
    turn: int
    budget: int


def requested_recall(kwargs: Mapping[str, object] | None, default: int) -> int:
    """K_r of a request before its fields are checked; 0 where it has none or none that counts."""
    entry = (kwargs or {}).get(REQUEST_FIELD)
    if not isinstance(entry, Mapping):
        return default
    recall = entry.get("recall")
    if entry.get("enabled") is False:
        return 0
    return default if recall is None else recall if isinstance(recall, int) else 0


def mark_recall_turns(
    messages: Sequence[object], token: str, space: str
) -> tuple[list[object], list[RecallTurn]]:
    """The messages with an image token in front of every turn that recalls, and these turns.

    No turn recalls in a conversation whose text has an image token of its own, or that shows
    something other than images.
    """
    parts = [message_parts(message) for message in messages]
    texts = [[part_text(part) for part in of_message] for of_message in parts]
    others = any(
        text is None
        and not _is_words(part, token)
        and (not shows_image(part) or _is_embeddings(part))
        for of_message, of_texts in zip(parts, texts, strict=True)
        for part, text in zip(of_message, of_texts, strict=True)
    )
    if others or any(token in text for of_texts in texts for text in of_texts if text is not None):
        return list(messages), []
    marked: list[object] = []
    turns: list[RecallTurn] = []
    images = 0
    for message, of_texts in zip(messages, texts, strict=True):
        shown = sum(map(shows_image, message_parts(message)))
        text = "\n".join(text for text in of_texts if text is not None).strip()
        if images and not shown and text and _is_user(message):
            message = _put_before(message, token + space)
            turns.append(RecallTurn(images=images, text=text))
        images += shown
        marked.append(message)
    return marked, turns


def _is_user(message: object) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "user"


def _is_words(part: object, token: str) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _WORDS and token not in str(part)


def _is_embeddings(part: object) -> bool:
    return isinstance(part, Mapping) and _EMBEDDINGS in (part.get("type"), *part)


def _put_before(message: object, mark: str) -> object:
    """The message with ``mark`` in front of its first text."""
    assert isinstance(message, Mapping)
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": mark + content}
    at = next(i for i, part in enumerate(content) if part_text(part) is not None)
    text = content[at]
    part = mark + text if isinstance(text, str) else {**text, "text": mark + text["text"]}
    return {**message, "content": [*content[:at], part, *content[at + 1 :]]}


def limit_recalls(state: PruningState, bound: float) -> int:
    """Number of items that a request may recall by a state of its own.

    ``bound`` is the cost of one selection that requests may have, in milliseconds.
    """
    return max(DEAREST, min(MAX_ITEMS, int(DEAREST * bound / state_cost(state))))


def choose_recalls(
    turns: Sequence[RecallTurn],
    recall: int,
    choices: Sequence[ImageChoice],
    contents: Sequence[str],
    most: int = MAX_BUDGET,
    limit: int = MAX_ITEMS,
) -> list[RecallItem]:
    """The items of every turn: ``recall`` tokens, split over the images before it.

    An image that is shown several times is recalled after its last place. Nothing is recalled of an
    image that has ``most`` tokens or no tokens left, that ``MAX_RECALLS`` turns have recalled, or
    that is resized. What a turn recalls does not depend on later ones. There are at most ``limit``
    items.
    """
    items: list[RecallItem] = []
    room = [
        0 if choice.keep == "resized" else max(0, min(choice.tokens, most) - choice.kept)
        for choice in choices
    ]
    times = [0] * len(choices)
    for number, turn in enumerate(turns[:MAX_TURNS]):
        last = {contents[i]: i for i in range(min(turn.images, len(choices)))}
        images = [i for i in sorted(last.values()) if room[i] and times[i] < MAX_RECALLS]
        budgets = split_shared_budget(recall, [room[i] for i in images])
        of_turn = [RecallItem(i, number, k) for i, k in zip(images, budgets, strict=True) if k]
        for item in of_turn[: limit - len(items)]:
            items.append(item)
            room[item.image] -= item.budget
            times[item.image] += 1
    return items


def expand_marks(
    ids: Sequence[int],
    token: int,
    images: int,
    turns: Sequence[RecallTurn],
    items: Sequence[RecallItem],
) -> tuple[list[int], list[int | RecallItem]]:
    """Token ids with an image token for every item, and what each image token stands for.

    Those are the index of an image, or an item of a turn. Raises RequestError where ``ids`` does
    not have one image token for every image and every turn.
    """
    places = [turn.images for turn in turns]
    marks = [*range(images)] + [images + number for number in range(len(turns))]
    marks.sort(key=lambda mark: (mark, 0) if mark < images else (places[mark - images] - 1, 1))
    if ids.count(token) != len(marks) or places != sorted(places) or max(places) > images:
        what = f"{len(turns)} turns and {images} images in a prompt of {ids.count(token)} marks"
        fix = "keep every message in the chat template, or send recall 0"
        raise request_error("recall_turns", what, fix)
    of_turn = {
        number: list(stands_for)
        for number, stands_for in groupby(items, key=lambda item: item.turn)
    }
    expanded: list[int] = []
    entries: list[int | RecallItem] = []
    unread = iter(marks)
    for token_id in ids:
        if token_id != token:
            expanded.append(token_id)
            continue
        mark = next(unread)
        stands_for: list[int | RecallItem] = [mark]
        if mark >= images:
            stands_for = list(of_turn.get(mark - images, []))
        expanded += [token] * len(stands_for)
        entries += stands_for
    return expanded, entries
