"""Requests that are planned alone, by sizes and digests of pictures: as if they were served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.serving.engine import built
from tests.serving.unit.sender import LARGE, SMALL, Sender, picture
from tests.tables import parametrize_from_file
from vllm_autoprune import RequestError
from vllm_autoprune.selftest.backbones import TINY_MODELS
from vllm_autoprune.serving.api.sized_pictures import (
    PLANNED,
    SizedPicture,
    find_sized_picture,
    name_pictures,
)

pytestmark = pytest.mark.compat

DIGEST = "ab" * 32
PICTURE = SizedPicture(1280, 800, DIGEST)
WIDE = picture(224, 84, 3)
PICTURES = (LARGE, WIDE, SMALL, LARGE)
NOTHING = [None] * len(PICTURES)
SENT = [PLANNED] * len(PICTURES)
ENTRIES: tuple[Mapping[str, object], ...] = (
    {},
    {"budget": "1/3"},
    {"keep": "resized"},
    {"enabled": False},
)


def plan(sender: Sender, *args: Any, **entry: Any) -> tuple[object, ...] | str:
    """Token ids, identities and placeholders of a request, or its refusal."""
    try:
        made = sender.process(*args, **entry)
    except RequestError as refusal:
        return str(refusal)
    places = [
        (place.offset, place.length, place.get_num_embeds())
        for place in made["mm_placeholders"]["image"]
    ]
    return made["prompt_token_ids"], made["mm_hashes"]["image"], places


def names_of(sender: Sender) -> list[str]:
    """Names of :data:`PICTURES`, as the plan of a request that sends them says."""
    made = sender.process(PICTURES, SENT)
    return [picture.name for picture in made["mm_hashes"].pictures]


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation"
)  # of GLM's image processor
@pytest.mark.parametrize("model", TINY_MODELS)
def test_a_prompt_is_planned_by_sizes_as_by_pixels(model: str) -> None:
    sender = Sender(built(model), budget=8, placeholder="")
    names = names_of(sender)
    mixed = [LARGE, None, SMALL, None]
    mixed_names = [PLANNED, names[1], PLANNED, names[3]]
    for entry in ENTRIES:
        served = plan(sender, PICTURES, **entry)
        assert plan(sender, NOTHING, names, **entry) == served
        assert plan(sender, mixed, mixed_names, **entry) == served


def test_core_recall_and_history_are_planned_by_sizes_as_by_pixels(folder: Any) -> None:
    core = {"share": 0.5}
    sender = Sender(folder, budget=32, core=core).with_blocks(4).with_cache("several")
    turns = [{"images": len(PICTURES), "text": "and now"}]
    names = names_of(sender)
    for entry in ({}, {"recall_turns": turns, "recall": 4}, {"history": "1:4"}):
        assert plan(sender, NOTHING, names, **entry) == plan(sender, PICTURES, **entry)


@pytest.mark.parametrize("entry", [{"keep": "random"}, {"cells": "flat"}], ids=str)
def test_what_is_decided_by_pixels_needs_the_picture(
    folder: Any, entry: Mapping[str, object]
) -> None:
    sender = Sender(folder, budget=8)
    names = names_of(sender)
    refusal = plan(sender, NOTHING, names, **entry)
    assert isinstance(refusal, str) and "pixels" in refusal
    served = plan(sender, PICTURES, **entry)
    assert plan(sender, PICTURES, SENT, **entry) == served


def test_a_request_that_is_planned_alone_never_reaches_an_engine(folder: Any) -> None:
    sender = Sender(folder, budget=8)
    for pictures, names in ((NOTHING, names_of(sender)), (PICTURES, SENT)):
        with pytest.raises(RequestError, match="pixels of nothing"):
            sender.send(pictures, names, hands_over=False)


def test_a_client_cannot_guess_the_name_of_a_picture(folder: Any) -> None:
    """By which it could plan with another client's picture, or learn which are cached."""
    form = PICTURE.name.removeprefix(PLANNED)
    assert find_sized_picture(PICTURE.name) == PICTURE
    for guess in (f"{'0' * 32}:{form}", f":{form}", form, f"{PLANNED[1:]}{form}"):
        assert find_sized_picture(guess) is None
        made = Sender(folder, budget=8).with_cache().process([LARGE], [guess])
        assert not made["mm_hashes"].pictures
        assert made["mm_kwargs"]["image"][0].keys() > {"pixel_values"}


@parametrize_from_file("part", "message")
def test_what_cannot_be_planned_is_refused(part: object, message: str) -> None:
    messages = [{"role": "user", "content": [part]}]
    with pytest.raises(RequestError, match=message):
        name_pictures(messages)


def test_texts_tools_and_details_stay_as_they_are() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    text = {"role": "system", "content": "look"}
    words = {"type": "text", "text": "what"}
    sized = {"type": "image_url", "image_url": {"url": PICTURE.url, "detail": "low"}}
    sent = {"type": "image_url", "image_url": {"url": "http://h/x"}, "uuid": "mine"}
    messages = [text, call, {"role": "user", "content": [sized, words, sent]}]
    *others, last = name_pictures(messages)
    named, same, fetched = last["content"]
    assert (others, same) == ([text, call], words)
    assert named["image_url"] == {"url": None, "detail": "low"}
    assert find_sized_picture(named["uuid"]) == PICTURE
    assert fetched == {**sent, "uuid": PLANNED}, "a client's name names nothing"
    assert sized["image_url"] == {"url": PICTURE.url, "detail": "low"}, "not changed"
