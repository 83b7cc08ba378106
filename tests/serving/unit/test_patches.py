"""Patches of vLLM's worker and scheduler: caches, encoder calls, encoder budget."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_autoprune.serving.compat import worker as patches
from vllm_autoprune.serving.compat.worker import spread_recalls
from vllm_autoprune.serving.encoder_budget import UnprunedBudgetManager
from vllm_autoprune.serving.models.pruned_model import group_by_tokens
from vllm_autoprune.serving.plan import FIELD, Choice, ItemPlan, peek_plan

WORKER_CALLS = (
    "reset_encoder_cache",
    "reset_mm_cache",
    "reload_weights",
    "update_weights",
    "finish_weight_update",
)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's worker with a fake runner and a fake weight transfer."""
    from vllm.v1.worker import gpu_worker

    def nothing(*_: object, **__: object) -> None:
        return None

    for name in WORKER_CALLS:
        monkeypatch.setattr(gpu_worker.Worker, name, gpu_worker.Worker.__dict__[name])
    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda _: nullcontext())
    worker = gpu_worker.Worker.__new__(gpu_worker.Worker)
    calls = ("reset_encoder_cache", "reset_mm_cache", "reload_weights", "reset_lora_state")
    worker.model_runner = SimpleNamespace(
        **dict.fromkeys(calls, nothing), get_model=lambda: "the model"
    )
    transfer = ("update_weights", "finish_weight_update", "reset_weight_update_target")
    worker.weight_transfer_engine = SimpleNamespace(**dict.fromkeys(transfer, nothing))
    worker.vllm_config = SimpleNamespace()
    worker._weight_update_active = True
    worker._weight_update_is_draft = False
    return worker


@pytest.mark.compat
@pytest.mark.parametrize("name", WORKER_CALLS)
def test_features_are_cleared_when_a_worker_drops_images_or_takes_weights(
    worker: Any, name: str
) -> None:
    cleared: list[object] = []
    for _ in range(2):
        patches.clear_with_worker_caches(cleared.append)
    getattr(worker, name)(*([{}] if name == "update_weights" else []))
    assert cleared == ["the model"]


@pytest.mark.compat
def test_features_are_cleared_after_a_partial_weight_update(worker: Any) -> None:
    def fail(*_: object) -> None:
        raise OSError("the trainer is gone")

    cleared: list[object] = []
    patches.clear_with_worker_caches(cleared.append)
    worker.weight_transfer_engine.update_weights = fail
    with pytest.raises(OSError, match="trainer is gone"):
        worker.update_weights({})
    assert cleared == ["the model"]


# ---- images of a step in encoder calls ----


@given(st.lists(st.integers(0, 150)), st.integers(1, 200))
def test_groups_are_all_images_in_order_within_the_bound(sizes: list[int], bound: int) -> None:
    groups = list(group_by_tokens(sizes, bound))
    assert [size for some in groups for size in sizes[some]] == sizes
    for some in groups:
        group = sizes[some]
        assert group and (len(group) == 1 or sum(group) <= bound)
    for some, following in pairwise(groups):
        assert sum(sizes[some]) + sizes[following][0] > bound, "these would have gone together"


class Model:
    """Fake model whose items are numbers of tokens."""

    def autoprune_split(self, items: Sequence[int]) -> list[slice]:
        return list(group_by_tokens(items, 100))


STEPS: list[tuple[object, dict[str, list[int]], list[dict[str, list[int]]]]] = [
    (
        Model(),
        {"a": [60, 30, 30], "b": [10], "c": [101]},
        [{"a": [0, 1]}, {"a": [2], "b": [0]}, {"c": [0]}],
    ),
    (Model(), {"a": [60, 30], "b": [10]}, [{"a": [0, 1], "b": [0]}]),
    (Model(), {"a": [500]}, [{"a": [0]}]),
    (object(), {"a": [60, 60], "b": [60]}, [{"a": [0, 1], "b": [0]}]),  # without the plugin
]


@pytest.mark.compat
@pytest.mark.parametrize(("model", "sizes", "groups"), STEPS)
def test_both_runners_are_given_one_group_after_another(
    monkeypatch: pytest.MonkeyPatch,
    model: object,
    sizes: dict[str, list[int]],
    groups: list[dict[str, list[int]]],
) -> None:
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    calls: list[Any] = []
    every = [(name, i) for name, of_request in sizes.items() for i in range(len(of_request))]

    def first(self: object, scheduler_output: Any) -> Any:
        calls.append(scheduler_output.scheduled_encoder_inputs)
        return [(name, i) for name, inputs in calls[-1].items() for i in inputs]

    def second(self: object, mm_kwargs: list[tuple[str, Any]]) -> Any:
        calls.append([size for _, size in mm_kwargs])
        return calls[-1]

    requests = {
        name: SimpleNamespace(mm_features=[SimpleNamespace(data=size) for size in of_request])
        for name, of_request in sizes.items()
    }
    runner: Any = SimpleNamespace(get_model=lambda: model, requests=requests)
    scheduled = {name: list(range(len(of_request))) for name, of_request in sizes.items()}
    output: Any = SimpleNamespace(scheduled_encoder_inputs=scheduled)
    monkeypatch.setattr(GPUModelRunner, "_execute_mm_encoder", first)
    monkeypatch.setattr(EncoderRunner, "execute_mm_encoder", second)
    patches.bound_encoder_calls()
    assert GPUModelRunner._execute_mm_encoder(runner, output) == every
    assert calls == groups
    assert output.scheduled_encoder_inputs is scheduled

    calls.clear()

    items: Any = [("image", sizes[name][i]) for name, i in every]
    runner = SimpleNamespace(model=model)
    assert EncoderRunner.execute_mm_encoder(runner, items) == [size for _, size in items]
    assert calls == [
        [sizes[n][i] for n, members in group.items() for i in members] for group in groups
    ]


# ---- the scheduler's encoder budget ----

K, BUDGET, CACHE = 8, 1000, 4096


@pytest.fixture
def manager() -> UnprunedBudgetManager:
    scheduler = SimpleNamespace(max_num_encoder_input_tokens=BUDGET)
    config: Any = SimpleNamespace(scheduler_config=scheduler)
    return UnprunedBudgetManager.create_manager(cache_size=CACHE, vllm_config=config)


def request(name: str, *sizes: int | None) -> Any:
    """A request with an image of each size, kept as K; None is an image without a plan."""
    features = [
        SimpleNamespace(
            identifier=f"{name}-{i}",
            data=None
            if size is None
            else {FIELD: SimpleNamespace(data=ItemPlan(K, (0, 0), tokens=size).encode())},
        )
        for i, size in enumerate(sizes)
    ]
    return SimpleNamespace(
        request_id=name, mm_features=features, get_num_encoder_embeds=lambda i: K
    )


def scheduled(manager: Any, req: Any) -> list[int]:
    """Inputs of a request that this step takes, tried and allocated as the scheduler does."""
    scheduled_inputs: list[int] = []
    for i in range(len(req.mm_features)):
        if manager.check_and_update_cache(req, i):
            continue
        if not manager.can_allocate(req, i, CACHE, K * len(scheduled_inputs)):
            break
        scheduled_inputs.append(i)
    for i in scheduled_inputs:
        manager.allocate(req, i)
    return scheduled_inputs


def test_step_is_bounded_by_unpruned_tokens(manager: UnprunedBudgetManager) -> None:
    long, other = request("one", 400, 400, 400), request("other", 300, 100)
    assert scheduled(manager, long) == [0, 1]
    assert scheduled(manager, other) == []
    manager.get_freed_mm_hashes()
    assert scheduled(manager, long) == [2]
    assert scheduled(manager, other) == [0, 1]


def test_an_image_above_the_budget_has_a_step_of_its_own(manager: UnprunedBudgetManager) -> None:
    large, small = request("large", 5000), request("small", 10)
    assert scheduled(manager, large) == [0]
    assert scheduled(manager, small) == []
    manager.get_freed_mm_hashes()
    assert scheduled(manager, small) == [0]


def test_cache_is_counted_in_kept_tokens(manager: UnprunedBudgetManager) -> None:
    scheduled(manager, request("one", 400, 400))
    assert manager.num_free_slots == CACHE - 2 * K
    assert scheduled(manager, request("one", 400, 400)) == []  # in the cache


def test_images_without_a_plan_are_counted_as_in_stock(manager: UnprunedBudgetManager) -> None:
    assert len(scheduled(manager, request("one", *[None] * 100))) == 100


def test_a_step_takes_a_few_recalls_and_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a conversation with five, every other request waits for two at a time."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    for name in ("can_allocate", "get_freed_mm_hashes"):
        stock = getattr(EncoderCacheManager, name)
        monkeypatch.setattr(EncoderCacheManager, name, getattr(stock, "__wrapped__", stock))
    spread_recalls(peek_plan)
    manager = EncoderCacheManager(CACHE)
    recall = ItemPlan(K, (0, 0), tokens=100, part="recall", earlier=(Choice(K),)).encode()
    long, other = request("long", 100, *[100] * 5), request("other", 100, 100)
    for feature in long.mm_features[1:]:
        feature.data[FIELD].data = recall
    steps = []
    for _ in range(3):
        steps.append((scheduled(manager, long), scheduled(manager, other)))
        manager.get_freed_mm_hashes()
    assert steps == [([0, 1, 2], [0, 1]), ([3, 4], []), ([5], [])]
    assert peek_plan(None) is None
