"""What one step of the scheduler takes: tokens of the tower, selections that clients asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config.ec_manager_config import EncoderCacheManagerConfig

from vllm_autoprune.serving.encoder_steps import CACHE_MANAGER, BoundedCacheManager
from vllm_autoprune.serving.models.pruned_model import _group_by_tokens
from vllm_autoprune.serving.plan import FIELD, Choice, ItemPlan
from vllm_autoprune.serving.state_codec import encode_state
from vllm_autoprune.tpdsl.cost import DEFAULT_COST, item_cost, state_cost
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.state import PruningState

pytestmark = pytest.mark.compat

BUDGET = 1000
"""Tokens of vLLM's encoder budget."""


def make_request(name: str, *plans: ItemPlan | torch.Tensor | None) -> Any:
    """A request whose items keep 8 tokens each; an item without a plan is whole."""

    def make_feature(i: int, plan: ItemPlan | torch.Tensor | None) -> Any:
        row = plan.encode() if isinstance(plan, ItemPlan) else plan
        data = {} if row is None else {FIELD: SimpleNamespace(data=row)}
        return SimpleNamespace(identifier=f"{name}-{i}", data=data)

    features = [make_feature(i, plan) for i, plan in enumerate(plans)]
    return SimpleNamespace(
        request_id=name, mm_features=features, get_num_encoder_embeds=lambda i: 8
    )


def run_step(manager: BoundedCacheManager, *requests: Any) -> list[list[int]]:
    """Items of each request that one step takes, tried and allocated as the scheduler does."""
    budget = BUDGET
    step = []
    for request in requests:
        taken = list[int]()
        for i in range(len(request.mm_features)):
            if manager.check_and_update_cache(request, i):
                continue
            if not manager.can_allocate(request, i, budget, 8 * len(taken)):
                break
            taken.append(i)
            budget -= 8
        for i in taken:
            manager.allocate(request, i)
        step.append(taken)
    manager.get_freed_mm_hashes()
    return step


def image(number: int, tokens: int = 400, **fields: Any) -> ItemPlan:
    return ItemPlan(8, (number, number), tokens=tokens, **fields)


def test_vllm_finds_the_manager_by_its_name() -> None:
    config = EncoderCacheManagerConfig(encoder_cache_manager_cls=CACHE_MANAGER)
    kind = config.get_encoder_cache_manager_obj()
    assert isinstance(
        kind.create_manager(cache_size=8, vllm_config=None), BoundedCacheManager
    )


def test_a_step_encodes_no_more_tokens_than_vllms_own_budget_has() -> None:
    manager = BoundedCacheManager(4096)
    burst = [make_request(f"r{i}", image(i)) for i in range(5)]
    assert run_step(manager, *burst) == [[0], [0], [], [], []]
    assert run_step(manager, *burst) == [[], [], [0], [0], []]
    assert run_step(manager, *burst) == [[], [], [], [], [0]]


def test_one_image_is_encoded_once_whatever_is_asked_about_it() -> None:
    """In the same step, and in later ones while its features are taken to be cached."""
    manager = BoundedCacheManager(4096)
    burst = [make_request(f"r{i}", image(1)) for i in range(20)]
    assert run_step(manager, *burst) == [[0]] * 20
    later = [make_request(f"s{i}", image(1)) for i in range(20)]
    assert run_step(
        manager, make_request("t", image(2)), *later, make_request("u", image(3))
    ) == ([[0]] * 22)


def test_an_image_that_was_not_scheduled_is_not_taken_for_cached() -> None:
    """As where there was room for it, and no KV blocks for its request."""
    manager = BoundedCacheManager(4096)
    waiting = make_request("a", image(1, 600))
    second = make_request("b", image(2, 600))
    assert manager.can_allocate(waiting, 0, BUDGET, 0)
    manager.get_freed_mm_hashes()
    assert run_step(manager, waiting, second) == [[0], []]


def test_an_image_beyond_the_budget_is_encoded_by_a_step_of_its_own() -> None:
    manager = BoundedCacheManager(4096)
    requests = make_request("a", image(1)), make_request("b", image(2, 5000))
    assert run_step(manager, *requests) == [[0], []]
    assert run_step(manager, *requests) == [[], [0]]


def test_items_without_a_sound_plan_count_as_vllm_counts_them() -> None:
    manager = BoundedCacheManager(4096)
    forged = torch.zeros(3, dtype=torch.uint8)
    requests = make_request("a", *[None] * 50), make_request("b", *[forged] * 50)
    assert run_step(manager, *requests) == [[*range(50)], [*range(50)]]


def test_a_step_takes_a_few_recalls_and_all_else() -> None:
    """Of a conversation with five, every other request waits for two at a time."""
    manager = BoundedCacheManager(4096)
    recall = image(1, 100, part="recall", earlier=(Choice(8),))
    long = make_request("long", image(1, 100), *[recall] * 5)
    other = make_request("other", image(2, 100), image(3, 100))
    steps = [run_step(manager, long, other) for _ in range(3)]
    assert steps == [[[0, 1, 2], [0, 1]], [[3, 4], []], [[5], []]]


def test_selections_by_states_of_requests_are_spread_over_steps() -> None:
    """As many as two recalls take; those by the server's own state are not counted."""
    manager = BoundedCacheManager(4096)
    dear = load_state("prunesid")
    cost = item_cost(dear, 100)
    plans = [image(i, 100, state=encode_state(dear)) for i in range(7)]
    taken, _ = run_step(
        manager, make_request("dear", *plans), make_request("own", image(9, 100))
    )
    assert len(taken) == int(2 * DEFAULT_COST // cost) < 7
    drawn = make_request("drawn", *[replace(plan, keep="random") for plan in plans])
    assert len(run_step(BoundedCacheManager(4096), drawn)[0]) == 7, "no policy is run"


def test_a_selection_is_priced_at_the_size_of_its_item() -> None:
    """Seconds of one core, measured in torch on one frame of 4,096 tokens: 42 and 0.008."""

    def make_video_state(name: str) -> PruningState:
        """A shipped state that prunes videos too."""
        frames = {"tokens": {"atom": "per_frame_budget", "k": 2}}
        return load_state(
            json.dumps({**json.loads(load_state(name).dumps()), "frames": frames})
        )

    scope = make_video_state("scope")
    vcast = load_state("vcast")
    assert item_cost(scope, 576) == item_cost(scope, 64) == state_cost(scope)
    assert item_cost(scope, 4096, 1) == pytest.approx(42_000, rel=0.1)
    assert item_cost(scope, 4096, 16) < 500
    assert item_cost(vcast, 4096, 1) == item_cost(vcast, 4096, 64) < 100
    exchanging = make_video_state("autoprune")
    assert item_cost(exchanging, 1 << 14, 256) > item_cost(
        make_video_state("cdpruner"), 1 << 14, 256
    )


@given(st.lists(st.integers(0, 150)), st.integers(1, 200))
def test_groups_are_all_images_in_order_within_the_bound(
    sizes: list[int], bound: int
) -> None:
    groups = [sizes[some] for some in _group_by_tokens(sizes, bound)]
    assert [size for group in groups for size in group] == sizes
    for group, following in zip(groups, [*groups[1:], [bound + 1]], strict=False):
        assert group and (len(group) == 1 or sum(group) <= bound)
        assert sum(group) + following[0] > bound, "these would have gone together"
