from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.base_policies.samples import images, select
from tests.base_policies.test_cen import continued
from vllm_autoprune import Grid


def coverage(rows: Tensor, weight: Tensor, count: int, kept: tuple[int, ...] = ()) -> list[int]:
    """The published loop in float64, with chosen tokens left out."""
    unit = rows.double() / rows.double().norm(dim=1, keepdim=True)
    similarity = unit @ unit.T
    covered, chosen = torch.zeros(len(rows), dtype=torch.float64), list(kept)
    for one in chosen:
        covered = torch.maximum(covered, similarity[one])
    while len(chosen) < count + len(kept):
        gain = weight.double() * (similarity - covered).clamp_min(0).sum(dim=1)
        gain[chosen] = -1
        chosen.append(int(gain.argmax()))
        covered = torch.maximum(covered, similarity[chosen[-1]])
    return chosen[len(kept) :]


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_every_pick_adds_most_weighted_coverage_of_the_encoders_tokens(alpha: float) -> None:
    tokens = images(1, noise=1.0)
    picks = select("scope", tokens, 12, alpha=alpha).picks
    for rows, attention, own in zip(
        tokens.require_encoder(), tokens.require_cls_attention(), picks, strict=True
    ):
        assert own.tolist() == coverage(rows, attention**alpha, 12)


def test_projected_features_are_not_read() -> None:
    tokens = images(2)
    other = replace(tokens, features=torch.randn_like(tokens.features))
    assert torch.equal(select("scope", tokens, 9).picks, select("scope", other, 9).picks)


def test_the_scale_of_attention_does_not_matter() -> None:
    tokens = images(3)
    summed = replace(tokens, cls_attention=16 * tokens.require_cls_attention())
    assert torch.equal(select("scope", tokens, 9).picks, select("scope", summed, 9).picks)


def test_tiles_are_covered_each_on_its_own() -> None:
    tokens = images(4, batch=1, grid=Grid(4, 4, tiles=3), noise=1.0)
    picks = select("scope", tokens, 8).picks[0]
    for tile, share in enumerate((3, 3, 2)):
        rows = slice(16 * tile, 16 * tile + 16)
        wanted = coverage(
            tokens.require_encoder()[0, rows], tokens.require_cls_attention()[0, rows], share
        )
        assert (picks[picks // 16 == tile] % 16).tolist() == wanted


def test_it_continues_from_what_given_tokens_cover() -> None:
    tokens = images(5, noise=1.0)
    kept = torch.tensor([[3, 20, 9], [30, 1, 2]])
    actual = continued("scope", tokens, kept, 6)
    for image in range(2):
        wanted = coverage(
            tokens.require_encoder()[image],
            tokens.require_cls_attention()[image],
            6,
            tuple(kept[image].tolist()),
        )
        assert actual[image].tolist() == wanted


def test_tokens_that_add_nothing_come_by_attention() -> None:
    tokens = images(6, batch=1, grid=Grid(1, 6))
    same = replace(tokens, encoder=torch.ones(1, 6, 4))
    picks = select("scope", same, 5).picks[0]
    order = tokens.require_cls_attention()[0].argsort(descending=True)
    assert picks.tolist() == order[:5].tolist()


def test_a_zero_row_is_like_no_other_token() -> None:
    tokens = images(7, batch=1)
    rows = tokens.require_encoder().clone()
    rows[0, 5] = 0
    picks = select("scope", replace(tokens, encoder=rows), 35).picks[0].tolist()
    assert len(set(picks)) == 35 and 5 not in picks[:20]
