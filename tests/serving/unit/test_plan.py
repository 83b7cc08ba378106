"""Plans of images: encoding, identities, and what a server and its workers accept of a plan."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.unit.samples import (
    as_row,
    blind,
    fields_of,
    images,
    parts,
    served,
    with_fields,
)
from tests.tables import parametrize_from_file
from tests.tpdsl.samples import edited, sample, state
from vllm_autoprune import RequestError, StateError, load_state
from vllm_autoprune.serving.identities import (
    make_cache_identity,
    make_feature_key,
    make_identity,
)
from vllm_autoprune.serving.plan import (
    CHOOSERS,
    FIELD,
    LINE,
    MAX_RECALLS,
    NO_KEY,
    Choice,
    ItemPlan,
)
from vllm_autoprune.serving.plan_rules import PlanRules
from vllm_autoprune.serving.request_rules import LEVELS, DetailBudgets, RequestRules
from vllm_autoprune.serving.served_state import Capabilities
from vllm_autoprune.serving.state_codec import decode_state, encode_state
from vllm_autoprune.serving.worker.batch import SelectionContext, prune_images
from vllm_autoprune.serving.worker.selection import FallbackReporter, PlanReader
from vllm_autoprune.text_tower import TextTower
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Positions

VOCABULARY = 100
UNSHIPPED = encode_state(state({"/constraints/selector/q_e": 3}))
SHIPPED = encode_state(load_state("visionzip"))
INT64 = st.integers(-(2**63), 2**63 - 1)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(tuple)


def plan(**fields: Any) -> ItemPlan:
    return ItemPlan(**{"budget": 8, "key": (1, 2), "instruction": (3,), **fields})


def recall(budget: int = 8, before: int = 8, **fields: Any) -> ItemPlan:
    return plan(
        budget=budget, part="recall", earlier=(Choice(before), Choice(4)), **fields
    )


# ---- encoding ----


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
        text=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)))
        .map(sorted)
        .map(tuple),
    ),
    st.lists(st.tuples(st.integers(1, 1000), IDS, IDS), max_size=5),
    st.integers(0, 999),
)
def test_every_item_of_an_image_is_encoded_and_knows_those_before_it(
    image: ItemPlan, recalls: list[Any], core: int
) -> None:
    items = [*image.split(core)] if 0 < core < image.budget else [image]
    for budget, *read in recalls:
        items.append(items[-1].recall(budget).ask(*read))
    for at, item in enumerate(items):
        row = item.encode()
        assert row.dtype == torch.uint8
        assert ItemPlan.decode(row) == item
        assert item.kept_before == sum(before.budget for before in items[:at])
        assert [*item.items_before()] == items[:at]


SOUND = ItemPlan(8, (1, 2), (3, 4), (5,), state=b"a state").encode()
HEAD = SOUND.numpy().tobytes()[:1]
forged = partial(with_fields, SOUND)


@given(st.binary(max_size=80))
def test_any_row_of_bytes_is_refused(text: bytes) -> None:
    """Behind the format's version too, and in the middle of a plan."""
    for row in (text, HEAD + text, SOUND.numpy().tobytes()[:9] + text):
        with pytest.raises(RequestError):
            ItemPlan.decode(as_row(row))


COUNTS = st.sampled_from([-1, 0, 1, 3, 8, 9, 70_000])
CHANGES: dict[str, st.SearchStrategy[object]] = {
    "budget": COUNTS,
    "core": COUNTS,
    "tokens": COUNTS,
    "frames": COUNTS,
    "keep": st.sampled_from([*CHOOSERS, "all"]),
    "part": st.sampled_from(["whole", "core", "delta", "recall", "half"]),
    "instruction": st.lists(st.integers(-1, 9), max_size=4),
    "earlier": st.lists(st.builds(Choice, COUNTS), max_size=2),
    "text": st.lists(st.tuples(COUNTS, COUNTS), max_size=3),
    "unknown": st.none(),
}


def test_any_record_is_decoded_as_what_it_says_or_refused() -> None:
    """Both halves are reached: a decoded plan has the fields, and their one row of bytes."""
    outcomes = Counter[str]()
    to_json = msgspec.json.encode

    @settings(max_examples=100)
    @given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=2), st.data())
    def check(names: list[str], data: st.DataObject) -> None:
        changes = {name: data.draw(CHANGES[name], name) for name in names}
        row = forged(**changes)
        try:
            decoded = ItemPlan.decode(row)
        except RequestError:
            outcomes["refused"] += 1
            return
        outcomes["decoded"] += 1
        assert torch.equal(decoded.encode(), row)
        for name, value in changes.items():
            assert to_json(getattr(decoded, name)) == to_json(value)

    check()
    assert outcomes["decoded"] > 10 and outcomes["refused"] > 10, outcomes


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (None, "a row of bytes"),
        (SOUND.float(), "a row of bytes"),
        (SOUND[None], "a row of bytes"),
        (SOUND.to("meta"), "meta"),
        (SOUND[:1], "has 1 bytes"),
        (SOUND[:5], "cannot be read"),
        (torch.zeros(1 << 20, dtype=torch.uint8), "has 1048576 bytes"),
        (torch.cat([SOUND, SOUND]), "trailing"),
        (SOUND.index_fill(0, torch.tensor([0]), 5), "format version 5"),
        *(
            (forged(budget=budget), "budget")
            for budget in (0, -1, 2**40, 8.0, "8", None)
        ),
        *((forged(keep=keep), "keep") for keep in (4, "all")),
        (forged(part="half"), "part"),
        (forged(profile=2), "profile"),
        (forged(key=[1]), "key"),
        (forged(key=[1, 2**63]), "key"),
        (forged(state=b"s" * 20_000), "state"),
        (forged(instruction=[-3]), "instruction"),
        (forged(instruction=[3] * 1025), "instruction"),
        (forged(language=[2**31]), "language"),
        (forged(language=[3] * 257), "language"),
        (forged(tokens=-1), "tokens"),
        (forged(frames=2**20 + 1), "frames"),
        (forged(earlier=[{"budget": 0}]), "earlier"),
        (forged(earlier=[{"budget": 8}] * (MAX_RECALLS + 1)), "earlier"),
        (forged(text=[[1, 2]] * 16_385), "text"),
        (forged(text=[[-1, 2]]), "text"),
        (forged(text=[[1, -1]]), "text"),
        (forged(more=1), "other bytes"),
        (forged(frames=5), "T = 5 of N = 0"),
        (forged(tokens=2**17), "N = 131072"),
        (plan(text=((2, 1), (1, 1))).encode(), "out of order"),
        (plan(part="core").encode(), "K_c = 0"),
        (plan(core=4).encode(), "K_c = 4"),
        (plan(part="recall").encode(), "0 earlier choices"),
        (recall(core=9).encode(), "K_c = 9"),
        (recall(before=65_530).encode(), "K = 65542"),
        (replace(recall(), part="whole").encode(), "2 earlier choices"),
        (plan(budget=65_537, tokens=65_536).encode(), "K = 65537"),
        (plan(budget=71, tokens=70, frames=7).encode(), "K = 71"),
    ],
)
def test_a_malformed_plan_is_refused_with_a_reason(row: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ItemPlan.decode(row)


def test_a_long_video_that_is_kept_whole_has_a_plan() -> None:
    """Of more tokens than an image can have, as where a request turns pruning off."""
    long_video = plan(budget=100_000, tokens=100_000, frames=1_000)
    assert ItemPlan.decode(long_video.encode()) == long_video and long_video.keeps_all


def test_a_plan_has_one_row_of_bytes() -> None:
    """Else two plans of one meaning would differ for whoever compares rows."""
    plain = fields_of(SOUND)
    missing = {name: value for name, value in plain.items() if name != "profile"}
    turned = dict(reversed(plain.items()))
    for fields in (missing, turned):
        with pytest.raises(RequestError, match="other bytes"):
            ItemPlan.decode(as_row(HEAD + msgspec.msgpack.encode(fields)))


@pytest.mark.compat
@pytest.mark.parametrize("lengths", [(3, 3), (3, 5)])
def test_plans_stay_on_the_cpu_wherever_the_pixels_go(lengths: tuple[int, ...]) -> None:
    """Both model runners batch items by this function; a plan on the device would cost a sync."""
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
    from vllm.multimodal.utils import group_and_batch_mm_kwargs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    plans = [ItemPlan(8, (i, -i), tuple(range(n))) for i, n in enumerate(lengths)]
    items = MultiModalKwargsItems.from_hf_inputs(
        {
            "pixel_values": torch.zeros(2, 3, 4, 4),
            FIELD: [item.encode() for item in plans],
        },
        {
            "pixel_values": MultiModalFieldConfig.batched("image"),
            FIELD: MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        },
    )
    sent = [bytearray(part) for part in MsgpackEncoder().encode(items)]
    received = MsgpackDecoder(MultiModalKwargsItems).decode(sent)
    pairs = [("image", item) for item in received["image"]]
    ((_, count, batch),) = group_and_batch_mm_kwargs(pairs, device=torch.device("meta"))
    assert (count, batch["pixel_values"].device.type) == (2, "meta")
    assert [ItemPlan.decode(row) for row in batch[FIELD]] == plans


def test_a_state_is_encoded_without_name_and_provenance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in shipped_states():
        loaded = load_state(name)
        assert decode_state(encode_state(loaded)).digest == loaded.digest
    other = edited(sample(), {"/name": "other", "/provenance": {"notes": "n" * 50_000}})
    assert (
        encode_state(PruningState.model_validate(other))
        == encode_state(state())
        != UNSHIPPED
    )
    encode_state.cache_clear()  # other tests may have encoded this state
    monkeypatch.setattr("vllm_autoprune.serving.state_codec.MAX_STATE_BYTES", 100)
    with pytest.raises(StateError, match="may bring 100"):
        encode_state(state({"/constraints/selector/q_e": 5}))


# ---- identities and keys ----


def test_each_part_of_a_decision_is_part_of_an_identity_of_64_digits() -> None:
    """KV connectors read it as a hexadecimal number, of which some keep 16 bits."""
    image: tuple[Any, ...] = ("img", "digest", 8, "state", ((1, 2), ()), 0)
    others: list[tuple[int, object]] = [
        (0, "other"),
        (1, "other"),
        (2, 9),
        (3, "random"),
    ]
    others += [(3, "reference"), (4, None), (5, 1)]
    reads = [
        ((1, 3), ()),
        ((2, 1), ()),
        ((12,), ()),
        ((), (1, 2)),
        ((1,), (2,)),
        ((1, 2), (3,)),
    ]
    others += [(4, read) for read in reads]
    changed = [(*image[:at], other, *image[at + 1 :]) for at, other in others]
    identities = [make_cache_identity(*parts) for parts in (image, *changed)]
    cores = (("img", "p", 4), ("b", "p", 4), ("img", "p", 5))
    identities += [make_identity("core", *core) for core in cores]
    identities += [make_identity("recall", identities[0], 4)]
    assert len(set(identities)) == len(identities)
    assert all(re.fullmatch("[0-9a-f]{64}", identity) for identity in identities)
    assert make_cache_identity(*image) == identities[0]


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_feature_key_is_two_int64_of_which_the_first_knows_no_salt(
    content: str, salt: str
) -> None:
    key = make_feature_key(content, salt)
    assert torch.tensor(key).tolist() == list(key) != list(NO_KEY)
    assert (
        key[0]
        == make_feature_key(content, salt + "x")[0]
        != make_feature_key(content + "x")[0]
    )
    assert key[1] != make_feature_key(content, salt + "x")[1]
    assert make_feature_key("ab", "c") != make_feature_key("a", "bc")


# ---- what a server accepts of a client's plan, and what a worker makes of one ----


def rules(level: Any = "states", most: int = 64, **fields: Any) -> PlanRules:
    allowed = RequestRules(level, 1, most, explicit=True, **fields)
    return PlanRules(replace(served(), rules=allowed), VOCABULARY)


LACKING = PlanRules(
    replace(
        rules().served,
        capabilities=Capabilities(unavailable=(("language", "not here"),)),
    ),
    VOCABULARY,
)
TOWER = TextTower("some/clip", 1, "because", 77, 768, 1024, vocabulary=10)
WITH_TOWER = PlanRules(replace(rules().served, text_tower=TOWER), VOCABULARY)
DETAIL = DetailBudgets.model_validate({"low": 4, "high": 10})


@pytest.mark.parametrize(
    ("item", "by", "problem"),
    [
        *(
            (plan(budget=b), rules(at, 10, detail=DETAIL), "")
            for at in LEVELS
            for b in (4, 8, 10)
        ),
        (plan(budget=64, keep="random"), rules("budget"), ""),
        (plan(state=SHIPPED), rules("shipped-states"), ""),
        (plan(state=UNSHIPPED), rules(), ""),
        (recall(64), rules("budget"), ""),
        (recall(8), rules("none", recall=8), ""),
        (plan(instruction=(9,), language=(99,)), WITH_TOWER, ""),
        (plan(profile=True), rules(), "profiling"),
        (plan(budget=65), rules(), "K = 65"),
        (plan(budget=9), rules("none"), "K = 9"),
        (plan(budget=11), rules("none", 10, detail=DETAIL), "K = 11"),
        *(
            (plan(keep=keep), rules("none"), f"keep = '{keep}'")
            for keep in ("random", "resized")
        ),
        (
            plan(keep="resized", part="core", core=8),
            rules("budget"),
            "an image that is resized",
        ),
        (plan(keep="random", part="core", core=8), rules("budget"), "drawn at random"),
        (plan(instruction=(VOCABULARY,)), rules("none"), "vocabulary of 100"),
        (plan(instruction=(10,)), WITH_TOWER, "vocabulary of 10"),
        (plan(text=((1, VOCABULARY),)), rules("none"), "text beyond the vocabulary"),
        (plan(state=SHIPPED), rules("budget"), "they may set budget"),
        (plan(state=UNSHIPPED), rules("shipped-states"), "does not ship"),
        (plan(state=b"\xff" * 9), rules(), "cannot be served"),
        (plan(state=UNSHIPPED + b" "), rules(), "canonical"),
        (plan(state=encode_state(load_state("fastv"))), LACKING, "reads language"),
        (recall(65), rules(), "recalls 65"),
        (recall(before=65), rules(), "keeps K = 65"),
        (
            recall(9),
            rules("none", recall=8),
            "recalls 9 tokens, and requests may recall 8",
        ),
        (recall(core=4), rules(), "core"),
    ],
)
def test_a_plan_that_the_rules_do_not_allow_is_refused(
    item: ItemPlan, by: PlanRules, problem: str
) -> None:
    if not problem:
        by.check(item, item.budget)
        problem = f"{item.budget} tokens for 7 placeholders"
    with pytest.raises(RequestError, match=problem) as caught:
        by.check(item, 7 if "placeholders" in problem else item.budget + len(item.text))
    assert "autoprune_plan" in str(caught.value)


@parametrize_from_file("level", "positions", "allowed")
def test_positions_are_the_servers_where_requests_may_set_nothing(
    level: Any, positions: Positions, allowed: bool
) -> None:
    spread = replace(
        rules(level).served, capabilities=Capabilities(axes=LINE), positions="spread"
    )
    by = PlanRules(spread, VOCABULARY)
    item = plan(tokens=100, positions=positions)
    with nullcontext() if allowed else pytest.raises(RequestError, match="positions"):
        by.check(item, item.budget)


BARE = plan(instruction=())
RECALL = replace(recall(), instruction=(), earlier=(Choice(8), Choice(4)))
BY_BASE = ItemPlan(8, NO_KEY, keep="reference", positions="packed")


@pytest.mark.parametrize(
    ("row", "by", "made"),
    [
        (plan(state=UNSHIPPED).encode(), rules("budget"), BARE),
        (
            plan(instruction=(VOCABULARY,), language=(VOCABULARY,)).encode(),
            rules(),
            BARE,
        ),
        (plan(keep="random").encode(), rules("none"), BARE),
        (
            plan(text=((1, VOCABULARY), (2, 3))).encode(),
            rules(),
            replace(BARE, text=((1, 0), (2, 0))),
        ),
        *(
            (
                replace(RECALL, earlier=(Choice(8), Choice(4, *ids))).encode(),
                rules(),
                RECALL,
            )
            for ids in (((VOCABULARY,),), ((), (VOCABULARY,)))
        ),
        *((row, rules(), BY_BASE) for row in (None, torch.zeros(3), "no plan", [1, 2])),
        (torch.full((20,), 255, dtype=torch.uint8), rules(), BY_BASE),
    ],
    ids=range(11),
)
def test_a_worker_takes_out_what_is_not_allowed(
    row: object, by: PlanRules, made: ItemPlan
) -> None:
    reporter = FallbackReporter()
    assert PlanReader(by, reporter, torch.device("cpu")).read([row]) == [made]
    assert reporter.errors == {"RequestError": 1}
    assert reporter.counts()["reference", "plan"] == 1


def test_what_replaces_an_unreadable_plan_fits_into_a_prompt() -> None:
    by = PlanRules(served(budget="1/8"), VOCABULARY)
    (plan,) = PlanReader(by, FallbackReporter(), torch.device("cpu"), 512).read(
        ["no plan"]
    )
    assert plan.budget == 512


def read(state: Any, *rows: object) -> list[ItemPlan]:
    """Plans as a worker reads them."""
    rules_of_state = PlanRules(state, VOCABULARY)
    return PlanReader(rules_of_state, FallbackReporter(), torch.device("cpu")).read(
        rows
    )


def test_a_budget_that_the_state_does_not_allow_keeps_its_number_of_rows() -> None:
    for changes, budget, keep in (
        ({"/constraints/selector/r_min": 8}, 4, "reference"),
        ({"/budget/limit": 32}, 64, "random"),
    ):
        (result,) = read(served({**changes}), plan(budget=budget).encode())
        assert (result.budget, result.keep) == (budget, keep)


def test_whatever_bytes_a_client_sends_a_worker_returns_as_many_rows_as_the_plan_keeps() -> (
    None
):
    sound = plan(
        state=UNSHIPPED, language=(4, 5), tokens=36, text=((1, 2), (4, 3))
    ).encode()
    numbers = (-(2**63), -1, 0, 1, 7, 35, 36, 2**31, 2**63 - 1)
    values: list[object] = [*numbers, "core", [], [[1, 2]], True, b""]
    strict = replace(blind(), rules=RequestRules("states"))
    rows = [with_fields(sound, **{n: v}) for n in fields_of(sound) for v in values]
    accepted = [p for p in read(strict, *rows) if not p.profile and p.budget <= 36]
    assert len(accepted) > 100
    context = SelectionContext(strict, parts(), FallbackReporter())
    for item in accepted:
        (kept,) = prune_images(context, [item], images(1))
        assert kept.shape[0] == item.budget + len(item.text)
