from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_autoprune.serving.worker.features import (
    FeatureCache,
    ImageFeatures,
    Region,
    TowerFeatures,
)
from vllm_autoprune.tpdsl.tokens import Grid

FIVE = Grid(1, 5)


def _towered(tower: TowerFeatures) -> ImageFeatures:
    region = Region(FIVE, torch.zeros(5, 4), cosine=torch.zeros(5, 5), tower=tower)
    return ImageFeatures((region,))


def sized(units: int) -> ImageFeatures:
    """Features of ``16 * units`` bytes."""
    return ImageFeatures((Region(Grid(1, units), torch.zeros(units, 4)),))


def test_nbytes_of_features() -> None:
    half = torch.zeros(5, 4, dtype=torch.bfloat16)
    full = ImageFeatures((Region(FIVE, half, torch.zeros(5), torch.zeros(5, 3)),))
    assert full.nbytes == 5 * 4 * 2 + 5 * 4 + 5 * 3 * 4


def test_nbytes_includes_tower_features() -> None:
    half = torch.zeros(5, 8, dtype=torch.bfloat16)
    tower = TowerFeatures(half, half[:1], torch.zeros(5, 2))
    image = _towered(tower)
    seen = 5 * 8 * 2 + 8 * 2 + 5 * 2 * 4
    assert image.nbytes == 5 * 4 * 4 + 5 * 5 * 4 + seen
    following = TowerFeatures(half, half[:1], torch.zeros(5, 2), torch.zeros(5), half)
    more = _towered(following)
    assert more.nbytes == image.nbytes + 5 * 4 + 5 * 8 * 2


def test_tokens_before_the_projector_count_once() -> None:
    half = torch.zeros(5, 8, dtype=torch.bfloat16)
    alone = Region(FIVE, torch.zeros(5, 4), encoder=half)
    assert ImageFeatures((alone,)).nbytes == 5 * 4 * 4 + 5 * 8 * 2
    assert alone.encoder_rows is half
    tower = TowerFeatures(half, half[:1], torch.zeros(5, 2))
    assert Region(FIVE, torch.zeros(5, 4), tower=tower).encoder_rows is half
    assert Region(FIVE, torch.zeros(5, 4)).encoder_rows is None


def test_copied_image_does_not_keep_its_batch_alive() -> None:
    batch = TowerFeatures(
        torch.randn(3, 5, 8), torch.randn(3, 1, 8), torch.randn(3, 5, 2),
        torch.randn(3, 5), torch.randn(3, 5, 8),
    )  # fmt: skip
    one = batch.copy_image(1)
    for part, whole in zip(one.tensors(), batch.tensors(), strict=True):
        assert torch.equal(part, whole[1])
        assert part.untyped_storage().nbytes() == part.nbytes


@given(st.integers(0, 10), st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12)), max_size=60))
def test_cache_never_exceeds_its_bound(limit: int, puts: list[tuple[int, int]]) -> None:
    cache = FeatureCache(16 * limit)
    for key, units in puts:
        cache.put((key, 0), sized(units))
        assert cache.used_bytes <= cache.limit
        inside = [features for k in range(9) if (features := cache.get((k, 0))) is not None]
        assert cache.used_bytes == sum(features.nbytes for features in inside)
        assert len(cache) == len(inside)


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    cache = FeatureCache(3 * 16)
    for key in (1, 2, 3):
        cache.put((key, 0), sized(1))
    cache.get((1, 0))
    cache.put((4, 0), sized(1))
    assert [cache.get((key, 0)) is not None for key in (1, 2, 3, 4)] == [True, False, True, True]
    cache.put((5, 0), sized(2))  # evicts as many as needed
    assert [cache.get((key, 0)) is not None for key in (1, 3, 4, 5)] == [False, False, True, True]


def test_too_large_image_is_not_cached_and_evicts_nothing() -> None:
    cache = FeatureCache(2 * 16)
    cache.put((1, 0), sized(2))
    cache.put((2, 0), sized(3))
    assert cache.get((1, 0)) is not None
    assert cache.get((2, 0)) is None


def test_bound_of_zero_caches_nothing() -> None:
    cache = FeatureCache(0)
    cache.put((1, 0), sized(1))
    assert (len(cache), cache.used_bytes) == (0, 0)
    assert cache.reserve(torch.device("cuda")) is None


def test_a_key_is_both_of_its_numbers_and_is_counted_once() -> None:
    cache = FeatureCache(4 * 16)
    first = sized(1)
    cache.put((1, 2), first)
    cache.put((1, 2), sized(1))
    assert cache.used_bytes == 16
    assert cache.get((1, 2)) is first
    assert cache.get((2, 1)) is None
    assert (cache.hits, cache.misses) == (1, 1)


def test_clear_keeps_the_counters() -> None:
    cache = FeatureCache(16)
    cache.put((1, 0), sized(1))
    cache.get((1, 0))
    cache.clear()
    assert (len(cache), cache.used_bytes, cache.hits) == (0, 0, 1)
    assert cache.get((1, 0)) is None
    cache.put((1, 0), sized(1))
    assert len(cache) == 1


def test_profiling_reserves_the_bound_where_memory_is_measured() -> None:
    assert FeatureCache(64).reserve(torch.device("cpu")) is None
    buffer = FeatureCache(64).reserve(torch.device("meta"))
    assert buffer is not None
    assert buffer.nbytes == 64
