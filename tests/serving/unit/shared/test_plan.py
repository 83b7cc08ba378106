from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_autoprune import RequestError
from vllm_autoprune.serving.shared.plan import (
    CHOOSERS,
    FIELD,
    NO_KEY,
    Chooser,
    Ids,
    ItemPlan,
    make_cache_identity,
    make_feature_key,
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
SAME: tuple[str, str, int, Chooser, tuple[Ids, Ids] | None] = (
    "img",
    "digest",
    8,
    "state",
    ((1, 2), ()),
)


@given(PLANS)
def test_decode_inverts_encode(plan: ItemPlan) -> None:
    row = plan.encode()
    assert row.dtype == torch.int64
    words = (len(plan.state) + 7) // 8
    assert row.shape == (12 + words + len(plan.instruction) + len(plan.language),)
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
        (forged(2, 3), "keep = 3"),
        (forged(2, -1), "keep = -1"),
        (forged(3, 2), "profile = 2"),
        (forged(6, -1), "part of -1"),
        (forged(6, 2**62), "part of"),
        (forged(7, 10**6), "part of"),
        (forged(8, 257), "part of 257"),
        (forged(7, 3), "numbers"),
        (forged(9, 3), "part = 3"),
        (forged(9, 1), "K_c = 0"),
        (forged(9, 2), "K_c = 0"),
        (forged(10, 4), "K_c = 4"),
        (forged(11, -1), "N = -1"),
        (forged(12, -1), "more than its state"),
        (forged(14, -3), "negative"),
        (torch.cat([sound, sound]), "numbers"),
    ):
        with pytest.raises(RequestError, match=message):
            ItemPlan.decode(row)


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


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_feature_key_is_two_int64(content: str, salt: str) -> None:
    key = make_feature_key(content, salt)
    assert torch.tensor(key).tolist() == list(key)
    assert key == make_feature_key(content, salt)
    assert key[0] != make_feature_key(content + "x", salt)[0]
    assert key != NO_KEY


def test_salt_changes_the_key_but_not_the_random_seed() -> None:
    keys = [make_feature_key("content", salt) for salt in ("", "a", "b", "ab")]
    assert len(set(keys)) == 4
    assert len({draw for draw, _ in keys}) == 1
    assert make_feature_key("ab", "c") != make_feature_key("a", "bc")


@given(st.text(max_size=20), st.sampled_from(CHOOSERS))
def test_an_identity_is_one_digest_that_connectors_read_as_a_number(
    image: str, keep: Chooser
) -> None:
    """vLLM's LMCache adapter does ``int(identifier, 16) & 0xFFFF`` in the engine core."""
    identity = make_cache_identity(image, "digest", 8, keep, ((1,), ()))
    assert re.fullmatch("[0-9a-f]{64}", identity)


def test_last_16_bits_of_identities_differ() -> None:
    """Older LMCache versions keep only these bits."""
    images = [make_cache_identity(str(i), "digest", 8, "state", None) for i in range(64)]
    assert len({int(identity, 16) & 0xFFFF for identity in images}) > 60


def test_equal_plans_have_equal_identities() -> None:
    assert make_cache_identity(*SAME) == make_cache_identity(*SAME)
    assert make_cache_identity(*SAME) != "img"


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
    other: tuple[str, str, int, Chooser, tuple[Ids, Ids] | None],
) -> None:
    assert make_cache_identity(*other) != make_cache_identity(*SAME)


def test_empty_instruction_differs_from_unread_instruction() -> None:
    empty = make_cache_identity("i", "d", 8, "state", ((), ()))
    assert empty != make_cache_identity("i", "d", 8, "state", None)


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
