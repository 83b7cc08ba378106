from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_autoprune import RequestError
from vllm_autoprune.serving.shared.plan import (
    CHOOSERS,
    FIELD,
    MAX_RECALLS,
    Choice,
    ItemPlan,
    unpruned_tokens,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
PLANS = st.builds(
    ItemPlan,
    budget=st.integers(1, 65536),
    key=st.tuples(INT64, INT64),
    instruction=st.lists(st.integers(0, 2**31), max_size=40).map(tuple),
    language=st.lists(st.integers(0, 2**31), max_size=40).map(tuple),
    keep=st.sampled_from(CHOOSERS),
    profile=st.booleans(),
    state=st.binary(max_size=40),
    tokens=st.integers(0, 65536),
)
CHOICES = st.builds(
    Choice,
    budget=st.integers(1, 1000),
    instruction=st.lists(st.integers(0, 2**31), max_size=4).map(tuple),
    language=st.lists(st.integers(0, 2**31), max_size=4).map(tuple),
)


@given(PLANS)
def test_decode_inverts_encode(plan: ItemPlan) -> None:
    row = plan.encode()
    assert row.dtype == torch.int64
    words = (len(plan.state) + 7) // 8
    assert row.shape == (13 + words + len(plan.instruction) + len(plan.language),)
    assert ItemPlan.decode(row) == plan
    assert unpruned_tokens(row) == plan.tokens


def test_malformed_plans_are_refused_with_a_reason() -> None:
    sound = ItemPlan(8, (1, 2), (3, 4), (5,), state=b"a state").encode()

    def forged(place: int, value: int) -> torch.Tensor:
        return sound.index_fill(0, torch.tensor([place]), value)

    for row, message in (
        (None, "64-bit"),
        (sound.float(), "64-bit"),
        (sound[None], "64-bit"),
        (sound.to("meta"), "meta"),
        (sound[:5], "has 5 numbers"),
        (torch.zeros(10**6, dtype=torch.int64), "numbers"),
        (forged(0, 1), "format version 1"),
        (forged(1, 0), "K = 0"),
        (forged(1, -8), "K = -8"),
        (forged(1, 2**40), "K = "),
        (forged(2, 4), "keep = 4"),
        (forged(2, -1), "keep = -1"),
        (forged(3, 2), "profile = 2"),
        (forged(6, -1), "state of -1"),
        (forged(6, 2**62), "state of"),
        (forged(7, 10**6), "1000000 token ids"),
        (forged(8, 257), "257 token ids"),
        (forged(7, 3), "numbers"),
        (forged(9, 4), "part = 4"),
        (forged(9, 3), "has 0 choices"),
        (forged(9, 1), "K_c = 0"),
        (forged(9, 2), "K_c = 0"),
        (forged(10, 4), "K_c = 4"),
        (forged(11, 1), "numbers"),
        (forged(11, -1), "-1 earlier choices"),
        (forged(11, 17), "17 earlier choices"),
        (forged(12, -1), "N = -1"),
        (forged(13, -1), "more than its state"),
        (forged(15, -3), "negative"),
        (torch.cat([sound, sound]), "numbers"),
    ):
        with pytest.raises(RequestError, match=message):
            ItemPlan.decode(row)


@given(PLANS, st.lists(CHOICES, min_size=1, max_size=5), st.data())
def test_earlier_choices_of_a_recall_survive_encoding(
    plan: ItemPlan, earlier: list[Choice], data: st.DataObject
) -> None:
    core = data.draw(st.integers(0, earlier[0].budget - 1))
    recall = replace(plan, budget=8, part="recall", core=core, earlier=tuple(earlier))
    assert ItemPlan.decode(recall.encode()) == recall


def test_forged_earlier_choices_are_refused() -> None:
    recall = ItemPlan(8, (1, 2), (3,), part="recall", core=7, earlier=(Choice(8, (4,), (5, 6)),))
    for forged, message in (
        (replace(recall, core=8), "K_c = 8"),
        (replace(recall, earlier=(Choice(0),), core=0), "earlier K = 0"),
        (replace(recall, earlier=(Choice(8, (-1,)),)), "negative"),
        (replace(recall, earlier=(Choice(60_000), Choice(6_000))), "K = 66008"),
        (replace(recall, earlier=(Choice(8),) * (MAX_RECALLS + 1)), "earlier choices"),
        (replace(recall, earlier=()), "0 choices"),
        (replace(recall, part="whole", core=0), "1 choices"),
    ):
        with pytest.raises(RequestError, match=message):
            ItemPlan.decode(forged.encode())


def test_a_recall_knows_the_plans_of_the_items_before_it() -> None:
    asked = ItemPlan(3, (1, 2), (9,), state=b"s", tokens=144, part="recall")
    chain = (Choice(8, (5,)), Choice(2, (6,), (7,)))
    whole = ItemPlan(8, (1, 2), (5,), state=b"s", tokens=144)
    first = replace(asked, budget=2, instruction=(6,), language=(7,), earlier=chain[:1])
    assert [*replace(asked, earlier=chain).items_before()] == [whole, first]

    split = replace(asked, core=6, earlier=chain[:1])
    core, delta = split.items_before()
    assert core == ItemPlan(6, (1, 2), state=b"s", tokens=144, part="core", core=6)
    assert delta == replace(whole, budget=2, part="delta", core=6)
    assert [*delta.items_before()] == [core]
    assert [split.kept_before, split.image_budget] == [8, 11]


@given(st.lists(INT64, max_size=40))
def test_any_int64_row_is_decoded_or_refused(numbers: list[int]) -> None:
    row = torch.tensor(numbers, dtype=torch.int64)
    try:
        plan = ItemPlan.decode(row)
    except RequestError:
        return
    assert ItemPlan.decode(plan.encode()) == plan


def test_images_are_selected_together_where_budget_chooser_and_state_agree() -> None:
    plan = ItemPlan(8, (1, 2), (3,), state=b"a state")
    assert plan.group == ItemPlan(8, (5, 6), (7,), (8,), state=b"a state").group
    for other in (
        ItemPlan(9, (1, 2), (3,), state=b"a state"),
        ItemPlan(8, (1, 2), (3,), keep="reference", state=b"a state"),
        ItemPlan(8, (1, 2), (3,)),
        ItemPlan(8, (1, 2), (3,), state=b"another"),
        ItemPlan(8, (1, 2), (3,), state=b"a state", part="delta", core=4),
        ItemPlan(8, (1, 2), (3,), state=b"a state", part="core", core=8),
    ):
        assert other.group != plan.group


@pytest.mark.compat
@pytest.mark.parametrize("lengths", [(3, 3), (3, 5)])
def test_plans_stay_on_the_cpu_wherever_the_pixels_go(lengths: tuple[int, ...]) -> None:
    """Both model runners batch items by this function; a plan on the device would cost a sync."""
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
    from vllm.multimodal.utils import group_and_batch_mm_kwargs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    plans = [ItemPlan(8, (i, -i), tuple(range(n))) for i, n in enumerate(lengths)]
    items = MultiModalKwargsItems.from_hf_inputs(
        {"pixel_values": torch.zeros(2, 3, 4, 4), FIELD: [plan.encode() for plan in plans]},
        {
            "pixel_values": MultiModalFieldConfig.batched("image"),
            FIELD: MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        },
    )
    sent = [bytearray(part) for part in MsgpackEncoder().encode(items)]
    received = MsgpackDecoder(MultiModalKwargsItems).decode(sent)
    pairs = [("image", item) for item in received["image"]]
    ((_, count, batch),) = group_and_batch_mm_kwargs(pairs, device=torch.device("meta"))
    assert count == 2
    assert batch["pixel_values"].device.type == "meta"
    assert [ItemPlan.decode(row) for row in batch[FIELD]] == plans
