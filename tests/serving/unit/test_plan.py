"""Plans of images: encoding, identities, and what a worker accepts of a plan."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.unit.samples import blind, images, parts, served
from tests.tpdsl.samples import state
from vllm_autoprune import RequestError, load_state
from vllm_autoprune.serving.plan import (
    CHOOSERS,
    FIELD,
    MAX_RECALLS,
    NO_KEY,
    Choice,
    Chooser,
    Ids,
    ItemPlan,
    encode_state,
    make_cache_identity,
    make_feature_key,
    make_recall_identity,
    unpruned_tokens,
)
from vllm_autoprune.serving.served_state import PlanRules
from vllm_autoprune.serving.settings import LEVELS, DetailBudgets, RequestRules, TextTower
from vllm_autoprune.serving.worker.batch import prune_images
from vllm_autoprune.serving.worker.regions import SelectionContext
from vllm_autoprune.serving.worker.selection import FallbackReporter, PlanReader

INT64 = st.integers(-(2**63), 2**63 - 1)
IDS = st.lists(st.integers(0, 2**31), max_size=40).map(tuple)


@given(
    st.builds(
        ItemPlan,
        budget=st.integers(1, 1000),
        key=st.tuples(INT64, INT64),
        instruction=IDS,
        language=IDS,
        keep=st.sampled_from(CHOOSERS),
        profile=st.booleans(),
        state=st.binary(max_size=40),
        tokens=st.integers(0, 65536),
    ),
    st.lists(st.builds(Choice, st.integers(1, 1000), IDS, IDS), max_size=5),
    st.data(),
)
def test_decode_inverts_encode(plan: ItemPlan, earlier: list[Choice], data: st.DataObject) -> None:
    if earlier:
        core = data.draw(st.integers(0, earlier[0].budget - 1))
        plan = replace(plan, part="recall", core=core, earlier=tuple(earlier))
    row = plan.encode()
    assert row.dtype == torch.int64
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
    of_image = ItemPlan(8, (1, 2), (5,), state=b"s", tokens=144)
    before = replace(asked, budget=2, instruction=(6,), language=(7,), earlier=chain[:1])
    assert [*replace(asked, earlier=chain).items_before()] == [of_image, before]

    split = replace(asked, core=6, earlier=chain[:1])
    core, delta = split.items_before()
    assert core == ItemPlan(6, (1, 2), state=b"s", tokens=144, part="core", core=6)
    assert delta == replace(of_image, budget=2, part="delta", core=6)
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


# ---- identities and keys ----

SAME: tuple[str, str, int, Chooser, tuple[Ids, Ids] | None] = (
    "img",
    "digest",
    8,
    "state",
    ((1, 2), ()),
)


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


def test_every_earlier_choice_is_part_of_the_identity_of_a_recall() -> None:
    image = make_cache_identity(*SAME)
    before = make_recall_identity(image, 4, ((1,), ()))
    others = [
        make_recall_identity(make_cache_identity("other", *SAME[1:]), 4, ((1,), ())),
        make_recall_identity(image, 5, ((1,), ())),
        make_recall_identity(image, 4, ((2,), ())),
        make_recall_identity(image, 4, ((), ())),
        make_recall_identity(before, 4, ((1,), ())),
    ]
    assert len({image, before, *others}) == 7
    assert before == make_recall_identity(image, 4, ((1,), ()))


# ---- what a worker accepts ----

WORDS = 100
OWN = encode_state(state({"/constraints/selector/q_e": 3}))
SHIPPED = encode_state(load_state("visionzip"))


def rules(level: Any = "states", most: int = 64, **more: Any) -> PlanRules:
    allowed = RequestRules(level, 1, most, explicit=True, **more)
    return PlanRules(dataclasses.replace(served(), rules=allowed), WORDS)


def plan(**more: Any) -> ItemPlan:
    return ItemPlan(**{"budget": 8, "key": (1, 2), "instruction": (3,), **more})


def refused(item_plan: ItemPlan, by: PlanRules, placeholders: int | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        by.check(item_plan, item_plan.budget if placeholders is None else placeholders)
    assert "autoprune_plan" in str(caught.value)
    return str(caught.value)


def test_plans_of_the_api_server_are_allowed() -> None:
    for level in LEVELS:
        rules(level).check(plan(), 8)
    rules("budget").check(plan(budget=64, keep="random"), 64)
    rules("shipped-states").check(plan(state=SHIPPED), 8)
    rules("states").check(plan(state=OWN), 8)


@pytest.mark.parametrize(
    ("item_plan", "level", "message"),
    [
        (plan(profile=True), "states", "profiling"),
        (plan(budget=65), "states", "K = 65"),
        (plan(budget=9), "none", "K = 9"),
        (plan(keep="random"), "none", "keep = 'random'"),
        (plan(keep="resized"), "none", "keep = 'resized'"),
        (plan(keep="resized", part="core", core=8), "budget", "an image that is resized"),
        (plan(instruction=(WORDS,)), "none", "vocabulary of 100"),
        (plan(language=(2**40,)), "none", "vocabulary of 100"),
        (plan(state=SHIPPED), "budget", "they may set budget"),
        (plan(state=OWN), "shipped-states", "does not ship"),
        (plan(state=b"{}"), "states", "cannot be served"),
        (plan(state=b"\xff" * 9), "states", "cannot be served"),
        (plan(state=OWN + b" "), "states", "canonical"),
        (plan(state=encode_state(load_state("fastv"))), "states", "reads language"),
    ],
    ids=str,
)
def test_a_forged_plan_is_refused(item_plan: ItemPlan, level: Any, message: str) -> None:
    by = rules(level)
    if "reads" in message:
        lacking = dataclasses.replace(by.served, unavailable=(("language", "not here"),))
        by = PlanRules(lacking, WORDS)
    assert message in refused(item_plan, by)


@pytest.mark.parametrize("level", LEVELS)
def test_plans_may_keep_the_largest_budget_of_a_detail(level: Any) -> None:
    by = rules(level, 10, detail=DetailBudgets(low=4, high=10))
    for budget in (4, 8, 10):
        by.check(plan(budget=budget), budget)
    assert "K = 11" in refused(plan(budget=11), by)


def recall(budget: int = 8, before: int = 8, **more: Any) -> ItemPlan:
    return plan(budget=budget, part="recall", earlier=(Choice(before), Choice(4)), **more)


def test_plans_may_recall_what_the_server_or_its_requests_may() -> None:
    rules("budget").check(recall(64), 64)
    assert "recalls 65" in refused(recall(65), rules())
    assert "keeps K = 65" in refused(recall(before=65), rules())
    rules("none", recall=8).check(recall(8), 8)
    assert "recalls 9 tokens, and requests may recall 8" in refused(
        recall(9), rules("none", recall=8)
    )
    assert "core" in refused(recall(core=4), rules()), "the state has none"


def test_token_ids_of_earlier_questions_are_checked_and_never_looked_up() -> None:
    for ids in ({"instruction": (WORDS,)}, {"language": (WORDS,)}):
        forged = dataclasses.replace(recall(), earlier=(Choice(8), Choice(4, **ids)))
        assert "beyond the vocabulary" in refused(forged, rules())
        result, reporter = read(forged.encode(), rules())
        assert result.earlier == (Choice(8), Choice(4))
        assert reporter.meter.errors == {"RequestError": 1}


def test_a_plan_has_as_many_rows_as_the_prompt_has_room_for() -> None:
    assert "8 tokens for 32 placeholders" in refused(plan(), rules(), 32)


def test_text_tower_has_its_own_vocabulary() -> None:
    tower = TextTower("some/clip", 1, "because", 77, 768, 1024, vocabulary=10)
    by = PlanRules(dataclasses.replace(served(), tower=tower), WORDS)
    by.check(plan(instruction=(9,), language=(99,)), 8)
    assert "vocabulary of 10" in refused(plan(instruction=(10,)), by)


def read(row: object, by: PlanRules) -> tuple[ItemPlan, FallbackReporter]:
    reporter = FallbackReporter()
    (result,) = PlanReader(by, reporter, torch.device("cpu")).read([row])
    return result, reporter


def test_worker_replaces_invalid_plans() -> None:
    result, reporter = read(plan(state=OWN).encode(), rules("budget"))
    assert (result.state, result.keep, result.budget) == (b"", "state", 8)
    assert reporter.meter.errors == {"RequestError": 1}
    assert reporter.meter.counts_on_host()["reference", "plan"] == 1
    result, _ = read(plan(instruction=(WORDS,), language=(WORDS,)).encode(), rules())
    assert (result.instruction, result.language) == ((), ())
    result, _ = read(plan(keep="random").encode(), rules("none"))
    assert result.keep == "state"
    for junk in (None, torch.zeros(3), torch.full((20,), -1), "no plan", [1, 2]):
        result, reporter = read(junk, rules())
        assert (result.budget, result.keep, result.state) == (8, "reference", b"")
        assert sum(reporter.meter.errors.values()) == 1


def test_plan_with_impossible_budget_keeps_its_number_of_rows() -> None:
    strict = PlanRules(served({"/constraints/selector/r_min": 8}), WORDS)
    result, reporter = read(plan(budget=4).encode(), strict)
    assert (result.budget, result.keep, reporter.meter.errors) == (4, "reference", {})
    limited = PlanRules(served({"/budget/limit": 32}), WORDS)
    assert read(plan(budget=33).encode(), limited)[0].keep == "random"


def test_every_decoded_plan_can_be_executed() -> None:
    source = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(-3, 12, (length,), generator=source) for length in range(60) for _ in range(9)
    ]
    sound = plan(state=OWN, language=(4, 5)).encode()
    for place in range(len(sound)):
        for value in (-(2**63), -1, 0, 1, 7, 35, 36, 2**31, 2**63 - 1):
            rows.append(sound.index_fill(0, torch.tensor([place]), value))
    strict = dataclasses.replace(blind(), rules=RequestRules("states"))
    reporter = FallbackReporter()
    plans = PlanReader(PlanRules(strict, WORDS), reporter, torch.device("cpu")).read(rows)
    kept = [accepted for accepted in plans if not accepted.profile and accepted.budget <= 36]
    assert len(kept) > 400
    for accepted in kept:
        (row,) = prune_images(SelectionContext(strict, parts(), reporter), [accepted], images(1))
        assert row.shape[0] == accepted.budget
