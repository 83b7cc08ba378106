"""Images in several items: core and delta, and what later turns recall."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.unit.samples import LARGE, Sender, served
from tests.tpdsl.samples import sample
from vllm_autoprune import RequestError
from vllm_autoprune.serving.api.choices import ImageChoice, Placeholders
from vllm_autoprune.serving.api.planner import RequestPlanner
from vllm_autoprune.serving.api.request import PruningRequest, RecallTurn
from vllm_autoprune.serving.api.split import (
    DEAREST,
    MAX_ITEMS,
    MAX_TURNS,
    RecallItem,
    Slot,
    SplitImage,
    align_core,
    choose_recalls,
    expand_marks,
    limit_recalls,
    mark_recall_turns,
    requested_recall,
    split_images,
)
from vllm_autoprune.serving.settings import RequestRules
from vllm_autoprune.tpdsl.cost import DEFAULT_COST, state_cost
from vllm_autoprune.tpdsl.loading import load_state

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
TOKEN = 7


def user(*parts: object) -> dict[str, object]:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": texts}


def said(text: str, role: str = "user") -> dict[str, object]:
    return {"role": role, "content": text}


def turns(*images: int) -> list[RecallTurn]:
    return [RecallTurn(images=count, text=f"question {i}") for i, count in enumerate(images)]


def test_later_user_turns_without_an_image_are_marked_in_front_of_their_text() -> None:
    messages = [
        said("Be brief.", "system"),
        said("Hello"),
        user(IMAGE, "What is it?"),
        said("A cat.", "assistant"),
        said("And its colour?"),
        said("Red.", "assistant"),
        user("One", "more?"),
        user("Compare:", IMAGE),
        user("Well?"),
    ]
    marked: Any
    marked, found = mark_recall_turns(messages, "<image>", "\n")
    assert found == [
        RecallTurn(images=1, text="And its colour?"),
        RecallTurn(images=1, text="One\nmore?"),
        RecallTurn(images=2, text="Well?"),
    ]
    changed = [i for i, message in enumerate(messages) if marked[i] != message]
    assert changed == [4, 6, 8]
    assert marked[4]["content"] == "<image>\nAnd its colour?"
    assert [part["text"] for part in marked[6]["content"]] == ["<image>\nOne", "more?"]
    assert messages[4]["content"] == "And its colour?"


@pytest.mark.parametrize(
    "other",
    [
        said("What does <image> mean?"),
        said("It stands for an <image>.", "assistant"),
        user({"type": "video_url", "video_url": {"url": "x"}}),
        user({"type": "image_embeds", "image_embeds": "x"}),
    ],
    ids=str,
)
def test_no_turn_is_marked_where_marks_could_be_mistaken(other: dict[str, object]) -> None:
    messages = [user(IMAGE, "What is it?"), other, said("Sure?")]
    assert mark_recall_turns(messages, "<image>", "") == (messages, [])


@pytest.mark.parametrize("kind", ["refusal", "thinking", "tool_reference"])
def test_words_of_other_kinds_do_not_stop_recall(kind: str) -> None:
    part = {"type": kind, kind: "hm"}
    messages = [user(IMAGE, "What is it?"), user(part), user(part, "Sure?")]
    marked: Any
    marked, found = mark_recall_turns(messages, "<image>", "")
    assert found == [RecallTurn(images=1, text="Sure?")]
    assert marked[2]["content"][1]["text"] == "<image>Sure?"
    named = user({"type": kind, kind: "an <image>"})
    assert mark_recall_turns([*messages, named], "<image>", "")[1] == []


@pytest.mark.parametrize("content", [None, "", "  ", [], 5])
def test_a_turn_without_text_recalls_nothing(content: object) -> None:
    messages = [user(IMAGE, "What is it?"), {"role": "user", "content": content}]
    assert mark_recall_turns(messages, "<image>", "") == (messages, [])


def test_a_request_recalls_what_it_says_or_what_the_server_has() -> None:
    assert requested_recall(None, 8) == 8
    assert requested_recall({"autoprune": {"budget": 16}}, 8) == 8
    assert requested_recall({"autoprune": {"recall": 4}}, 8) == 4
    assert requested_recall({"autoprune": {"recall": 0}}, 8) == 0
    assert requested_recall({"autoprune": {"recall": "4"}}, 8) == 0
    assert requested_recall({"autoprune": {"enabled": False}}, 8) == 0


def images(*sizes: tuple[int, int]) -> list[ImageChoice]:
    return [ImageChoice(kept, tokens, "state") for kept, tokens in sizes]


def test_a_turn_splits_its_tokens_over_the_images_before_it() -> None:
    items = choose_recalls(turns(1, 2), 5, images((8, 144), (8, 144)), ["a", "b"])
    assert items == [RecallItem(0, 0, 5), RecallItem(0, 1, 3), RecallItem(1, 1, 2)]


def test_an_image_shown_twice_is_recalled_after_its_last_place() -> None:
    items = choose_recalls(turns(1, 2), 4, images((8, 144), (8, 144)), ["a", "a"])
    assert items == [RecallItem(0, 0, 4), RecallItem(1, 1, 4)]


def test_later_turns_do_not_change_what_earlier_ones_recall() -> None:
    choices = images((8, 144), (16, 100), (4, 20))
    longer = choose_recalls(turns(1, 2, 2, 3, 3), 7, choices, ["a", "b", "c"])
    for count in range(5):
        shorter = choose_recalls(turns(1, 2, 2, 3, 3)[:count], 7, choices, ["a", "b", "c"])
        assert longer[: len(shorter)] == shorter


def test_a_request_has_a_bounded_number_of_items() -> None:
    items = choose_recalls(
        turns(*[40] * 300), 1000, images(*[(8, 1000)] * 40), [*map(str, range(40))]
    )
    assert len(items) == MAX_ITEMS
    late = choose_recalls(turns(*[1] * MAX_TURNS, 2), 1, images((8, 8), (8, 9)), ["a", "b"])
    assert late == []


def test_recalls_stay_within_the_range_of_requests(folder: Any) -> None:
    """K = 8 of 64 tokens and a range that ends at 10: two more, whatever is asked for."""
    rules = RequestRules("budget", 1, 10, explicit=True)
    asked: Any = {"recall_turns": [{"images": 1, "text": f"turn {i}"} for i in range(3)]}
    sender = Sender(folder, 8, rules)
    assert sender.send([LARGE], recall=9, **asked).lengths == [8, 2]
    assert sender.send([LARGE], recall=9, budget=10, **asked).lengths == [10]
    of_image = Sender(folder, 8, replace(rules, recall=9))
    assert of_image.send([LARGE], **asked).lengths == [8, 9, 9, 9], (
        "the operator's own are not asked for"
    )


def test_a_recall_reads_the_question_though_k_does_not(folder: Any) -> None:
    """A core of all of K is chosen without a question, and what is recalled beside it with one."""
    sender = Sender(folder, 8, core={"share": 1.0})
    asked, other = (
        sender.send([LARGE], recall=4, recall_turns=[{"images": 1, "text": text}])
        for text in ("and the red cat?", "how many are there?")
    )
    assert asked.plans[1].read != other.plans[1].read
    assert asked.identities[0] == other.identities[0]
    assert asked.identities[1] != other.identities[1]


def test_recalls_of_a_request_cost_no_more_than_two_images() -> None:
    cheap, dear = sample(), sample()
    signal = {"atom": "cluster_centroid_representativeness", "clusters": 64}
    dear["scoring"]["signals"] = [{**signal, "weight": 0.1 + i / 100} for i in range(3)]
    limits = []
    for state in (cheap, dear):
        loaded = load_state(json.dumps(state))
        limits.append(limit_recalls(loaded, DEFAULT_COST))
        assert limits[-1] * state_cost(loaded) <= DEAREST * DEFAULT_COST
    assert limits[0] > limits[1] >= DEAREST


def test_marks_become_an_image_token_for_every_item() -> None:
    items = [RecallItem(0, 0, 5), RecallItem(0, 2, 3), RecallItem(1, 2, 2)]
    ids = [1, TOKEN, 2, TOKEN, 3, TOKEN, 4, TOKEN, 5, TOKEN]
    expanded, entries = expand_marks(ids, TOKEN, 2, turns(1, 1, 2), items)
    assert expanded == [1, TOKEN, 2, TOKEN, 3, 4, TOKEN, 5, TOKEN, TOKEN]
    assert entries == [0, items[0], 1, items[1], items[2]]


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([1, TOKEN, 2], turns(1)),
        ([TOKEN, TOKEN, TOKEN], turns(1)),
        ([TOKEN, TOKEN, TOKEN], turns(1, 3)),
        ([TOKEN, TOKEN], turns(2)),
    ],
    ids=str,
)
def test_marks_that_do_not_fit_the_prompt_are_refused(
    ids: list[int], found: list[RecallTurn]
) -> None:
    with pytest.raises(RequestError, match="recall"):
        expand_marks(ids, TOKEN, 1, found, [])


def test_a_request_for_recall_is_refused_where_an_image_cannot_be_several_items() -> None:
    info: Any = SimpleNamespace()
    never: Any = None
    unsplit = Placeholders(never, never, lambda info: TOKEN, "writes text around the tiles")
    inputs: Any = SimpleNamespace(prompt=[TOKEN, 1])
    planner = RequestPlanner(info, served(), unsplit, never)
    choices = [ImageChoice(8, 144, "state")]
    with pytest.raises(RequestError, match=r"recall.*this model writes text.* -> leave it out"):
        planner._recall(inputs, PruningRequest(recall=8), choices, ["a"])
    for accepted in (PruningRequest(recall=0), PruningRequest()):
        assert planner._recall(inputs, accepted, choices, ["a"]) == ([TOKEN, 1], range(1))


# ---- core and delta ----

IMAGE_ID, TEXT = 9, 1


@pytest.mark.parametrize(
    ("start", "budget", "core", "block", "aligned"),
    [
        (3, 32, 24, 32, 29),  # the only edge inside
        (3, 64, 48, 32, 61),  # of 29 and 61 the nearer one
        (0, 64, 40, 16, 32),  # an image that begins on an edge
        (3, 29, 20, 32, 0),  # the edge is the image's own end
        (3, 16, 8, 32, 0),  # no edge inside
        (30, 16, 8, 32, 2),  # an edge near the beginning
        (3, 320, 256, 16, 253),
    ],
)
def test_core_ends_on_the_nearest_edge_of_a_block(
    start: int, budget: int, core: int, block: int, aligned: int
) -> None:
    assert align_core(start, SplitImage(budget, core, "q"), block) == aligned


def test_deltas_of_a_turn_follow_its_last_image() -> None:
    ids = [TEXT, IMAGE_ID, TEXT, IMAGE_ID, TEXT, IMAGE_ID, TEXT]
    images = [SplitImage(20, 10, "q"), SplitImage(40, 20, "q"), SplitImage(40, 30, "other")]
    split = split_images(ids, IMAGE_ID, images, 16)
    assert split is not None
    # The second core begins at 1 + 10 + 1 = 12; the third image at 12 + 20 + 10 + 20 + 1 = 63.
    assert split.slots == (
        Slot(0, "core", 10),
        Slot(1, "core", 20),
        Slot(0, "delta", 10),
        Slot(1, "delta", 20),
        Slot(2, "core", 33),
        Slot(2, "delta", 33),
    )
    assert split.ids == [TEXT, IMAGE_ID, TEXT, *[IMAGE_ID] * 3, TEXT, *[IMAGE_ID] * 2, TEXT]


@pytest.mark.parametrize(
    ("ids", "images"),
    [
        ([TEXT, IMAGE_ID], [SplitImage(40, 0, "q")]),  # no core
        ([TEXT, IMAGE_ID], [SplitImage(10, 5, "q")]),  # no edge of a block inside
        ([IMAGE_ID, IMAGE_ID], [SplitImage(40, 20, "q")]),  # image tokens that no image stands for
    ],
)
def test_what_shares_nothing_is_not_split(ids: list[int], images: list[SplitImage]) -> None:
    assert split_images(ids, IMAGE_ID, images, 16) is None


@given(
    st.lists(
        st.tuples(st.integers(1, 80), st.integers(0, 79), st.sampled_from("ab"), st.integers(0, 5)),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([16, 32]),
)
def test_every_image_keeps_its_budget_and_the_text_stays(
    drawn: list[tuple[int, int, str, int]], block: int
) -> None:
    images = [SplitImage(budget, min(core, budget - 1), turn) for budget, core, turn, _ in drawn]
    ids: list[int] = []
    for *_, words in drawn:
        ids += [TEXT] * words + [IMAGE_ID]
    split = split_images([*ids, TEXT], IMAGE_ID, images, block)
    if split is None:
        return
    assert [i for i in split.ids if i == TEXT] == [TEXT] * (1 + sum(words for *_, words in drawn))
    assert split.ids.count(IMAGE_ID) == len(split.slots)
    for i, image in enumerate(images):
        of_image = [slot for slot in split.slots if slot.image == i]
        assert [slot.part for slot in of_image] in (["whole"], ["core", "delta"])
        assert all(0 < slot.core < image.budget for slot in of_image if slot.part != "whole")
    position, slots = 0, iter(split.slots)
    ends = []
    for token in split.ids:
        if token == TEXT:
            position += 1
            continue
        slot = next(slots)
        budget = images[slot.image].budget
        position += {"whole": budget, "core": slot.core, "delta": budget - slot.core}[slot.part]
        ends.append((slot, position))
    for (slot, end), (following, _) in pairwise(ends):
        if slot.part == "core" and following.part == "delta":
            assert end % block == 0 or following.image != slot.image
