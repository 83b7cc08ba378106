"""What the golden cases of base policies do not hold: exactly K rows, small images, given tokens.

Golden cases (``tests/golden``) are what published code or a paper's formulas give; what holds of
every selection is in ``tests/tpdsl/test_properties.py``.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tpdsl.samples import images, mapped, plain, state
from tests.tpdsl.soundness import BASES
from vllm_autoprune import Grid, Instruction, SelectionError, VisualTokens
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    INSTRUCTION_NEEDS,
    BasePolicy,
    Given,
    PolicyParams,
    ReferenceSelection,
)
from vllm_autoprune.tpdsl.prefix import RecordedPrefix
from vllm_autoprune.tpdsl.tokens import NextLayer, TowerStates, Words

USED = torch.ones(1, 1, dtype=torch.bool)


def params_of(name: str, **params: object) -> Any:
    return (
        BASE_POLICIES[name].call.model_validate({"name": name, "params": params}).params
    )


def select(
    name: str, tokens: VisualTokens, budget: int, **params: object
) -> ReferenceSelection:
    """A policy's reference selection with these parameters and the defaults of the others."""
    return BASE_POLICIES[name].select(params_of(name, **params), tokens, budget)


def prefix(
    count: int, text: list[bool], *, start: int = 1, **recorded: Tensor
) -> VisualTokens:
    """One image of ``count`` tokens with what is recorded of its sequence, no batch axis given."""
    rows = {name: tensor[None] for name, tensor in recorded.items()}
    language = RecordedPrefix(start, torch.tensor([text]), recorded=rows)
    return VisualTokens(torch.eye(count)[None], Grid(1, count), language=language)


def attended(attention: list[float], encoder: Tensor | None = None) -> VisualTokens:
    """Tokens that are unlike each other, with this attention."""
    rows = torch.eye(len(attention))
    known = torch.tensor([attention])
    return replace(plain(rows), cls_attention=known, encoder=encoder)


def dotted(dots: list[float], tiles: int = 1, sign: int = -1) -> VisualTokens:
    """Tokens with these dot products with the text; patches are one-hot, the projector doubles."""
    patches = torch.tensor(dots)[None, :, None] * torch.tensor([2.0, 0.0])
    hidden = torch.eye(len(dots))[None]
    return VisualTokens(
        hidden,
        Grid(1, len(dots) // tiles, tiles),
        instruction=Instruction(patches, torch.tensor([[[0.5, 9.0]]]), USED, sign),
        tower=TowerStates(hidden, hidden, project=lambda rows: 2 * rows),
    )


def outlying(
    strong: dict[int, float], count: int = 40, keys: Tensor | None = None
) -> VisualTokens:
    """Attention of 0.01 and a little less from token to token, but for those that stand out."""
    attention = 0.01 + 1e-5 * torch.arange(count).flip(0)
    for token, value in strong.items():
        attention[token] = value
    patches = torch.eye(count)[None]
    known = patches if keys is None else keys
    layer = NextLayer(attention[None], known)
    tower = TowerStates(patches, known, project=lambda rows: rows, next_layer=layer)
    return VisualTokens(patches, Grid(1, count), tower=tower)


DOTS = [0.5, -3.0, 2.0, -0.1, 7.0, -1.0]
# One position before three visual tokens, then three words; width 2. Two visual tokens are like the
# first word, one like the second, none like the third.
EMBEDDINGS = torch.tensor(
    [[9.0, 9.0], [2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [1.0, 0.0], [0.0, 0.5], [0.0, 0.0]]
)


def rated(
    rows: list[list[float]], embeddings: Tensor = EMBEDDINGS, padding: int = 0
) -> VisualTokens:
    """An image of three tokens and its words; two heads whose mean over the image is ``rows``."""
    edge = torch.ones(len(rows), 1)
    mean = torch.cat([edge, torch.tensor(rows), edge.expand(-1, len(rows))], dim=1)
    swing = torch.linspace(-0.05, 0.05, mean.shape[1])
    heads = torch.stack([mean + swing, mean - swing])
    text = [True] * (len(rows) - padding) + [False] * padding
    return prefix(3, text, embeddings=embeddings, attention=heads, states=embeddings)


RATED = [[0.2, 0.1, 0.3], [0.9, 0.9, 0.0], [0.9, 0.9, 0.0]]


def test_of_scope_what_adds_nothing_comes_by_attention() -> None:
    selection = select("scope", attended([0.2, 0.4, 0.1, 0.3], torch.ones(1, 4, 4)), 3)
    assert selection.picks.tolist() == [[1, 3, 0]]


def test_fastv_ranks_by_the_last_token_that_is_no_padding() -> None:
    # Means 0.1, 0.2, 0.25, 0.25: no head's own favourite, and the tie goes to the lower index.
    attention = torch.full((2, 3, 8), torch.nan)
    attention[0, 1] = torch.tensor([9.0, 0.1, 0.4, 0.0, 0.2, 9.0, 9.0, 9.0])
    attention[1, 1] = torch.tensor([9.0, 0.1, 0.0, 0.5, 0.3, 9.0, 9.0, 9.0])
    selection = select("fastv", prefix(4, [True, True, False], attention=attention), 3)
    assert selection.picks.tolist() == [[2, 3, 1]]


def test_of_dart_an_instruction_of_one_word_is_four_pivots_and_padding_is_none() -> (
    None
):
    # Twelve tokens ever more unlike the word behind them.
    tokens = [[1.0, 0.1 * i] for i in range(12)]
    fan = torch.tensor([*tokens, [-2.0, 0.0]])
    padded = torch.cat([fan, 100 * fan[:1]])
    for text, rows in (([True], fan), ([True, False], padded)):
        image = prefix(12, text, start=0, embeddings=rows)
        selection = select("dart", image, 5, space="embeddings")
        assert selection.picks.tolist() == [[11, 10, 9, 8, 0]]


def test_of_sparsevlm_padding_neither_rates_nor_counts_in_the_mean() -> None:
    selection = select(
        "sparsevlm",
        rated(
            [*RATED, [9.0, 0.0, 0.0]],
            torch.cat([EMBEDDINGS, torch.full((1, 2), 50.0)]),
            padding=1,
        ),
        2,
    )
    assert selection.picks.tolist() == [[2, 0]]


def test_of_sparsevlm_all_words_rate_where_none_stands_out() -> None:
    selection = select(
        "sparsevlm",
        rated(
            [[0.2, 0.1, 0.3], [0.0, 0.6, 0.1]],
            torch.cat([EMBEDDINGS[:4], torch.zeros(2, 2)]),
        ),
        2,
    )
    assert selection.picks.tolist() == [[1, 2]]


def test_of_prunesid_the_first_of_every_group_come_first() -> None:
    two_kinds = torch.tensor([[5.0, 0, 0, 0]] * 3 + [[0, 2, -3, 0]] * 2)
    selection = select(
        "prunesid",
        attended([0.5, 0.4, 0.3, 0.2, 0.1], two_kinds[None]),
        4,
        groups=2,
        threshold=100.0,
    )
    assert selection.picks.tolist() == [[0, 3, 1, 4]]


def test_bands_get_the_remainder_by_weight() -> None:
    # Means 4, 2, 1, 1 of 8: the remainder goes to the largest weights, not fractions.
    bands = [3.0, 5, 4, 4, 4, 4] + [2.0] * 6 + [1.0] * 12
    selection = select("holov", attended(bands), 7, bands=4)
    assert selection.picks.tolist() == [[1, 2, 3, 4, 6, 7, 12]]


def test_a_full_band_passes_its_share_on() -> None:
    # Fair shares of 5: 4, 0.75, 0.25; the first band has no room for more than 2.
    selection = select("holov", attended([16.0, 16, 3, 3, 1, 1]), 5, bands=3)
    assert selection.picks.tolist() == [[0, 1, 2, 3, 4]]


def test_norm_keeps_the_longest_and_the_first_of_equal_ones() -> None:
    selection = select(
        "norm", plain(torch.tensor([[0.0, 3], [-4, 0], [3, 0], [1, 1]])), 3
    )
    assert selection.picks.tolist() == [[1, 0, 2]]


def project_out(rows: Tensor, picks: list[int]) -> Tensor:
    """Rows ``(N, D)`` minus their projection on the picked ones."""
    basis, _ = torch.linalg.qr(rows[picks].T)
    return rows - rows @ basis @ basis.T


def log_determinant(kernel: Tensor, picks: list[int]) -> Tensor:
    return torch.logdet(kernel[picks][:, picks])


@pytest.mark.parametrize("relevance", [0.0, 2.0])
def test_pivoted_qr_picks_the_longest_residuals(relevance: float) -> None:
    tokens = replace(images(2, grid=Grid(5, 6), noise=1.0), known_cosine=None)
    picks = select("pivoted_qr", tokens, 9, relevance=relevance).picks
    for image, kept in enumerate(picks.tolist()):
        rows = tokens.features[image].double()
        read = tokens.require_instruction().relevance()[image].double()
        read = (read - read.min()) / (read.max() - read.min())
        for step, pick in enumerate(kept):
            lengths = project_out(rows, kept[:step]).norm(dim=1)
            assert pick == (lengths * (1 + relevance * read)).argmax()


def test_otprune_picks_by_the_determinant_of_its_kernel() -> None:
    tokens = images(2, grid=Grid(5, 6), noise=1.0)
    for image, kept in enumerate(select("otprune", tokens, 9).picks.tolist()):
        rows = tokens.features[image].double()
        units = rows / rows.norm(dim=0)
        gram = units @ units.T
        kernel = torch.eye(len(rows), dtype=torch.float64) + 0.01 * gram @ gram
        for step, pick in enumerate(kept):
            others = [token for token in range(len(rows)) if token not in kept[:step]]
            values = [
                log_determinant(kernel, [*kept[:step], other]) for other in others
            ]
            assert pick == others[int(torch.stack(values).argmax())]


def test_of_trim_a_single_row_is_a_patch() -> None:
    selection = select("trim", dotted(DOTS), 1)
    assert selection.picks.tolist() == [[1]]


def test_prumerge_plus_keeps_outliers_and_then_an_even_spread() -> None:
    # Six tokens: two outliers, and the middles of four equal parts of the 38 others.
    selection = select("prumerge_plus", outlying({30: 0.2, 7: 0.5}), 7)
    assert selection.picks.tolist() == [[7, 30, 4, 15, 24, 35]]


def test_prumerge_plus_keeps_the_strongest_of_more_outliers_than_rows() -> None:
    four = {5: 0.3, 9: 0.5, 20: 0.4, 21: 0.2}
    selection = select("prumerge_plus", outlying(four), 4)
    assert selection.picks.tolist() == [[9, 20, 5]]


def test_prumerge_without_plus_keeps_what_has_most_attention() -> None:
    selection = select("prumerge_plus", outlying({30: 0.2, 7: 0.5}), 5, plus=False)
    assert selection.picks.tolist() == [[7, 30, 0, 1]]


def assert_rows(
    selection: ReferenceSelection,
    tokens: VisualTokens,
    picked: object,
    extra: object = None,
) -> None:
    """Rows of the picks, and rows of no single token, are these."""
    width = tokens.features.shape[2]
    rows = selection.rows(tokens)[0, selection.picks[0]].float()
    torch.testing.assert_close(rows, torch.as_tensor(picked).view(-1, width))
    assert (selection.extra is None) == (extra is None)
    if selection.extra is not None:
        assert selection.extra.dtype == tokens.features.dtype
        wanted = torch.as_tensor(extra).view(-1, width)
        torch.testing.assert_close(
            selection.extra[0].float(), wanted, rtol=1e-5, atol=1e-5
        )


def test_visionzip_merges_into_the_most_similar_target_and_projects_cls() -> None:
    # Eight patches: attention falls from 3 on, keys point in two directions, patches count in
    # powers of two so that a sum says what is in it. The projector is a minus sign.
    keys = [[1.0, 0], [0, 2.0], [1, 0], [1, 0], [1, 0], [0, 1], [3, 0.1], [0.1, 3]]
    patches = (2.0 ** torch.arange(8))[None, :, None]
    cls = torch.full((1, 1, 1), 1000.0)
    tokens = VisualTokens(
        -patches,
        Grid(2, 4),
        cls_attention=torch.tensor([[0.1, 0.2, 0.3, 0.9, 0.8, 0.0, 0.05, 0.15]]),
        tower=TowerStates(
            patches, torch.tensor([keys]), project=lambda rows: -rows, cls=cls
        ),
    )
    # To 0: tokens 2 and 6; to 5: tokens 1 and 7.
    merged = [-8.0, -16.0, -(1 + (4 + 64) / 2), -(32 + (2 + 128) / 2)]
    assert_rows(select("visionzip", tokens, 4, contextual=2), tokens, merged)
    with_cls = select("visionzip", tokens, 4, contextual=1, patch_only=False)
    assert with_cls.picks.tolist() == [[3, 4, 0]]
    merged = [-8.0, -16.0, -(1 + (2 + 4 + 32 + 64 + 128) / 5)]
    assert_rows(with_cls, tokens, merged, extra=[-1000.0])


def test_every_tile_has_the_mean_of_its_own_others() -> None:
    # Three rows of tile 0, two of tile 1: two patches and one, and a mean each.
    tokens = dotted(DOTS, tiles=2)
    selection = select("trim", tokens, 5)
    assert_rows(
        selection,
        tokens,
        torch.eye(6)[[1, 5, 0]],
        extra=[[0.0, 0, 2, 0, 0, 0], [0, 0, 0, 1, 1, 0]],
    )


def test_prumerge_plus_adds_neighbours_unnormalised_and_sums_the_rest() -> None:
    """Or it keeps one token more in place of the dropped ones."""
    tokens = outlying({30: 0.2, 7: 0.5})
    attention = tokens.require_next_layer().attention[0]
    # Of 40 tokens every one has 32 neighbours: those of a one-hot key are the first others.
    position = torch.arange(40)
    last = attention.where(position == 32, 0.0)
    rows = torch.stack(
        [
            attention.where(position < 33, 0.0).where(position != 7, 1.0),
            attention.where(position < 32, 0.0).where(position != 30, 1.0) + last,
        ]
    )
    dropped = attention.where((position != 7) & (position != 30), 0.0)
    assert_rows(select("prumerge_plus", tokens, 3), tokens, rows, extra=dropped)
    selection = select("prumerge_plus", tokens, 2, drop_extra=True)
    assert_rows(selection, tokens, rows)


def test_of_fsr_the_scan_alone_takes_others() -> None:
    # Token 0 has all priority but a little; 3 is the farthest, and 1 and 2 are like it.
    tokens = replace(
        plain(torch.tensor([[1.0, 0.0], [0.1, 1.0], [0.2, 1.0], [0.0, 1.0]])),
        cls_attention=torch.tensor([[0.9, 0.02, 0.01, 0.03]]),
    )
    # 3 with priority 0.02 / 0.89 and 1 with half of that
    mixed = [[1.0, 0.0], [0.1 / 3, 1.0]]
    merged = select("fsr", tokens, 2, alpha=0.0, rho=0.9)
    assert_rows(merged, tokens, mixed)
    without_priority = select("fsr", tokens, 2, alpha=0.0, rho=0.9, kappa=9.0)
    assert_rows(without_priority, tokens, mixed)
    without_merging = select("fsr", tokens, 2, alpha=0.0, rho=0.9, kappa=0.0)
    assert_rows(without_merging, tokens, [[1.0, 0], [0, 1]])


def test_sparsevlm_recycles_pruned_tokens_in_at_most_half_of_k() -> None:
    tokens = rated(RATED)
    selection = select("sparsevlm", tokens, 2, recycle=True)
    assert_rows(selection, tokens, [[0.0, 0, 1]], extra=[[1.0, 0, 0]])
    selection = select("sparsevlm", tokens, 1, recycle=True)
    assert_rows(selection, tokens, [[0.0, 0, 1]])


def test_what_a_policy_appends_is_no_pick_of_a_core() -> None:
    tokens = dotted(DOTS)
    trim = BASE_POLICIES["trim"]
    assert trim.select_picks(trim.default_params, tokens, 3).tolist() == [[1, 5, 3]]


def test_the_published_splits_of_visionzip_and_bands_of_holov() -> None:
    splits = {192: (162, 30), 64: (54, 10), 32: (27, 5), 16: (14, 2), 1: (1, 0)}
    assert {k: params_of("visionzip").split(k) for k in splits} == splits
    bands = {(576, 64): 16, (576, 128): 8, (1296, 130): 17, (576, 2000): 1, (4, 1): 4}
    assert {shape: params_of("holov").count(*shape) for shape in bands} == bands


def test_an_input_that_the_model_lacks_is_an_error() -> None:
    without = images(7)
    tower = replace(without.require_tower(), cls=None)
    language = RecordedPrefix(1, torch.ones(2, 6, dtype=torch.bool), layers=32)
    without = replace(without, tower=tower, language=language)
    for policy, params, message in (
        ("visionzip", {"patch_only": False}, "patch_only"),
        ("prunesid", {"mode": "cls"}, "in mode 'patch'"),
        ("fastv", {"layer": 40}, r"reads layer 39.*layers 0 to 31.*'layer'"),
    ):
        with pytest.raises(SelectionError, match=message):
            select(policy, without, 4, **params)
    assert select("visionzip", without, 4).picks.shape == (2, 4)


def test_attention_is_of_the_published_layer() -> None:
    class Recorder(RecordedPrefix):
        def attention(self, layer: int) -> Tensor:
            raise KeyError(layer)

    for policy, layers, params, layer in (
        ("fastv", 32, {}, 1),
        ("pyramiddrop", 32, {}, 8),
        ("pyramiddrop", 3, {}, 0),
        ("pyramiddrop", 32, {"layer": 24}, 24),
    ):
        language = Recorder(1, torch.ones(1, 3, dtype=torch.bool), layers)
        with pytest.raises(KeyError, match=f"^{layer}$"):
            select(policy, replace(plain(torch.eye(4)), language=language), 2, **params)


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


@pytest.mark.parametrize(
    "variant", [variant for variant in BASES if selects_per_tile(variant)]
)
def test_tiles_are_selected_each_on_its_own(variant: str) -> None:
    tokens = images(4, batch=1, grid=Grid(3, 4, tiles=3), noise=1.0)
    size = tokens.grid.per_tile
    for tile in range(3):

        def cut(values: Tensor, tile: int = tile) -> Tensor:
            """The tile's rows of what has a row a token, or one a tile; the text is the same."""
            if values.shape[1] == tokens.count:
                return values[:, size * tile : size * (tile + 1)]
            return (
                values[:, tile : tile + 1]
                if values.shape[1] == tokens.grid.tiles
                else values
            )

        parts = {
            f.name: mapped(vars(tokens)[f.name], cut) for f in fields(VisualTokens)
        }
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
    "divprune",
    "divprune global",
    "cdpruner",
    "cen_divprune",
    "cen_divprune scaled",
    "cen_divprune global",
    "cen_cdpruner",
    "cen_cdpruner core",
    "cen_cdpruner global",
    "scope",
    "mmtok",
    "mmtok core",
    "idpruner",
    "idpruner relevance",
    "norm",
    "norm per tile",
    "pivoted_qr",
    "pivoted_qr relevance",
    "pivoted_qr global",
    "otprune",
]


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
        more = policy.select_given(
            params, tokens, 13 - kept, Given.after(tokens, picks)
        )
        assert torch.equal(more, every[:, kept:])


@pytest.mark.parametrize("policy", ["mmtok", "cdpruner", "trim"])
def test_padding_of_words_and_segments_is_not_read(policy: str) -> None:
    tokens = images(2)
    words = tokens.require_words()
    instruction = tokens.require_instruction()
    unread = torch.zeros(2, 3, dtype=torch.bool)

    def padded(rows: Tensor) -> Tensor:
        return torch.cat(
            [rows, torch.full_like(rows[:, :1], torch.nan).expand(-1, 3, -1)], 1
        )

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
    assert all(
        field.description for field in type(policy.default_params).model_fields.values()
    )
    page = (Path(__file__).parents[2] / "docs/base-policies.md").read_text(
        encoding="utf-8"
    )
    row = next(
        line.split(" | ")
        for line in page.splitlines()
        if line.startswith(f"| `{name}` |")
    )
    assert row[2] == (", ".join(f"`{need}`" for need in sorted(policy.needs)) or "-")
    asks = "yes" if policy.core is None else "optional"
    free = policy.needs.isdisjoint(INSTRUCTION_NEEDS)
    assert row[3].rstrip(" |") == ("-" if free else asks)
    assert f"**{name}**: {policy.doc} " in page
