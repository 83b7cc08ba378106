from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.base_policies.samples import images, native, select
from tests.base_policies.test_cen import continued
from vllm_autoprune import Grid, SelectionError, VisualTokens
from vllm_autoprune.base_policies.holov import HoloVParams, band_quotas


def attended(attention: list[float]) -> VisualTokens:
    count = len(attention)
    return VisualTokens(
        torch.eye(count)[None], Grid(1, count), cls_attention=torch.tensor([attention])
    )


def quotas(attention: list[float], bands: int, count: int) -> list[int]:
    taken: list[int] = band_quotas(torch.tensor([attention]), bands, count)[0].tolist()
    return taken


def test_quotas_follow_the_mean_attention_of_each_band() -> None:
    # Means 4, 2, 1, 1 of 8 in all.
    attention = [3.0, 5, 4, 4, 4, 4] + [2.0] * 6 + [1.0] * 12
    # The remainder goes to the largest weights, not to the largest fractions.
    assert quotas(attention, 4, 7) == [4, 2, 1, 0]
    assert quotas(attention, 4, 10) == [6, 2, 1, 1]


def test_bands_of_an_uneven_number_of_tokens() -> None:
    """The first n mod P bands are one token longer; the mean counts, not the sum."""
    assert quotas([1.0] * 7, 3, 3) == [1, 1, 1]
    assert select("holov", attended([1.0] * 7), 3, bands=3).picks.tolist() == [[0, 3, 5]]


def test_the_most_attended_tokens_of_a_band_are_kept() -> None:
    tokens = attended([0.1, 0.9, 0.5, 0.6, 0.2, 0.3])
    assert native("holov", tokens, 3, bands=2).indices[0].tolist() == [1, 2, 3]
    assert select("holov", tokens, 3, bands=2).picks.tolist() == [[1, 3, 2]]


def test_overflow_goes_to_bands_with_room_that_fall_short_most() -> None:
    # Fair shares of 6: 4.8, 0.9, 0.3; the first band has two tokens.
    attention = [16.0, 16, 3, 3, 1, 1]
    assert quotas(attention, 3, 6) == [2, 2, 2]
    assert quotas(attention, 3, 5) == [2, 2, 1]
    assert quotas(attention, 3, 4) == [2, 1, 1]


def test_bands_without_attention_share_what_is_left() -> None:
    assert quotas([0.0] * 6, 3, 5) == [2, 2, 1]
    assert quotas([1.0, 1, 0, 0, 0, 0], 3, 4) == [2, 1, 1]


@pytest.mark.parametrize(
    ("tokens", "budget", "bands"),
    [(576, 64, 16), (576, 32, 32), (576, 128, 8), (1296, 130, 17), (576, 2000, 1), (4, 1, 4)],
)
def test_published_numbers_of_bands(tokens: int, budget: int, bands: int) -> None:
    assert HoloVParams(bands=None).count(tokens, budget) == bands


def test_features_are_not_read() -> None:
    tokens = images(1)
    other = replace(tokens, features=torch.randn_like(tokens.features))
    assert torch.equal(select("holov", tokens, 9).picks, select("holov", other, 9).picks)


def test_a_tile_has_bands_of_its_own() -> None:
    tokens = images(2, batch=1, grid=Grid(4, 4, tiles=3))
    picks = select("holov", tokens, 8, bands=4).picks[0]
    for tile, share in enumerate((3, 3, 2)):
        rows = slice(16 * tile, 16 * tile + 16)
        alone = attended(tokens.require_cls_attention()[0, rows].tolist())
        own = picks[picks // 16 == tile] % 16
        assert own.tolist() == select("holov", alone, share, bands=4).picks[0].tolist()


def test_earlier_picks_are_more_attended() -> None:
    tokens = images(3)
    picks = select("holov", tokens, 12).picks
    attention = tokens.require_cls_attention().gather(1, picks)
    assert bool((attention.diff(dim=1) <= 0).all())


def test_given_tokens_are_left_out_of_every_band() -> None:
    tokens = images(4)
    kept = select("holov", tokens, 6).picks
    more = continued("holov", tokens, kept, 6)
    wanted = select("holov", tokens, 12).picks
    for image in range(2):
        both = {*kept[image].tolist(), *more[image].tolist()}
        assert len(both) == 12
        assert set(more[image].tolist()) <= {*wanted[image].tolist()}


def test_a_count_of_its_own_is_refused() -> None:
    with pytest.raises(SelectionError, match="no count of its own"):
        native("holov", images(5))
