"""Base policies over tiles and given tokens; what holds of every selection is in tests/tpdsl."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tpdsl.samples import images, mapped, state
from tests.tpdsl.test_properties import BASES
from vllm_autoprune import Grid, VisualTokens
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    INSTRUCTION_NEEDS,
    BasePolicy,
    Given,
    PolicyParams,
    ReferenceSelection,
)
from vllm_autoprune.tpdsl.tokens import Words

GRIDS = [Grid(6, 6), Grid(3, 4, tiles=3), Grid(4, 4, tiles=5)]


def policy_of(variant: str) -> tuple[BasePolicy, PolicyParams]:
    call = state(BASES[variant]).base_policy
    return BASE_POLICIES[call.name], call.params


def run(variant: str, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    policy, params = policy_of(variant)
    return policy.select(params, tokens, budget)


SCALED_OVER_TILES = ("cdpruner", "cen_cdpruner", "fsr")
"""Policies whose relevance is normalised over all tiles of an image, as golden cases hold."""


def selects_per_tile(variant: str) -> bool:
    policy, params = policy_of(variant)
    scaled = policy.name in SCALED_OVER_TILES and "core" not in variant
    across = getattr(params, "tile_scope", "per_tile") == "global"
    relevance = getattr(params, "importance", "") == "relevance"
    return not (scaled or across or relevance or "language" in policy.needs)


@pytest.mark.parametrize("variant", [variant for variant in BASES if selects_per_tile(variant)])
def test_tiles_are_selected_each_on_its_own(variant: str) -> None:
    tokens = images(4, batch=1, grid=Grid(3, 4, tiles=3), noise=1.0)
    size = tokens.grid.per_tile
    for tile in range(3):

        def cut(values: Tensor, tile: int = tile) -> Tensor:
            """The tile's rows of what has a row a token, or one a tile; the text is the same."""
            if values.shape[1] == tokens.count:
                return values[:, size * tile : size * (tile + 1)]
            return values[:, tile : tile + 1] if values.shape[1] == tokens.grid.tiles else values

        parts = {f.name: mapped(vars(tokens)[f.name], cut) for f in fields(VisualTokens)}
        alone_tokens = VisualTokens(**{**parts, "grid": Grid(3, 4), "language": None})
        for budget in (7, 11):
            selection = run(variant, tokens, budget)
            alone = run(variant, alone_tokens, budget // 3 + (tile < budget % 3))
            inside = selection.picks[0] // size == tile
            picks = selection.picks[0, inside] - size * tile
            assert picks.tolist() == alone.picks[0].tolist()
            if alone.merged is not None and selection.merged is not None:
                torch.testing.assert_close(selection.merged[0, inside], alone.merged[0])
            if alone.extra is not None and selection.extra is not None:
                torch.testing.assert_close(selection.extra[0, tile], alone.extra[0, 0])


GREEDY = [
    *("divprune", "divprune global", "cdpruner", "cen_divprune", "cen_divprune scaled"),
    *("cen_divprune global", "cen_cdpruner", "cen_cdpruner core", "cen_cdpruner global"),
    *("scope", "mmtok", "mmtok core", "idpruner", "idpruner relevance"),
]


def given(tokens: VisualTokens, kept: Tensor) -> Given:
    closed = mask_from_indices(kept, tokens.count)
    return Given(kept, closed, closed, kept.shape[1])


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("variant", GREEDY)
def test_a_greedy_policy_goes_on_from_its_own_picks(variant: str, grid: Grid) -> None:
    """The first picks of a larger budget are those of a smaller one, as a core and a delta."""
    tokens = images(7, grid=grid, noise=1.0)
    policy, params = policy_of(variant)
    every = policy.select(params, tokens, 13).picks
    for kept in (grid.tiles, grid.tiles + 2):
        picks = every[:, :kept]
        assert torch.equal(policy.select(params, tokens, kept).picks, picks)
        more = policy.select_given(params, tokens, 13 - kept, given(tokens, picks))
        assert torch.equal(more, every[:, kept:])


NOT_NESTED = ("holov", "prunesid", "prumerge_plus", "visionzip", "dart", "sparsevlm")
"""Policies whose picks at K are not the first of those at a larger K."""


@pytest.mark.parametrize("variant", BASES)
def test_given_tokens_are_not_picked_again(variant: str) -> None:
    tokens = images(8, grid=Grid(3, 4, tiles=3))
    policy, params = policy_of(variant)
    kept = torch.tensor([[3, 20, 9], [30, 1, 2]])
    more = policy.select_given(params, tokens, 9, given(tokens, kept))
    assert all(row.unique().numel() == 12 for row in torch.cat([kept, more], dim=1))
    if policy.continuation is None and policy.name not in NOT_NESTED:
        for image, order in enumerate(policy.select_picks(params, tokens, 13)):
            others = [pick for pick in order.tolist() if pick not in kept[image].tolist()]
            assert more[image].tolist()[:5] == others[:5]


@pytest.mark.parametrize("policy", ["mmtok", "cdpruner", "trim"])
def test_padding_of_words_and_segments_is_not_read(policy: str) -> None:
    tokens = images(2)
    words, instruction = tokens.require_words(), tokens.require_instruction()
    unread = torch.zeros(2, 3, dtype=torch.bool)

    def padded(rows: Tensor) -> Tensor:
        return torch.cat([rows, torch.full_like(rows[:, :1], torch.nan).expand(-1, 3, -1)], 1)

    used = torch.cat([instruction.segments, unread], dim=1)
    more = replace(
        tokens,
        words=Words(padded(words.embeddings), torch.cat([words.used, unread], dim=1)),
        instruction=replace(instruction, text=padded(instruction.text), segments=used),
    )
    assert torch.equal(run(policy, more, 9).picks, run(policy, tokens, 9).picks)


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_the_page_on_base_policies_has_a_row_and_a_paragraph_of_each(name: str) -> None:
    policy = BASE_POLICIES[name]
    assert all(field.description for field in type(policy.default_params).model_fields.values())
    page = (Path(__file__).parents[2] / "docs/base-policies.md").read_text(encoding="utf-8")
    row = next(line.split(" | ") for line in page.splitlines() if line.startswith(f"| `{name}` |"))
    assert row[2] == (", ".join(f"`{need}`" for need in sorted(policy.needs)) or "-")
    asks = "yes" if policy.core is None else "optional"
    free = policy.needs.isdisjoint(INSTRUCTION_NEEDS)
    assert row[3].rstrip(" |") == ("-" if free else asks)
    assert f"**{name}**: {policy.doc} " in page
