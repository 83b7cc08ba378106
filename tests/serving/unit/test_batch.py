from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.serving.unit.samples import image, region, rows_of, served
from vllm_autoprune import Grid, PruningPolicy, VisualTokens
from vllm_autoprune.serving import batch as under_test
from vllm_autoprune.serving.batch import ModelParts, prune_images
from vllm_autoprune.serving.config import ServedState
from vllm_autoprune.serving.features import ImageFeatures, TowerFeatures
from vllm_autoprune.serving.plan import Ids, ItemPlan
from vllm_autoprune.serving.prune import FallbackMeter, prune
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicyParams, Reference
from vllm_autoprune.tpdsl.outcome import Refined
from vllm_autoprune.tpdsl.tokens import Need

GRID = Grid(6, 6)
N = GRID.tokens


class Space:
    """Relevance without a model: the ids themselves are seeds of directions."""

    sign = 1

    def __init__(self) -> None:
        self.asked: list[tuple[Ids, ...]] = []

    def patches(self, hidden: Tensor) -> None:
        return None

    def instructions(self, ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        self.asked.append(tuple(ids))
        rows = [torch.randn(16, generator=torch.Generator().manual_seed(sum(i))) for i in ids]
        return torch.stack(rows)[:, None], torch.ones(len(ids), 1, dtype=torch.bool)


def plan(budget: int, key: int = 0, ids: Ids = (7,), **said: Any) -> ItemPlan:
    return ItemPlan(budget, (key, key), ids, **said)


def parts(space: Space | None = None) -> ModelParts:
    return ModelParts(lambda rows: rows, space or Space())


def images(count: int) -> list[ImageFeatures]:
    return [image(seed) for seed in range(count)]


def pruned(
    plans: Sequence[ItemPlan],
    shown: Sequence[ImageFeatures],
    state: ServedState | None = None,
    meter: FallbackMeter | None = None,
) -> list[Tensor]:
    meter = meter or FallbackMeter()
    rows = prune_images(state or served(), plans, shown, parts(), meter)
    assert meter.raised == {}, "the policy failed"
    return rows


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Budget and batch size of every selection that is run."""
    run: list[tuple[int, int]] = []

    def noted(policy: PruningPolicy, tokens: VisualTokens, meter: FallbackMeter) -> Refined:
        run.append((policy.budget, tokens.batch))
        return prune(policy, tokens, meter)

    monkeypatch.setattr(under_test, "prune", noted)
    return run


def test_rows_come_in_the_order_of_the_images_one_selection_a_budget(
    selections: list[tuple[int, int]],
) -> None:
    shown = images(6)
    plans = [plan(8), plan(4, ids=(1,)), plan(8, ids=(2,)), plan(12), plan(4), plan(8, ids=(3,))]
    together = pruned(plans, shown)
    assert sorted(selections) == [(4, 2), (8, 3), (12, 1)]
    for one, rows, asked in zip(shown, together, plans, strict=True):
        assert rows.shape == (asked.budget, 16)
        kept = rows_of(one, rows)
        assert kept == sorted(set(kept))
        assert torch.equal(rows, pruned([asked], [one])[0])


def test_the_instruction_is_the_image_s_own() -> None:
    (one,) = images(1)
    first, second = pruned([plan(8, ids=(1,)), plan(8, ids=(2,))], [one, one])
    assert rows_of(one, first) != rows_of(one, second)
    assert torch.equal(second, pruned([plan(8, ids=(2,))], [one])[0])


@pytest.mark.parametrize("budget", [N, N + 1, 65536])
def test_nothing_is_selected_or_copied_where_everything_is_kept(
    budget: int, selections: list[tuple[int, int]]
) -> None:
    one, other = images(2)
    all_rows, few = pruned([plan(budget), plan(8)], [one, other])
    assert all_rows is one.regions[0].projected
    assert few.shape == (8, 16)
    assert selections == [(8, 1)]


def test_profiling_gets_n_rows_and_pays_for_a_selection(selections: list[tuple[int, int]]) -> None:
    shown = images(3)
    rows = pruned([plan(8, profile=True)] * 3, shown)
    assert all(torch.equal(r, i.rows()) for r, i in zip(rows, shown, strict=True))
    assert selections == [(8, 3)]


def test_the_reference_alone_is_the_base_policy_s_selection(
    selections: list[tuple[int, int]],
) -> None:
    (one,) = images(1)
    alone = served({"/constraints/selector/q_e": 0})
    (kept,) = pruned([plan(8, keep="reference")], [one])
    assert torch.equal(kept, pruned([plan(8)], [one], alone)[0])
    wide = served({"/constraints/selector/q_e": 8})
    assert not torch.equal(kept, pruned([plan(8)], [one], wide)[0])
    assert selections == [(8, 1)] * 3


def test_a_random_keep_depends_on_the_image_s_key_alone() -> None:
    one, other = images(2)
    drawn = pruned(
        [plan(8, 5, keep="random"), plan(8, 6, keep="random"), plan(8, 5, (9,), keep="random")],
        [one, one, other],
    )
    first, second, third = (rows_of(i, r) for i, r in zip([one, one, other], drawn, strict=True))
    assert first == third == sorted(set(first))
    assert first != second
    assert rows_of(one, pruned([plan(8, 5, keep="random")], [one])[0]) == first


def test_a_random_keep_takes_a_key_below_zero() -> None:
    (one,) = images(1)
    (rows,) = pruned([plan(8, -(2**63), keep="random")], [one])
    assert rows.shape == (8, 16)


def test_keeps_of_one_budget_do_not_mix() -> None:
    (one,) = images(1)
    plans = [plan(8, 5, keep="random"), plan(8, 5), plan(8, 5, keep="reference")]
    together = pruned(plans, [one] * 3)
    assert all(
        torch.equal(rows, pruned([asked], [one])[0])
        for rows, asked in zip(together, plans, strict=True)
    )


def blind(base: str = "cdpruner") -> ServedState:
    """A state whose only signal reads nothing."""
    signals = [{"atom": "spatial_centrality_prior", "weight": 1.0}]
    no_exchange = {"/scoring/signals": signals, "/constraints/selector/q_e": 0}
    return served({"/base_policy": {"name": base}, **no_exchange})


def test_a_state_that_reads_no_instruction_embeds_none() -> None:
    space = Space()
    shown = images(2)
    plans = [plan(8, ids=()), plan(8, ids=())]
    meter = FallbackMeter()
    assert len(prune_images(blind("divprune"), plans, shown, parts(space), meter)) == 2
    assert (space.asked, meter.raised) == ([], {})


def test_patches_are_compared_where_the_images_have_them() -> None:
    (one,) = images(1)
    (whole,) = one.regions
    mirrored = ImageFeatures((dataclasses.replace(whole, patches=-whole.projected),))
    itself = ImageFeatures((dataclasses.replace(whole, patches=whole.projected),))
    plain, same, other = (pruned([plan(8)], [i])[0] for i in (one, itself, mirrored))
    assert torch.equal(plain, same)
    assert not torch.equal(plain, other)


def test_the_wrong_number_of_rows_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would cut a row too many off in silence."""

    def too_many(policy: PruningPolicy, tokens: VisualTokens, meter: FallbackMeter) -> Any:
        return prune(served().policy(policy.budget + 1), tokens, meter)

    monkeypatch.setattr(under_test, "prune", too_many)
    with pytest.raises(AssertionError, match="9 rows for a placeholder of 8"):
        pruned([plan(8)], images(1))


def test_a_policy_that_raises_still_answers_for_every_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> Refined:
        raise RuntimeError("no")

    monkeypatch.setattr("vllm_autoprune.serving.prune.choose", broken)
    meter = FallbackMeter()
    shown = images(2)
    rows = prune_images(served(), [plan(8), plan(4)], shown, parts(), meter)
    assert [r.shape[0] for r in rows] == [8, 4]
    assert meter.raised == {"RuntimeError": 2}


class Prefix:
    """Layers that never run: it only knows for which image and words it was made."""

    def __init__(self, image: Tensor, ids: Ids) -> None:
        self.image, self.ids = image, ids
        self.start, self.layers = 1, 4
        self.text = torch.ones(1, max(1, len(ids)), dtype=torch.bool)

    def embeddings(self) -> Tensor:
        return self.image[None]

    def states(self, layer: int) -> Tensor:
        return self.image[None]

    def normed(self, layer: int) -> Tensor:
        return self.image[None]

    def keys(self, layer: int) -> Tensor:
        return self.image[None, None]

    def attention(self, layer: int) -> Tensor:
        return self.image[None, None]


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> list[VisualTokens]:
    """Makes the shipped state's base policy read everything; notes what it was given."""
    seen: list[VisualTokens] = []
    real = BASE_POLICIES["cdpruner"]

    def noted(params: BasePolicyParams, tokens: VisualTokens, budget: int) -> Reference:
        seen.append(tokens)
        return Reference(torch.arange(budget).expand(tokens.batch, -1))

    needs: frozenset[Need] = frozenset({"tower", "next_layer", "language"})
    told = dataclasses.replace(real, needs=needs, function=noted)
    monkeypatch.setitem(BASE_POLICIES, "cdpruner", told)
    return seen


def towered(seed: int) -> ImageFeatures:
    source = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    tower = TowerFeatures(made(N, 5), made(1, 5), made(N, 3), made(N).abs(), made(N, 5))
    return ImageFeatures((dataclasses.replace(region(seed, GRID), tower=tower),))


def test_a_policy_is_given_the_tower_and_the_language_model(reading: list[VisualTokens]) -> None:
    shown = [towered(1), towered(2)]
    plans = [plan(8, 1, language=(5, 6)), plan(8, 2, language=(7,))]
    model = ModelParts(lambda rows: 2 * rows, Space(), Prefix)
    meter = FallbackMeter()
    rows = prune_images(blind(), plans, shown, model, meter)
    assert meter.raised == {}
    assert [r.shape for r in rows] == [(8, 16)] * 2
    for tokens, one, asked in zip(reading, shown, plans, strict=True):
        assert tokens.batch == 1, "instructions differ in length, and nothing may be padded"
        assert isinstance(tokens.language, Prefix)
        assert tokens.language.ids == asked.language
        assert torch.equal(tokens.language.image, one.rows())
        tower, known = tokens.require_tower(), one.regions[0].tower
        assert known is not None
        assert torch.equal(tower.patches[0], known.patches)
        assert torch.equal(tower.keys[0], known.keys)
        assert tower.cls is not None and torch.equal(tower.cls[0], known.cls)
        following = tokens.require_next_layer()
        found = (following.attention[0], following.keys[0])
        assert known.next_attention is not None and torch.equal(found[0], known.next_attention)
        assert known.next_keys is not None and torch.equal(found[1], known.next_keys)
        assert torch.equal(tower.project(tower.patches), 2 * tower.patches)


def test_the_tower_alone_is_read_of_many_images_at_once(
    reading: list[VisualTokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs: frozenset[Need] = frozenset({"tower"})
    told = dataclasses.replace(BASE_POLICIES["cdpruner"], needs=needs)
    monkeypatch.setitem(BASE_POLICIES, "cdpruner", told)
    shown = [towered(1), towered(2), towered(3)]
    plans = [plan(8), plan(4), plan(8)]
    meter = FallbackMeter()
    prune_images(blind(), plans, shown, parts(), meter)
    assert meter.raised == {}
    assert [tokens.batch for tokens in reading] == [2, 1]
    assert reading[0].language is None
    third = shown[2].regions[0].tower
    assert third is not None
    assert torch.equal(reading[0].require_tower().patches[1], third.patches)


def test_rows_that_stand_for_no_token_go_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = torch.full((1, 2, 16), 7.0)

    def two_more(params: BasePolicyParams, tokens: VisualTokens, budget: int) -> Reference:
        return Reference(torch.arange(budget - 2)[None], extra=extra)

    real = BASE_POLICIES["cdpruner"]
    told = dataclasses.replace(real, needs=frozenset(), function=two_more)
    monkeypatch.setitem(BASE_POLICIES, "cdpruner", told)
    (one,) = images(1)
    meter = FallbackMeter()
    (rows,) = prune_images(blind(), [plan(8)], [one], parts(), meter)
    assert meter.raised == {}
    assert torch.equal(rows[:6], one.rows()[:6])
    assert torch.equal(rows[6:], extra[0])
