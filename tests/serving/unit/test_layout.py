"""Layout of a prompt: placeholders, cores and deltas, recalls of later turns."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.unit.sender import LARGE, Sender
from tests.tables import parametrize_from_file
from tests.tpdsl.samples import sample
from vllm_autoprune import RequestError
from vllm_autoprune.serving.api.layout import (
    MAX_ITEMS,
    Slot,
    align_core,
    choose_recalls,
    expand_marks,
    limit_recalls,
    split_slots,
)
from vllm_autoprune.serving.api.request import RecallTurn, split_shared_budget
from vllm_autoprune.serving.plan import NO_KEY, ItemPlan
from vllm_autoprune.serving.request_rules import RequestRules
from vllm_autoprune.tpdsl.cost import DEFAULT_COST, state_cost
from vllm_autoprune.tpdsl.loading import load_state

TEXT = 1
TOKEN = 9


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 5000))
def test_shares_sum_to_the_total_and_never_exceed_what_each_has(
    sizes: list[int], total: int
) -> None:
    budgets = split_shared_budget(total, sizes)
    assert sum(budgets) == min(total, sum(sizes))
    assert all(0 <= budget <= size for budget, size in zip(budgets, sizes, strict=True))
    assert total < len(sizes) or min(budgets) >= 1
    # An image that could take more has at least what any other has, but for the remainder.
    unfilled = [
        budget for budget, size in zip(budgets, sizes, strict=True) if budget < size
    ]
    assert all(max(budgets) - budget <= 1 for budget in unfilled)


# ---- core and delta ----


@parametrize_from_file("start", "budget", "core", "block", "aligned")
def test_a_core_ends_on_the_nearest_edge_of_a_block(
    start: int, budget: int, core: int, block: int, aligned: int
) -> None:
    assert align_core(start, budget, core, block) == aligned


def test_deltas_of_a_turn_follow_its_last_image() -> None:
    ids = [TEXT, TOKEN, TEXT, TOKEN, TEXT, TOKEN, TEXT, TOKEN]
    slots = [
        Slot(0, 20, core=10, turn=0),
        Slot(1, 40, core=20, turn=0),
        Slot(2, 40, core=30),
    ]
    recalled = Slot(2, 5, "recall", turn=0)
    # The second core begins at 1 + 10 + 1 = 12; the third image at 12 + 20 + 10 + 20 + 1 = 63.
    assert split_slots(ids, TOKEN, [*slots, recalled], 16) == (
        [TEXT, TOKEN, TEXT, *[TOKEN] * 3, TEXT, *[TOKEN] * 2, TEXT, TOKEN],
        [
            Slot(0, 10, "core", 10),
            Slot(1, 20, "core", 20),
            Slot(0, 10, "delta", 10),
            Slot(1, 20, "delta", 20),
            Slot(2, 33, "core", 33),
            Slot(2, 7, "delta", 33),
            recalled,
        ],
    )
    for image_ids, slot in (
        ([TEXT, TOKEN], Slot(0, 40)),  # no core
        ([TEXT, TOKEN], Slot(0, 10, core=5)),  # no edge of a block inside
        ([TOKEN, TOKEN], Slot(0, 40, core=20)),  # image tokens that no image stands for
    ):
        assert split_slots(image_ids, TOKEN, [slot], 16) is None


@given(
    st.lists(
        st.tuples(
            st.integers(1, 80), st.integers(0, 79), st.integers(0, 1), st.integers(0, 5)
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([16, 32]),
)
def test_every_image_keeps_its_budget_and_the_text_stays(
    drawn: list[tuple[int, int, int, int]], block: int
) -> None:
    images = []
    ids = list[int]()
    for i, (budget, core, turn, words) in enumerate(drawn):
        images.append(Slot(i, budget, core=min(core, budget - 1), turn=turn))
        ids += [TEXT] * words + [TOKEN]
    new_ids, slots = split_slots([*ids, TEXT], TOKEN, images, block) or (
        [*ids, TEXT],
        images,
    )
    assert new_ids.count(TEXT) == ids.count(TEXT) + 1
    assert new_ids.count(TOKEN) == len(slots)
    for image in images:
        of_image = [slot for slot in slots if slot.image == image.image]
        assert [slot.part for slot in of_image] in (["whole"], ["core", "delta"])
        assert sum(slot.budget for slot in of_image) == image.budget
        assert all(slot.budget > 0 for slot in of_image)
    # The last core of a turn, which its delta follows, ends on the edge of a block.
    position = 0
    unread = iter(slots)
    previous = Slot(-1, 0)
    for token in new_ids:
        slot = next(unread) if token == TOKEN else Slot(-1, 1)
        if (previous.part, previous.image) == ("core", slot.image):
            assert position % block == 0
        position += slot.budget
        previous = slot


# ---- recall ----


def turns(*images: int) -> list[RecallTurn]:
    return [
        RecallTurn(images=count, text=f"question {i}") for i, count in enumerate(images)
    ]


def plans(*sizes: tuple[int, int]) -> list[ItemPlan]:
    return [ItemPlan(budget, NO_KEY, tokens=tokens) for budget, tokens in sizes]


def recalled(image: int, turn: int, budget: int) -> Slot:
    return Slot(image, budget, "recall", turn=turn)


LARGE_TWICE = ((8, 144), (8, 144))


@pytest.mark.parametrize(
    ("later", "tokens", "sizes", "contents", "slots"),
    [
        (turns(1, 2), 5, LARGE_TWICE, "ab", [(0, 0, 5), (0, 1, 3), (1, 1, 2)]),
        # An image shown twice is recalled after its last place.
        (turns(1, 2), 4, LARGE_TWICE, "aa", [(0, 0, 4), (1, 1, 4)]),
        # Of the 257th turn on nothing is recalled, and nothing of an image that is kept whole.
        (turns(*[1] * 256, 2), 1, ((8, 8), (8, 9)), "ab", []),
    ],
)
def test_a_turn_splits_its_tokens_over_the_images_before_it(
    later: list[RecallTurn], tokens: int, sizes: Any, contents: str, slots: list[Any]
) -> None:
    expected = [recalled(*slot) for slot in slots]
    assert choose_recalls(later, tokens, plans(*sizes), contents) == expected


def test_later_turns_do_not_change_what_earlier_ones_recall() -> None:
    images = plans((8, 144), (16, 100), (4, 20))
    places = (1, 2, 2, 3, 3)
    longer = choose_recalls(turns(*places), 7, images, "abc")
    for count in range(5):
        shorter = choose_recalls(turns(*places)[:count], 7, images, "abc")
        assert longer[: len(shorter)] == shorter


def test_a_request_recalls_a_bounded_number_of_items_at_a_bounded_cost() -> None:
    contents = [*map(str, range(40))]
    slots = choose_recalls(turns(*[40] * 300), 1000, plans(*[(8, 1000)] * 40), contents)
    assert len(slots) == MAX_ITEMS
    dear = sample()
    signal = {"atom": "cluster_centroid_representativeness", "clusters": 64}
    dear["scoring"]["signals"] = [{**signal, "weight": 0.1 + i / 100} for i in range(3)]
    limits = []
    for state in (sample(), dear):
        loaded = load_state(json.dumps(state))
        limits.append(limit_recalls(loaded, DEFAULT_COST))
        assert limits[-1] * state_cost(loaded) <= 2 * DEFAULT_COST, "that of two images"
    assert limits[0] > limits[1] >= 2


def test_marks_become_an_image_token_for_every_item() -> None:
    images = [Slot(0, 8), Slot(1, 8)]
    slots = [recalled(0, 0, 5), recalled(0, 2, 3), recalled(1, 2, 2)]
    ids = [1, TOKEN, 2, TOKEN, 3, TOKEN, 4, TOKEN, 5, TOKEN]
    assert expand_marks(ids, TOKEN, images, turns(1, 1, 2), slots) == (
        [1, TOKEN, 2, TOKEN, 3, 4, TOKEN, 5, TOKEN, TOKEN],
        [images[0], slots[0], images[1], *slots[1:]],
    )
    for marks, later in ((1, turns(1)), (3, turns(1)), (3, turns(1, 3)), (2, turns(2))):
        with pytest.raises(RequestError, match="recall_turns"):
            expand_marks([TOKEN] * marks, TOKEN, [Slot(0, 8)], later, [])


def test_recalls_stay_within_the_range_of_requests(folder: Any) -> None:
    """K = 8 of 64 tokens and a range that ends at 10: two more, whatever is asked for."""
    fields: Any = {
        "recall_turns": [{"images": 1, "text": f"turn {i}"} for i in range(3)]
    }
    sender = Sender(folder, 8, RequestRules("budget", 1, 10, explicit=True))
    assert sender.send([LARGE], recall=9, **fields).lengths == [8, 2]
    assert sender.send([LARGE], recall=9, budget=10, **fields).lengths == [10]
    by_operator = Sender(
        folder, 8, RequestRules("budget", 1, 10, explicit=True, recall=9)
    )
    assert by_operator.send([LARGE], **fields).lengths == [8, 9, 9, 9], "not asked for"


def test_a_recall_reads_the_question_though_k_does_not(folder: Any) -> None:
    """A core of all of K is chosen without a question, and what is recalled beside it with one."""
    sender = Sender(folder, 8, core={"share": 1.0})
    about_cat, about_number = (
        sender.send([LARGE], recall=4, recall_turns=[{"images": 1, "text": text}])
        for text in ("and the red cat?", "how many are there?")
    )
    assert about_cat.plans[1].read != about_number.plans[1].read
    assert about_cat.identities[0] == about_number.identities[0]
    assert about_cat.identities[1] != about_number.identities[1]
