"""Items of an image: core, delta, recalls; together, apart, one after the other, remembered."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch

from tests.serving.unit.samples import (
    SIX,
    N,
    images,
    plan,
    prune,
    region,
    rows_of,
    served,
)
from vllm_autoprune.serving.plan import NO_KEY, Choice, Chooser, ItemPlan
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.worker import selection
from vllm_autoprune.serving.worker.features import ImageFeatures, IndexCache
from vllm_autoprune.tpdsl.tokens import Grid

K = 12
CORE = 8
FIRST, OTHER = images(2)


def with_core(base: str = "cdpruner") -> ServedState:
    """The shipped state on another base policy, with a core by DivPrune."""
    return served({"/base_policy": {"name": base}, "/core": {"share": 0.5}})


def core_plan(key: int = 1) -> ItemPlan:
    return plan(CORE, key, (), part="core", core=CORE)


def delta_plan(word: int = 7, key: int = 1) -> ItemPlan:
    return plan(K - CORE, key, (word,), part="delta", core=CORE)


# ---- core and delta ----


def test_regions_share_core_and_delta_like_their_budget() -> None:
    wide = region(1, Grid(4, 8))
    orders = torch.arange(N), N + torch.arange(wide.grid.tokens)
    pairs = zip((region(0, SIX), wide), orders, strict=True)
    picture = ImageFeatures(tuple(replace(part, order=order) for part, order in pairs))
    core, delta = (
        rows_of(picture, rows)
        for rows in prune([core_plan(), delta_plan()], [picture] * 2, with_core())
    )
    assert len({*core, *delta}) == K
    assert [sum(row < N for row in item) for item in (core, delta)] == [
        CORE // 2,
        (K - CORE) // 2,
    ]


@pytest.mark.parametrize("base", ["divprune", "cdpruner"])
def test_a_delta_of_all_other_tokens_has_them_in_raster_order(base: str) -> None:
    """Also of a state without a core whose base policy reads no question."""
    state = served({"/base_policy": {"name": base}})
    if base == "cdpruner":
        state = with_core()
    delta = plan(N - CORE, 1, (), part="delta", core=CORE)
    rows = prune([core_plan(), delta], [FIRST] * 2, state)
    core, others = (rows_of(FIRST, part) for part in rows)
    assert others == sorted({*range(N)} - {*core})
    (alone,) = prune([delta], [FIRST], state)
    assert rows_of(FIRST, alone) == others


# ---- recalls ----


def recall_plan(word: int = 9, core: int = 0, **fields: Any) -> ItemPlan:
    """Plan of a third turn, which recalls tokens; the second turn has recalled some before it."""
    earlier = (Choice(K, (7,)), Choice(4, (8,)))
    return plan(5, 1, (word,), part="recall", core=core, earlier=earlier, **fields)


@pytest.mark.parametrize("base", ["cdpruner", "divprune"])
@pytest.mark.parametrize("core", [0, CORE])
@pytest.mark.parametrize("keep", ["state", "reference"])
def test_a_recall_keeps_new_tokens_as_they_are(
    base: str, core: int, keep: Chooser
) -> None:
    asked = recall_plan(core=core, keep=keep)
    state = with_core(base)
    items = [*asked.items_before(), asked]
    assert items[-2] == replace(
        asked, budget=4, instruction=(8,), earlier=asked.earlier[:1]
    ), "the second turn's"
    together = prune(items, [FIRST] * len(items), state)
    before, recalled = (set(rows_of(FIRST, rows)) for rows in together[-2:])
    assert (len(recalled), recalled & before) == (5, set())
    assert torch.equal(prune([asked], [FIRST], state)[0], together[-1])


def test_what_a_recall_keeps_depends_on_every_question_before_it() -> None:
    asked = recall_plan()
    question, second = asked.earlier
    other_questions = [
        recall_plan(10),
        replace(asked, earlier=(replace(question, instruction=(11,)), second)),
        replace(asked, earlier=(question, replace(second, instruction=(12,)))),
    ]
    rows = prune([asked, *other_questions], [FIRST] * 4, with_core())
    assert len({tuple(rows_of(FIRST, part)) for part in rows}) == 4


def test_a_random_control_recalls_the_next_tokens_of_its_draw() -> None:
    asked = recall_plan(keep="random")
    drawn = [
        rows_of(FIRST, r) for r in prune([*asked.items_before(), asked], [FIRST] * 3)
    ]
    (longer,) = prune([plan(K + 9, key=1, keep="random")], [FIRST])
    assert sorted(chain(*drawn)) == sorted(rows_of(FIRST, longer))


def test_a_forged_recall_of_an_image_that_is_all_kept_is_a_random_draw() -> None:
    forged = replace(recall_plan(), earlier=(Choice(N),))
    (rows,) = prune([forged], [FIRST], with_core(), errors={"RequestError": 1})
    assert len(rows) == 5


# ---- what is remembered ----


def test_the_indices_of_a_core_outlive_a_change_of_the_features() -> None:
    """As where a tower rounds differently in another batch: nothing is kept twice."""
    indices = IndexCache()
    (core,) = prune([core_plan()], [FIRST], with_core(), indices)
    (delta,) = prune([delta_plan()], [OTHER], with_core(), indices)
    assert not set(rows_of(OTHER, delta)) & set(rows_of(FIRST, core))


@pytest.mark.parametrize(
    ("state", "fields"),
    [
        (served(), {}),
        (
            served({"/reassembly": {"atom": "reassemble/nearest.mean.residual.score"}}),
            {},
        ),
        (with_core(), {"part": "delta", "core": CORE}),
    ],
    ids=["state", "by score", "delta"],
)
def test_an_image_that_is_encoded_again_keeps_the_tokens_that_it_was_given_first(
    state: ServedState, fields: dict[str, Any]
) -> None:
    """Near ties fall otherwise beside other images, and KV of the first tokens may be left."""
    plans = [plan(K, key, **fields) for key in range(1, 17)]
    source = torch.Generator().manual_seed(1)

    def encode() -> list[ImageFeatures]:
        """Sixteen images, each time with other last bits."""
        parts = (picture.regions[0] for picture in images(16))
        return [
            ImageFeatures((replace(part, projected=part.projected + noise),))
            for part in parts
            for noise in [torch.randn(part.projected.shape, generator=source) / 64]
        ]

    def choose(pictures: list[ImageFeatures], indices: IndexCache) -> list[list[int]]:
        rows = prune(plans, pictures, state, indices)
        return [rows_of(*pair) for pair in zip(pictures, rows, strict=True)]

    before = encode()
    again = encode()
    indices = IndexCache()
    anew = choose(again, IndexCache())
    chosen = choose(before, indices)
    assert chosen != anew
    assert choose(again, indices) == chosen
    (alone,) = prune(plans[3:4], again[3:4], state, indices)
    assert rows_of(again[3], alone) == chosen[3]
    indices.clear()
    assert choose(again, indices) == anew


def test_tokens_of_profiling_and_after_an_exception_are_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    indices = IndexCache()
    prune([plan(K, profile=True)], [FIRST], indices=indices)

    def broken(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(selection, "select_tokens", broken)
        (fallen,) = prune(
            [plan(K)], [FIRST], indices=indices, errors={"MemoryError": 1}
        )
    (expected,) = prune([plan(K)], [FIRST])
    assert not torch.equal(fallen, expected)
    assert torch.equal(prune([plan(K)], [FIRST], indices=indices)[0], expected)


def test_images_without_a_key_leave_nothing_in_the_cache() -> None:
    indices = IndexCache()
    items = [replace(item, key=NO_KEY) for item in (core_plan(), delta_plan())]
    prune(items, [FIRST] * 2, with_core(), indices)
    assert len(indices) == 0
