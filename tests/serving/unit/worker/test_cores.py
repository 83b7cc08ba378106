"""Cores that are kept for further questions."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterable
from itertools import pairwise
from random import Random

import pytest
import torch

from vllm_autoprune.serving.worker import cores
from vllm_autoprune.serving.worker.cores import CoreCache


def kept(cache: CoreCache, keys: Iterable[Hashable]) -> list[Hashable]:
    """Which of the keys have their indices, without making them newer."""
    return [key for key in keys if key in cache._indices._spans]


def test_memory_is_bounded_whatever_the_size_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "MAX_INDICES", 100)
    cache = CoreCache(0)
    for key in range(10):
        cache.put_indices(key, torch.arange(8))
    assert cache.indices(0) is not None
    cache.put_indices("large", torch.arange(60))
    # The first was used last, so it stays beside the two others that were not overwritten.
    assert kept(cache, range(10)) == [0, 8, 9]
    cache.put_indices("larger than all", torch.arange(101))
    assert cache.indices("larger than all") is None
    assert cache.indices("large") is not None


def test_indices_are_those_that_were_put_however_often_the_buffer_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against a dictionary, with cores of random sizes that are put and read in random order."""
    monkeypatch.setattr(cores, "MAX_INDICES", 64)
    monkeypatch.setattr(cores, "MAX_CORES", 12)
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
        assert all(one.stop <= two.start for one, two in pairwise(spans))
    assert hits > 300


def test_a_core_that_is_asked_for_stays_however_many_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small cores too, of which the number is bounded before the buffer is full."""
    monkeypatch.setattr(cores, "MAX_CORES", 10)
    monkeypatch.setattr(cores, "MAX_INDICES", 10 * 160)
    cache = CoreCache(0)
    cache.put_indices("hot", torch.arange(3))
    for key in range(100):
        cache.put_indices(key, torch.arange(2))
        assert cache.indices("hot") is not None
    assert len(kept(cache, range(100))) == 9


def test_indices_that_were_read_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "MAX_INDICES", 8)
    cache = CoreCache(0)
    cache.put_indices("image", torch.arange(4))
    read = cache.indices("image")
    for key in range(4):
        cache.put_indices(key, torch.full((4,), 9))
    assert read is not None
    assert read.tolist() == [0, 1, 2, 3]


def test_cores_have_no_tensors_of_their_own() -> None:
    """Small tensors that live long would keep an allocator from joining the memory around them."""
    cache = CoreCache(0)
    cache.put_indices("first", torch.arange(8))

    def count_tensors() -> int:
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    before = count_tensors()
    for key in range(200):
        cache.put_indices(key, torch.arange(8))
    assert count_tensors() - before < 10
    assert cache.indices("first") is not None


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


def test_cores_are_kept_inside_and_outside_of_inference_mode() -> None:
    cache = CoreCache(0)
    with torch.inference_mode():
        cache.put_indices("inside", torch.arange(4))
    cache.put_indices("outside", torch.arange(3))
    with torch.inference_mode():
        cache.put_indices("inside again", torch.arange(2))
    sizes = [cache.indices(key) for key in ("inside", "outside", "inside again")]
    assert [len(one) for one in sizes if one is not None] == [4, 3, 2]
