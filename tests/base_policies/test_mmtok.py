from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.base_policies.samples import images, select
from tests.base_policies.test_cen import continued
from vllm_autoprune import Grid, VisualTokens
from vllm_autoprune.tpdsl.tokens import Words


def normed(rows: Tensor) -> Tensor:
    return rows.double() / rows.double().norm(dim=1, keepdim=True)


def coverage(
    tokens: VisualTokens,
    image: int,
    count: int,
    *,
    words: bool = True,
    kept: tuple[int, ...] = (),
    some: slice = slice(None),
) -> list[int]:
    """The published loop in float64, with chosen tokens left out."""
    encoder, features = tokens.require_encoder()[image, some], tokens.features[image, some]
    rows = 0.5 * (normed(encoder) @ normed(encoder).T / 0.2).softmax(dim=1) / len(encoder)
    if words:
        text = tokens.require_words()
        own = normed(text.embeddings[image][text.used[image]])
        shares = (own @ normed(features).T / 0.02).softmax(dim=1) / len(own)
        rows = torch.cat([shares, rows])
    best, chosen = torch.zeros(len(rows), dtype=torch.float64), list(kept)
    for one in chosen:
        best = torch.maximum(best, rows[:, one])
    while len(chosen) < count + len(kept):
        gain = (rows - best[:, None]).clamp_min(0).sum(dim=0)
        gain[chosen] = -1
        chosen.append(int(gain.argmax()))
        best = torch.maximum(best, rows[:, chosen[-1]])
    return chosen[len(kept) :]


@pytest.mark.parametrize("words", [True, False])
def test_every_pick_adds_most_coverage_of_words_and_image(words: bool) -> None:
    tokens = images(1, noise=1.0)
    picks = select("mmtok", tokens, 12, words=words).picks
    for image in range(2):
        assert picks[image].tolist() == coverage(tokens, image, 12, words=words)


def test_padding_among_the_words_changes_nothing() -> None:
    tokens = images(2)
    words = tokens.require_words()
    more = torch.full_like(words.embeddings[:, :3], torch.nan)
    unused = torch.zeros(2, 3, dtype=torch.bool)
    padded = Words(
        torch.cat([words.embeddings, more], dim=1), torch.cat([words.used, unused], dim=1)
    )
    picks = select("mmtok", replace(tokens, words=padded), 9).picks
    assert torch.equal(picks, select("mmtok", tokens, 9).picks)


def test_no_words_is_coverage_of_the_image_alone() -> None:
    tokens = images(3)
    none = Words(torch.zeros(2, 0, 16), torch.zeros(2, 0, dtype=torch.bool))
    picks = select("mmtok", replace(tokens, words=none), 9).picks
    assert torch.equal(picks, select("mmtok", tokens, 9, words=False).picks)


def test_the_token_that_matches_a_word_is_kept_first() -> None:
    tokens = images(4, batch=1)
    word = tokens.features[:, 17:18]
    asked = replace(tokens, words=Words(word, torch.ones(1, 1, dtype=torch.bool)))
    assert select("mmtok", asked, 4).picks[0, 0] == 17
    assert 17 not in select("mmtok", asked, 4, words=False).picks[0].tolist()


def test_tiles_cover_the_words_each_on_its_own() -> None:
    tokens = images(5, batch=1, grid=Grid(4, 4, tiles=3), noise=1.0)
    picks = select("mmtok", tokens, 8).picks[0]
    for tile, share in enumerate((3, 3, 2)):
        wanted = coverage(tokens, 0, share, some=slice(16 * tile, 16 * tile + 16))
        assert (picks[picks // 16 == tile] % 16).tolist() == wanted


def test_a_delta_by_words_continues_a_core_without_them() -> None:
    tokens = images(6, noise=1.0)
    core = select("mmtok", tokens, 5, words=False).picks
    actual = continued("mmtok", tokens, core, 6)
    for image in range(2):
        kept = tuple(core[image].tolist())
        assert kept == tuple(coverage(tokens, image, 5, words=False))
        assert actual[image].tolist() == coverage(tokens, image, 6, kept=kept)
