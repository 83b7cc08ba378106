"""Cores that are kept for further questions."""

from __future__ import annotations

import pytest
import torch

from vllm_autoprune.serving.worker import cores
from vllm_autoprune.serving.worker.cores import CoreCache


def test_memory_is_bounded_whatever_the_size_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "MAX_INDICES", 100)
    cache = CoreCache(0)
    for key in range(10):
        cache.put_indices(key, torch.arange(8))
    assert cache.indices(0) is not None
    cache.put_indices("large", torch.arange(60))
    # The first was used last, so it stays beside four others.
    assert [key for key in range(10) if cache.indices(key) is not None] == [0, 6, 7, 8, 9]
    cache.put_indices("larger than all", torch.arange(101))
    assert cache.indices("larger than all") is None


def test_the_first_indices_of_a_core_are_kept() -> None:
    cache = CoreCache(0)
    cache.put_indices("image", torch.tensor([1, 2]))
    cache.put_indices("image", torch.tensor([3, 4]))
    cache.put_indices(None, torch.tensor([5]))
    indices = cache.indices("image")
    assert indices is not None
    assert indices.tolist() == [1, 2]
    assert cache.indices(None) is None


def test_clearing_drops_the_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "MAX_INDICES", 8)
    cache = CoreCache(0)
    for _ in range(3):
        cache.put_indices("image", torch.arange(8))
        assert cache.indices("image") is not None
        cache.clear()
        assert cache.indices("image") is None
