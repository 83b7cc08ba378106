"""Recall: a later user turn without an image gets more tokens of the images before it.

They are chosen by the turn's own text among the tokens that are not kept yet, and stand in front of
it, so that the prefix of the conversation is as it was::

    [turn 1: K tokens of the image, question 1] ... [turn 2: K_r more tokens, question 2] ...

The chat renderer marks these turns with an image token each, before the chat template is applied;
the processor gives every mark its items, one for each image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from vllm_autoprune.serving.api.instruction import message_parts, part_text, shows_image
from vllm_autoprune.serving.api.pruning_choice import ImageChoice, split_shared_budget
from vllm_autoprune.serving.api.request_fields import REQUEST_FIELD, RecallTurn, request_error
from vllm_autoprune.serving.shared.plan import MAX_RECALLS
from vllm_autoprune.tpdsl.cost import state_cost
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET
from vllm_autoprune.tpdsl.state import PruningState

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
        for of_message, own in zip(parts, texts, strict=True)
        for part, text in zip(of_message, own, strict=True)
    )
    if others or any(token in text for own in texts for text in own if text is not None):
        return list(messages), []
    marked: list[object] = []
    turns: list[RecallTurn] = []
    images = 0
    for message, own in zip(messages, texts, strict=True):
        shown = sum(map(shows_image, message_parts(message)))
        text = "\n".join(text for text in own if text is not None).strip()
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
    first = content[at]
    part = mark + first if isinstance(first, str) else {**first, "text": mark + first["text"]}
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
    left = [
        0 if choice.keep == "resized" else max(0, min(choice.tokens, most) - choice.kept)
        for choice in choices
    ]
    times = [0] * len(choices)
    for number, turn in enumerate(turns[:MAX_TURNS]):
        last = {contents[i]: i for i in range(min(turn.images, len(choices)))}
        images = [i for i in sorted(last.values()) if left[i] and times[i] < MAX_RECALLS]
        budgets = split_shared_budget(recall, [left[i] for i in images])
        own = [RecallItem(i, number, k) for i, k in zip(images, budgets, strict=True) if k]
        for item in own[: limit - len(items)]:
            items.append(item)
            left[item.image] -= item.budget
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
    of_turn = {number: list(own) for number, own in groupby(items, key=lambda item: item.turn)}
    expanded: list[int] = []
    entries: list[int | RecallItem] = []
    left = iter(marks)
    for one in ids:
        if one != token:
            expanded.append(one)
            continue
        mark = next(left)
        own: list[int | RecallItem] = [mark]
        if mark >= images:
            own = list(of_turn.get(mark - images, []))
        expanded += [token] * len(own)
        entries += own
    return expanded, entries
