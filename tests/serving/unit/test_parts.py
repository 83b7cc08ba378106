"""Cores and deltas in the worker: the same tokens together, apart, and one after the other."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.serving.unit.samples import SIX, N, images, parts, plan, region, rows_of, served
from vllm_autoprune.serving.plan import NO_KEY, Choice, Chooser, ItemPlan
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.worker import features
from vllm_autoprune.serving.worker.batch import prune_images
from vllm_autoprune.serving.worker.features import CoreCache, ImageFeatures
from vllm_autoprune.serving.worker.regions import SelectionContext
from vllm_autoprune.serving.worker.selection import FallbackReporter
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


@pytest.mark.parametrize("base", ["cdpruner", "divprune", "cen_cdpruner", "cen_divprune"])
def test_parts_are_disjoint_and_the_core_does_not_depend_on_the_question(base: str) -> None:
    (picture,) = images(1)
    state = with_core(base)
    core, question, second = kept(
        [core_plan(), delta_plan((7,)), delta_plan((8,))], [picture] * 3, state
    )
    kept_by_core = rows_of(picture, core)
    for delta in (question, second):
        rows = rows_of(picture, delta)
        assert len(rows) == K - CORE
        assert not set(rows) & set(kept_by_core)
    if base.endswith("cdpruner"):
        assert rows_of(picture, question) != rows_of(picture, second)


def test_parts_of_many_images_in_one_batch_are_those_of_each_alone() -> None:
    image_list = images(4)
    plans = [core_plan(key) for key in range(1, 5)] + [
        delta_plan((key,), key) for key in range(1, 5)
    ]
    together = kept(plans, image_list * 2)
    for picture, rows, item in zip(image_list * 2, together, plans, strict=True):
        assert torch.equal(rows, kept([item], [picture])[0])


def test_two_policies_upon_one_core_do_not_share_what_they_condition() -> None:
    """Cen-CDPruner compares centred tokens: CDPruner's conditioned cosines are not its own."""
    cores = CoreCache(1 << 20)
    question, second = with_core("cdpruner"), with_core("cen_cdpruner")
    for seed, key in enumerate(range(1, 5)):
        alone = region(seed, SIX)
        picture = ImageFeatures((replace(alone, projected=alone.projected + 4),))
        for state in (question, second):
            (expected,) = kept([delta_plan((8,), key)], [picture], state, CoreCache(1 << 20))
            (actual,) = kept([delta_plan((8,), key)], [picture], state, cores)
            assert torch.equal(actual, expected)


def test_the_indices_of_a_core_outlive_a_change_of_the_features() -> None:
    """As where a tower rounds differently in another batch: nothing is kept twice."""
    picture, other = images(2)
    cores = CoreCache(1 << 20)
    (core,) = kept([core_plan()], [picture], cores=cores)
    (delta,) = kept([delta_plan()], [other], cores=cores)
    assert not set(rows_of(other, delta)) & set(rows_of(picture, core))


def rounded_otherwise(image: ImageFeatures, seed: int) -> ImageFeatures:
    """The image in bfloat16 with other values in the last two bits of its features."""
    bits = image.regions[0].projected.bfloat16().view(torch.int16)
    changes = torch.randint(4, bits.shape, generator=torch.Generator().manual_seed(seed))
    other = (bits ^ changes.to(bits.dtype)).view(torch.bfloat16)
    return ImageFeatures((replace(image.regions[0], projected=other),))


@pytest.mark.parametrize(
    ("state", "fields"),
    [
        (served(), {}),
        (served(), {"keep": "reference"}),
        (served({"/reassembly": {"atom": "reassemble/nearest.mean.residual.score"}}), {}),
        (with_core(), {}),
        (with_core(), {"part": "delta", "core": CORE}),
    ],
    ids=["state", "reference", "by score", "whole with a core", "delta"],
)
def test_an_image_that_is_encoded_again_keeps_the_tokens_that_it_was_given_first(
    state: ServedState, fields: dict[str, Any]
) -> None:
    """Near ties fall otherwise beside other images, and KV of the first tokens may be left."""
    before, again = (
        [rounded_otherwise(picture, seed) for picture in images(16)] for seed in (1, 2)
    )
    plans = [plan(K, key, **fields) for key in range(1, 17)]

    def chosen(image_list: list[ImageFeatures], cores: CoreCache) -> list[list[int]]:
        rows = kept(plans, image_list, state, cores)
        return [rows_of(*picture) for picture in zip(image_list, rows, strict=True)]

    cores, anew = CoreCache(1 << 20), chosen(again, CoreCache(1 << 20))
    question = chosen(before, cores)
    assert question != anew
    assert chosen(again, cores) == question
    (alone,) = kept(plans[3:4], again[3:4], state, cores)
    assert rows_of(again[3], alone) == question[3]
    cores.clear()
    assert chosen(again, cores) == anew


def test_tokens_of_profiling_and_after_an_exception_are_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (picture,) = images(1)
    cores = CoreCache(0)
    kept([plan(K, profile=True)], [picture], served(), cores)
    expected = kept([plan(K)], [picture], served())

    def broken(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("vllm_autoprune.serving.worker.selection.select_tokens", broken)
        context = SelectionContext(served(), parts(), FallbackReporter(), cores=cores)
        (fallen,) = prune_images(context, [plan(K)], [picture])
    assert not torch.equal(fallen, expected[0])
    assert torch.equal(kept([plan(K)], [picture], served(), cores)[0], expected[0])


def test_regions_share_core_and_delta_like_their_budget() -> None:
    question, second = region(0, SIX), region(1, Grid(4, 8))
    image = ImageFeatures(
        (
            replace(question, order=torch.arange(N)),
            replace(second, order=N + torch.arange(second.grid.tokens)),
        )
    )
    core, delta = kept([core_plan(), delta_plan()], [image, image])
    kept_rows = rows_of(image, core) + rows_of(image, delta)
    assert len(set(kept_rows)) == K
    inside = [sum(row < N for row in rows_of(image, part)) for part in (core, delta)]
    assert inside == [CORE // 2, (K - CORE) // 2]


def test_images_without_a_key_leave_nothing_in_the_cache() -> None:
    (picture,) = images(1)
    cores = CoreCache(1 << 20)
    plans = [
        ItemPlan(CORE, NO_KEY, part="core", core=CORE),
        ItemPlan(K - CORE, NO_KEY, (7,), part="delta", core=CORE),
    ]
    kept(plans, [picture, picture], cores=cores)
    assert cores.used_bytes == 0
    assert cores.indices(None) is None


def recall_plan(
    ids: Sequence[int] = (9,), budget: int = 5, core: int = 0, **fields: Any
) -> ItemPlan:
    """Plan of a third turn, which recalls tokens; the second turn has recalled some before it."""
    earlier = (Choice(K, (7,)), Choice(4, (8,)))
    return ItemPlan(budget, (1, 1), tuple(ids), part="recall", core=core, earlier=earlier, **fields)


@pytest.mark.parametrize("base", ["cdpruner", "divprune"])
@pytest.mark.parametrize("core", [0, CORE])
@pytest.mark.parametrize("keep", ["state", "reference"])
def test_a_recall_keeps_new_tokens_as_they_are(base: str, core: int, keep: Chooser) -> None:
    (picture,) = images(1)
    asked = recall_plan(core=core, keep=keep)
    items = [*asked.items_before(), asked]
    together = kept(items, [picture] * len(items), with_core(base))
    recalled = rows_of(picture, together[-1])
    assert len(set(recalled)) == 5
    earlier = recall_plan((8,), 4, core, keep=keep)
    earlier = replace(earlier, earlier=earlier.earlier[:1])
    assert items[-2] == earlier
    assert not set(recalled) & set(rows_of(picture, together[-2]))
    (alone,) = kept([asked], [picture], with_core(base))
    assert torch.equal(alone, together[-1])
    (without_cache,) = kept([asked], [picture], with_core(base), CoreCache(0))
    assert torch.equal(alone, without_cache)


def test_what_a_recall_keeps_depends_on_every_question_before_it() -> None:
    (picture,) = images(1)
    asked = recall_plan()
    question, second = asked.earlier
    others = [
        asked,
        recall_plan((10,)),
        replace(asked, earlier=(replace(question, instruction=(11,)), second)),
        replace(asked, earlier=(question, replace(second, instruction=(12,)))),
    ]
    assert len({tuple(rows_of(picture, rows)) for rows in kept(others, [picture] * 4)}) == 4


def test_a_random_control_recalls_the_next_tokens_of_its_draw() -> None:
    (picture,) = images(1)
    asked = recall_plan(keep="random")
    items = [*asked.items_before(), asked]
    drawn = [rows_of(picture, rows) for rows in kept(items, [picture] * 3)]
    (longer,) = kept([plan(K + 9, key=1, keep="random")], [picture])
    assert sorted(chain(*drawn)) == sorted(rows_of(picture, longer))


def test_a_forged_recall_of_an_image_that_is_all_kept_is_a_random_draw() -> None:
    (picture,) = images(1)
    reporter = FallbackReporter()
    context = SelectionContext(with_core(), parts(), reporter)
    (rows,) = prune_images(context, [replace(recall_plan(), earlier=(Choice(N),))], [picture])
    assert rows.shape[0] == 5
    assert reporter.meter.errors == {"RequestError": 1}


# ---- the cache of cores ----


def test_indices_are_those_that_were_put_however_often_the_buffer_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against a dictionary, with cores of random sizes that are put and read in random order."""
    monkeypatch.setattr(features, "MAX_INDICES", 64)
    monkeypatch.setattr(features, "MAX_CORES", 12)
    random, cache, put = Random(0), CoreCache(0), dict[Hashable, list[int]]()
    hits = 0
    for step in range(3000):
        key = random.randrange(30)
        found = cache.indices(key)
        if found is None:
            put[key] = [step] * random.randint(1, 20)
            cache.put_indices(key, torch.tensor(put[key]))
        else:
            hits += 1
            assert found.tolist() == put[key]
        spans = sorted(cache._indices._spans.values(), key=lambda span: span.start)
        assert len(spans) <= 12
        assert all(picture.stop <= two.start for picture, two in pairwise(spans))
    assert hits > 300


def test_cores_are_kept_inside_and_outside_of_inference_mode() -> None:
    cache = CoreCache(0)
    with torch.inference_mode():
        cache.put_indices("inside", torch.arange(4))
    cache.put_indices("outside", torch.arange(3))
    with torch.inference_mode():
        cache.put_indices("inside again", torch.arange(2))
    sizes = [cache.indices(key) for key in ("inside", "outside", "inside again")]
    assert [len(picture) for picture in sizes if picture is not None] == [4, 3, 2]
