"""The cache of features within its bound."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_autoprune import Grid
from vllm_autoprune.serving.worker.features import (
    ImageFeatures,
    Region,
    TensorCache,
)


def sized(units: int) -> ImageFeatures:
    """Features of ``16 * units`` bytes."""
    encoder = torch.zeros(units, 2, dtype=torch.bfloat16)
    region = Region(Grid(1, units), torch.zeros(units, 3), {"encoder": encoder})
    return ImageFeatures((region,))


@given(
    st.integers(0, 10),
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12)), max_size=60),
)
def test_cache_never_exceeds_its_bound(limit: int, puts: list[tuple[int, int]]) -> None:
    cache, counted = (
        TensorCache[ImageFeatures](16 * limit, minimum) for minimum in (0, 32)
    )
    for key, units in puts:
        cache.put(key, sized(units))
        counted.put(key, sized(units))
        assert len(counted) * 32 <= counted.limit
        inside = [features for k in range(9) if (features := cache.get(k)) is not None]
        assert (
            cache.used_bytes
            == sum(features.nbytes for features in inside)
            <= cache.limit
        )
        assert len(cache) == len(inside)


def test_an_entry_that_counts_for_more_than_the_bound_is_not_kept() -> None:
    cache = TensorCache[ImageFeatures](limit=16, minimum=32)
    cache.put(0, sized(1))
    assert len(cache) == cache.used_bytes == 0


def test_profiling_reserves_the_bound_where_memory_is_measured() -> None:
    cache = TensorCache[ImageFeatures](64)
    assert cache.reserve(torch.device("cpu")) is None
    buffer = cache.reserve(torch.device("meta"))
    assert buffer is not None and buffer.nbytes == 64
