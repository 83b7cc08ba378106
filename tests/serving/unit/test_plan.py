from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_autoprune.serving.plan import (
    FIELD,
    KEEPS,
    Ids,
    ItemPlan,
    Keep,
    image_key,
    pruned_identity,
    unpruned_tokens,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
PLANS = st.builds(
    ItemPlan,
    budget=st.integers(1, 65536),
    key=st.tuples(INT64, INT64),
    instruction=st.lists(st.integers(0, 2**31), max_size=40).map(tuple),
    language=st.lists(st.integers(0, 2**31), max_size=40).map(tuple),
    keep=st.sampled_from(KEEPS),
    profile=st.booleans(),
    state=st.binary(max_size=40),
    tokens=st.integers(0, 65536),
)
SAME: tuple[str, str, int, Keep, tuple[Ids, Ids] | None] = (
    "img",
    "digest",
    8,
    "state",
    ((1, 2), ()),
)


@given(PLANS)
def test_a_plan_comes_back_as_it_was(plan: ItemPlan) -> None:
    row = plan.encode()
    assert row.dtype == torch.int64
    words = (len(plan.state) + 7) // 8
    assert row.shape == (8 + words + len(plan.instruction) + len(plan.language),)
    assert ItemPlan.decode(row) == plan
    assert unpruned_tokens(row) == plan.tokens


def test_images_are_selected_together_where_budget_chooser_and_state_agree() -> None:
    plan = ItemPlan(8, (1, 2), (3,), state=b"a state")
    assert plan.group == ItemPlan(8, (5, 6), (7,), (8,), state=b"a state").group
    for other in (
        ItemPlan(9, (1, 2), (3,), state=b"a state"),
        ItemPlan(8, (1, 2), (3,), keep="reference", state=b"a state"),
        ItemPlan(8, (1, 2), (3,)),
        ItemPlan(8, (1, 2), (3,), state=b"another"),
    ):
        assert other.group != plan.group


@given(st.text(max_size=20))
def test_an_image_key_is_two_int64(identity: str) -> None:
    key = image_key(identity)
    assert torch.tensor(key).tolist() == list(key)
    assert key == image_key(identity)
    assert key != image_key(identity + "x")
    assert key[0] != key[1]


def test_equal_decisions_have_one_identity() -> None:
    assert pruned_identity(*SAME) == pruned_identity(*SAME)
    assert pruned_identity(*SAME) != "img"


@pytest.mark.parametrize(
    "other",
    [
        ("other", "digest", 8, "state", ((1, 2), ())),
        ("img", "other", 8, "state", ((1, 2), ())),
        ("img", "digest", 9, "state", ((1, 2), ())),
        ("img", "digest", 8, "reference", ((1, 2), ())),
        ("img", "digest", 8, "random", ((1, 2), ())),
        ("img", "digest", 8, "state", ((1, 3), ())),
        ("img", "digest", 8, "state", ((2, 1), ())),
        ("img", "digest", 8, "state", ((12,), ())),
        ("img", "digest", 8, "state", ((), ())),
        ("img", "digest", 8, "state", ((), (1, 2))),
        ("img", "digest", 8, "state", ((1,), (2,))),
        ("img", "digest", 8, "state", ((1, 2), (3,))),
        ("img", "digest", 8, "state", None),
    ],
)
def test_each_part_of_a_decision_is_part_of_the_identity(
    other: tuple[str, str, int, Keep, tuple[Ids, Ids] | None],
) -> None:
    assert pruned_identity(*other) != pruned_identity(*SAME)


def test_an_empty_instruction_is_not_an_instruction_that_nobody_reads() -> None:
    empty = pruned_identity("i", "d", 8, "state", ((), ()))
    assert empty != pruned_identity("i", "d", 8, "state", None)


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
