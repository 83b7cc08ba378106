"""Patches of vLLM's worker and scheduler: caches, encoder calls, encoder budget."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.worker.gpu_worker import Worker

from vllm_autoprune.serving.compat import worker as patches
from vllm_autoprune.serving.models.pruned_model import _group_by_tokens
from vllm_autoprune.serving.plan import FIELD, Choice, ItemPlan


@pytest.mark.compat
@pytest.mark.parametrize("name", ["reset_mm_cache", "update_weights"])
def test_features_are_cleared_also_where_a_worker_s_call_fails(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Weights may be half new. That resets and reloads clear them: ``test_equivalence.py``."""

    def fail(*_: object) -> None:
        raise OSError("the trainer is gone")

    for call in patches._WORKER_RESETS:
        stock = fail if call == name else vars(Worker)[call]
        monkeypatch.setattr(Worker, call, stock)
    cleared: list[object] = []
    for _ in range(2):
        patches.clear_with_worker_caches(cleared.append)
    worker: Any = Worker.__new__(Worker)
    worker.model_runner = SimpleNamespace(get_model=lambda: "the model")
    with pytest.raises(OSError, match="trainer is gone"):
        getattr(worker, name)()
    assert cleared == ["the model"]


# ---- images of a step in encoder calls ----


@given(st.lists(st.integers(0, 150)), st.integers(1, 200))
def test_groups_are_all_images_in_order_within_the_bound(sizes: list[int], bound: int) -> None:
    groups = [sizes[some] for some in _group_by_tokens(sizes, bound)]
    assert [size for group in groups for size in group] == sizes
    for group, following in zip(groups, [*groups[1:], [bound + 1]], strict=False):
        assert group and (len(group) == 1 or sum(group) <= bound)
        assert sum(group) + following[0] > bound, "these would have gone together"


# ---- recalls within a step of the scheduler ----


def test_a_step_takes_a_few_recalls_and_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a conversation with five, every other request waits for two at a time."""
    for name in ("can_allocate", "get_freed_mm_hashes"):
        stock = getattr(EncoderCacheManager, name)
        monkeypatch.setattr(EncoderCacheManager, name, getattr(stock, "__wrapped__", stock))
    patches.spread_recalls(ItemPlan.is_recall)
    image = ItemPlan(8, (0, 0), tokens=100)
    recall = ItemPlan(8, (0, 0), tokens=100, part="recall", earlier=(Choice(8),))

    def request(name: str, *plans: ItemPlan) -> Any:
        features = [
            SimpleNamespace(
                identifier=f"{name}-{i}", data={FIELD: SimpleNamespace(data=plan.encode())}
            )
            for i, plan in enumerate(plans)
        ]
        return SimpleNamespace(
            request_id=name, mm_features=features, get_num_encoder_embeds=lambda i: 8
        )

    manager = EncoderCacheManager(4096)
    requests = request("long", image, *[recall] * 5), request("other", image, image)
    steps: list[list[list[int]]] = []
    for _ in range(3):  # tried and allocated as the scheduler does
        steps.append([])
        for each in requests:
            taken = list[int]()
            for i in range(len(each.mm_features)):
                if manager.check_and_update_cache(each, i):
                    continue
                if not manager.can_allocate(each, i, 4096, 8 * len(taken)):
                    break
                taken.append(i)
            for i in taken:
                manager.allocate(each, i)
            steps[-1].append(taken)
        manager.get_freed_mm_hashes()
    assert steps == [[[0, 1, 2], [0, 1]], [[3, 4], []], [[5], []]]
    assert not ItemPlan.is_recall(None)
