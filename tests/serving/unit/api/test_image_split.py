"""Cores end on the edges of KV blocks, and stand before all deltas of their turn."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_autoprune.serving.api.image_split import Slot, SplitImage, align_core, split_images

IMAGE, TEXT = 9, 1


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


def test_one_image_becomes_two_items_next_to_each_other() -> None:
    ids = [TEXT, TEXT, IMAGE, TEXT]
    split = split_images(ids, IMAGE, [SplitImage(40, 20, "q")], 16)
    assert split is not None
    assert split.ids == [TEXT, TEXT, IMAGE, IMAGE, TEXT]
    assert split.slots == (Slot(0, "core", 14), Slot(0, "delta", 14))


def test_deltas_of_a_turn_follow_its_last_image() -> None:
    ids = [TEXT, IMAGE, TEXT, IMAGE, TEXT, IMAGE, TEXT]
    images = [SplitImage(20, 10, "q"), SplitImage(40, 20, "q"), SplitImage(40, 30, "other")]
    split = split_images(ids, IMAGE, images, 16)
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
    assert split.ids == [TEXT, IMAGE, TEXT, *[IMAGE] * 3, TEXT, *[IMAGE] * 2, TEXT]


@pytest.mark.parametrize(
    ("ids", "images"),
    [
        ([TEXT, IMAGE], [SplitImage(40, 0, "q")]),  # no core
        ([TEXT, IMAGE], [SplitImage(10, 5, "q")]),  # no edge of a block inside
        ([IMAGE, IMAGE], [SplitImage(40, 20, "q")]),  # image tokens that no image stands for
    ],
)
def test_what_shares_nothing_is_not_split(ids: list[int], images: list[SplitImage]) -> None:
    assert split_images(ids, IMAGE, images, 16) is None


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
        ids += [TEXT] * words + [IMAGE]
    split = split_images([*ids, TEXT], IMAGE, images, block)
    if split is None:
        return
    assert [i for i in split.ids if i == TEXT] == [TEXT] * (1 + sum(words for *_, words in drawn))
    assert split.ids.count(IMAGE) == len(split.slots)
    for i, image in enumerate(images):
        own = [slot for slot in split.slots if slot.image == i]
        assert [slot.part for slot in own] in (["whole"], ["core", "delta"])
        assert all(0 < slot.core < image.budget for slot in own if slot.part != "whole")
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
