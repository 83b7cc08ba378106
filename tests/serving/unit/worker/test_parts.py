"""Cores and deltas in the worker: the same tokens together, apart, and one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.serving.unit.batches import N, images, parts, plan
from tests.serving.unit.samples import SIX, region, rows_of, served
from vllm_autoprune.serving.shared.plan import NO_KEY, ItemPlan
from vllm_autoprune.serving.shared.served_state import ServedState
from vllm_autoprune.serving.worker import batch as under_test
from vllm_autoprune.serving.worker.batch import SelectionContext, prune_images
from vllm_autoprune.serving.worker.cores import MAX_CORES, CoreCache
from vllm_autoprune.serving.worker.fallbacks import FallbackReporter
from vllm_autoprune.serving.worker.features import ImageFeatures
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.tokens import Grid

K, CORE = 12, 8


def with_core(base: str = "cdpruner", **core: object) -> ServedState:
    """The shipped state on another base policy, with a core by DivPrune."""
    return served({"/base_policy": {"name": base}, "/core": {"share": 0.5, **core}})


def core_plan(key: int = 1, core: int = CORE) -> ItemPlan:
    return ItemPlan(core, (key, key), part="core", core=core)


def delta_plan(ids: Sequence[int] = (7,), key: int = 1, core: int = CORE) -> ItemPlan:
    return ItemPlan(K - core, (key, key), tuple(ids), part="delta", core=core)


def kept(
    plans: Sequence[ItemPlan],
    image_list: Sequence[ImageFeatures],
    state: ServedState | None = None,
    cores: CoreCache | None = None,
) -> list[Tensor]:
    reporter = FallbackReporter()
    context = SelectionContext(
        state or with_core(), parts(), reporter, cores=cores or CoreCache(1 << 20)
    )
    rows = prune_images(context, plans, image_list)
    assert reporter.meter.errors == {}
    return rows


@pytest.mark.parametrize("base", ["cdpruner", "divprune"])
def test_parts_are_disjoint_and_the_core_does_not_depend_on_the_question(base: str) -> None:
    (one,) = images(1)
    state = with_core(base)
    core, first, second = kept([core_plan(), delta_plan((7,)), delta_plan((8,))], [one] * 3, state)
    kept_by_core = rows_of(one, core)
    for delta in (first, second):
        rows = rows_of(one, delta)
        assert len(rows) == K - CORE
        assert not set(rows) & set(kept_by_core)
    if base == "cdpruner":
        assert rows_of(one, first) != rows_of(one, second)


def test_a_delta_alone_is_the_one_that_came_with_its_core() -> None:
    (one,) = images(1)
    _, together = kept([core_plan(), delta_plan()], [one, one])
    (alone,) = kept([delta_plan()], [one])
    (without_cache,) = kept([delta_plan()], [one], cores=CoreCache(0))
    assert torch.equal(together, alone)
    assert torch.equal(together, without_cache)


def test_both_parts_are_the_tokens_of_one_item() -> None:
    (one,) = images(1)
    core, delta = kept([core_plan(core=6), delta_plan(core=6)], [one, one])
    (whole,) = kept([plan(K)], [one])
    assert sorted(rows_of(one, core) + rows_of(one, delta)) == sorted(rows_of(one, whole))


def test_parts_of_many_images_in_one_batch_are_those_of_each_alone() -> None:
    image_list = images(4)
    plans = [core_plan(key) for key in range(1, 5)] + [
        delta_plan((key,), key) for key in range(1, 5)
    ]
    together = kept(plans, image_list * 2)
    for one, rows, item in zip(image_list * 2, together, plans, strict=True):
        assert torch.equal(rows, kept([item], [one])[0])


def test_a_further_question_neither_chooses_the_core_nor_conditions_on_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (one,) = images(1)
    cores = CoreCache(1 << 20)
    first = kept([core_plan(), delta_plan((8,))], [one, one], cores=cores)

    def unexpected(*arguments: object) -> None:
        raise AssertionError("the core was chosen or conditioned on again")

    divprune, cdpruner = BASE_POLICIES["divprune"], BASE_POLICIES["cdpruner"]
    monkeypatch.setattr(type(divprune), "select_picks", unexpected, raising=False)
    monkeypatch.setattr(under_test, "core_policy", unexpected)
    object.__setattr__(cdpruner, "condition", unexpected)
    try:
        (again,) = kept([delta_plan((8,))], [one], cores=cores)
    finally:
        object.__setattr__(cdpruner, "condition", _CONDITION)
    assert torch.equal(again, first[1])


_CONDITION = BASE_POLICIES["cdpruner"].condition


def test_the_indices_of_a_core_outlive_a_change_of_the_features() -> None:
    """As where a tower rounds differently in another batch: nothing is kept twice."""
    one, other = images(2)
    cores = CoreCache(1 << 20)
    (core,) = kept([core_plan()], [one], cores=cores)
    (delta,) = kept([delta_plan()], [other], cores=cores)
    assert not set(rows_of(other, delta)) & set(rows_of(one, core))


def test_regions_share_core_and_delta_like_their_budget() -> None:
    first, second = region(0, SIX), region(1, Grid(4, 8))
    image = ImageFeatures(
        (
            replace(first, order=torch.arange(N)),
            replace(second, order=N + torch.arange(second.grid.tokens)),
        )
    )
    core, delta = kept([core_plan(), delta_plan()], [image, image])
    kept_rows = rows_of(image, core) + rows_of(image, delta)
    assert len(set(kept_rows)) == K
    inside = [sum(row < N for row in rows_of(image, part)) for part in (core, delta)]
    assert inside == [CORE // 2, (K - CORE) // 2]


def test_images_without_a_key_leave_nothing_in_the_cache() -> None:
    (one,) = images(1)
    cores = CoreCache(1 << 20)
    plans = [
        ItemPlan(CORE, NO_KEY, part="core", core=CORE),
        ItemPlan(K - CORE, NO_KEY, (7,), part="delta", core=CORE),
    ]
    kept(plans, [one, one], cores=cores)
    assert cores.used_bytes == 0
    assert cores.indices(None) is None


def test_the_cache_of_cores_is_bounded() -> None:
    cores = CoreCache(0)
    for i in range(MAX_CORES + 5):
        cores.put_indices(i, torch.tensor([i]))
    assert cores.indices(4) is None
    assert cores.indices(5) is not None
    cores.clear()
    assert cores.indices(5) is None
