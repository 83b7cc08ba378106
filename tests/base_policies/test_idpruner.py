from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.base_policies.samples import images, select
from tests.base_policies.test_cen import continued
from tests.tpdsl.samples import plain
from vllm_autoprune import Grid


def marginal(
    rows: Tensor, score: Tensor, count: int, balance: float, kept: tuple[int, ...] = ()
) -> list[int]:
    """The published loop in float64, with chosen tokens left out."""
    score = score.double()
    important = (score - score.min()) / (score.max() - score.min() + 1e-6)
    unit = rows.double() / (rows.double().norm(dim=1, keepdim=True) + 1e-8)
    similarity, chosen = unit @ unit.T, list(kept)
    while len(chosen) < count + len(kept):
        value = important.clone()
        if chosen:
            closest = similarity[:, chosen].amax(dim=1)
            value = balance * important - (1 - balance) * closest
        value[chosen] = -torch.inf
        chosen.append(int(value.argmax()))
    return chosen[len(kept) :]


@pytest.mark.parametrize("balance", [0.0, 0.3, 0.5, 1.0])
def test_picks_are_those_of_a_plain_loop(balance: float) -> None:
    tokens = images(1, noise=1.0)
    picks = select("idpruner", tokens, 12, balance=balance).picks
    attention = tokens.require_cls_attention()
    for image in range(2):
        wanted = marginal(tokens.features[image], attention[image], 12, balance)
        assert picks[image].tolist() == wanted


def test_tiles_are_selected_each_on_its_own() -> None:
    tokens = images(2, batch=1, grid=Grid(4, 4, tiles=3), noise=1.0)
    picks = select("idpruner", tokens, 8).picks[0]
    for tile, share in enumerate((3, 3, 2)):
        rows = slice(16 * tile, 16 * tile + 16)
        attention = tokens.require_cls_attention()[0, rows]
        wanted = marginal(tokens.features[0, rows], attention, share, 0.5)
        assert (picks[picks // 16 == tile] % 16).tolist() == wanted


def test_importance_may_be_relevance_with_its_sign() -> None:
    tokens = images(3, noise=1.0)
    instruction = tokens.require_instruction()
    relevance = instruction.sign * instruction.cosines.mean(dim=2)
    picks = select("idpruner", tokens, 9, importance="relevance").picks
    for image in range(2):
        wanted = marginal(tokens.features[image], relevance[image], 9, 0.5)
        assert picks[image].tolist() == wanted


def test_it_continues_from_given_tokens() -> None:
    tokens = images(4, noise=1.0)
    kept = torch.tensor([[3, 20, 9], [30, 1, 2]])
    actual = continued("idpruner", tokens, kept, 6)
    for image in range(2):
        wanted = marginal(
            tokens.features[image],
            tokens.require_cls_attention()[image],
            6,
            0.5,
            tuple(kept[image].tolist()),
        )
        assert actual[image].tolist() == wanted


def test_a_balance_of_one_is_importance_alone() -> None:
    tokens = images(5)
    order = tokens.require_cls_attention().argsort(dim=1, descending=True, stable=True)
    assert torch.equal(select("idpruner", tokens, 9, balance=1.0).picks, order[:, :9])


def test_ties_go_to_the_lower_index() -> None:
    tokens = plain(torch.eye(5))
    flat = type(tokens)(tokens.features, tokens.grid, cls_attention=torch.full((1, 5), 0.2))
    assert select("idpruner", flat, 4).picks.tolist() == [[0, 1, 2, 3]]
