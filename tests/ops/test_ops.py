"""Operations of the selection: similarity, rows, dtypes; golden cases hold the greedy loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.server import command
from tests.tables import parametrize_from_file
from vllm_autoprune.ops.dpp import greedy_map
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.ops.farthest import farthest_points
from vllm_autoprune.ops.farthest_torch import Chosen
from vllm_autoprune.ops.rowwise import TIE, argmax_within, find_outliers
from vllm_autoprune.ops.similarity import (
    cosines,
    cosines_with,
)
from vllm_autoprune.tpdsl.refine import _evenly_spaced

INF = torch.inf


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_values_within_the_tolerance_of_the_maximum_are_a_tie(size: float) -> None:
    rounded = 1 - TIE / 4
    apart = 1 - 4 * TIE
    values = torch.tensor([[0.0, rounded, 1.0, rounded], [apart, 0.5, 0.5, 1.0]])
    assert argmax_within(values)[0].tolist() == [1, 3]
    assert argmax_within(values * size, relative=True)[0].tolist() == [1, 3]
    lower = torch.tensor([[-INF, -2.0, INF, 1.0], [-3.0, -2.0, -INF, -2.0]])
    assert argmax_within(lower, relative=True)[0].tolist() == [2, 1]


@given(tokens=st.integers(1, 3000), data=st.data())
def test_an_even_spread_has_equal_gaps_and_equal_margins(
    tokens: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, tokens))
    places = _evenly_spaced(2, tokens, count, torch.device("cpu"))
    assert places.shape == (2, count) and torch.equal(places[0], places[1])
    row = places[0].tolist()
    assert row == sorted(set(row)) and row[0] >= 0 and row[-1] < tokens
    gaps = [b - a for a, b in itertools.pairwise(row)]
    assert all(gap in (tokens // count, tokens // count + 1) for gap in gaps)
    assert abs(row[0] - (tokens - 1 - row[-1])) <= 1 + tokens // count


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 64, 144, 575, 576, 729])
def test_outliers_use_the_quartiles_of_numpy_percentile(count: int) -> None:
    score = torch.rand(20, count, generator=torch.Generator().manual_seed(count)) ** 6
    actual = find_outliers(score)
    for row, mine in zip(score.numpy(), actual, strict=True):
        low = np.percentile(row, 25)
        high = np.percentile(row, 75)
        assert mine.tolist() == (row > high + 1.5 * (high - low)).tolist()

    flat = torch.ones(1, 9)
    flat[0, 4] = torch.nan
    assert not find_outliers(torch.ones(2, 9)).any() and not find_outliers(flat).any()


HALF = [torch.float32, torch.bfloat16, torch.float16]


def rows(seed: int, batch: int, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, width, generator=source).to(dtype)


def cosine(features: Tensor) -> Tensor:
    return cosines(features, features.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("tokens", [1, 5, 255, 256, 300, 512, 577])
def test_cosines_are_products_of_directions_rounded_in_their_own_dtype(
    tokens: int, dtype: torch.dtype
) -> None:
    features = rows(tokens, 2, tokens, 33, dtype)
    unit = (features / features.norm(dim=-1, keepdim=True)).double()
    actual = cosine(features)
    assert actual.dtype == torch.float32 and actual.shape == (2, tokens, tokens)
    assert torch.allclose(actual.double(), unit @ unit.transpose(1, 2), atol=1e-5)


@pytest.mark.parametrize("dtype", HALF)
def test_cosines_with_other_vectors(dtype: torch.dtype) -> None:
    # Wider than what fits the cache, so that there are several strips.
    tokens = 70
    width = 4096
    features = rows(3, 2, tokens, width, dtype)
    others = rows(4, 2, 3, width, torch.float32)
    features[0, 5], others[1, 2] = 0, 0
    actual = cosines_with(features, others)
    wide = features.double()
    far = others.double()
    wanted = torch.nn.functional.normalize(
        wide, dim=-1
    ) @ torch.nn.functional.normalize(far, dim=-1).transpose(1, 2)
    assert actual.dtype == torch.float32
    assert torch.allclose(actual.double(), wanted, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("tokens", "width"), [(9, 16), (64, 100), (144, 64), (300, 48), (576, 96)]
)
def test_an_image_alone_has_the_same_bits_as_in_a_batch(
    tokens: int, width: int, threads: int
) -> None:

    def selection(features: Tensor, text: Tensor) -> tuple[Tensor, ...]:
        """A selection with every operation that sums, whose rounding may depend on the batch."""
        similarity = cosine(features)
        relevance = cosines_with(features, text)
        quality = 1.5 + relevance.sum(dim=-1)
        count = features.shape[1] // 3
        picks = greedy_map(similarity, quality, count)
        nothing = torch.zeros_like(quality, dtype=torch.bool)
        far = farthest_points(
            1 - similarity, count, Chosen(1 - similarity[:, 0], nothing)
        )
        return similarity, relevance, picks, far

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        features = rows(tokens, 5, tokens, width, torch.bfloat16)
        text = rows(5, 5, 2, width, torch.float32)
        together = selection(features, text)
        again = selection(features.clone(), text.clone())
        assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True))
        for image in range(5):
            row = slice(image, image + 1)
            alone = selection(features[row].clone(), text[row].clone())
            assert all(
                torch.equal(a[row], b) for a, b in zip(together, alone, strict=True)
            )
    finally:
        torch.set_num_threads(before)


@parametrize_from_file("machine")
def test_bfloat16_needs_a_gpu_or_the_instructions(
    machine: tuple[int, bool, str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, onednn, instructions, limit, expected = machine
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {instructions: True})
    assert choose_dtype() == expected
    assert choose_dtype(exact=True) == ("bfloat16" if gpus else "float32")
    assert command("model", 1)[-2:] == ["--dtype", expected]
    assert command("model", 1, ("--dtype", "half"))[-1] == "half", (
        "flags win, being last"
    )
