"""Picks and rows of base policies on images so small that they are computed by hand.

Beside the golden cases (``tests/golden``), which are what published code or a paper's formulas give
on images of usual size.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.base_policies.samples import native, prefix, select, tower_of
from tests.tpdsl.samples import plain, with_relevance
from tests.tpdsl.samples import whole_images as images
from vllm_autoprune import Grid, Instruction, SelectionError, VisualTokens
from vllm_autoprune.tpdsl.atoms.scoring import sharpen
from vllm_autoprune.tpdsl.prefix import RecordedPrefix, attention_rows, last_token_rows
from vllm_autoprune.tpdsl.tokens import NextLayer, TowerStates

USED = torch.ones(1, 1, dtype=torch.bool)


def relevant(rows: Tensor, low: float, high: float, sign: int = 1) -> VisualTokens:
    """Tokens whose relevance rises evenly."""
    return with_relevance(plain(rows), torch.linspace(low, high, len(rows))[None], sign)


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


def outlying(strong: dict[int, float], count: int = 40, keys: Tensor | None = None) -> VisualTokens:
    """Attention of 0.01 and a little less from token to token, but for those that stand out."""
    attention = 0.01 + 1e-5 * torch.arange(count).flip(0)
    for token, value in strong.items():
        attention[token] = value
    patches = torch.eye(count)[None]
    known = patches if keys is None else keys
    layer = NextLayer(attention[None], known)
    tower = TowerStates(patches, known, project=lambda rows: rows, next_layer=layer)
    return VisualTokens(patches, Grid(1, count), tower=tower)


def heard(heads: list[list[float]], text: list[bool], at: int) -> VisualTokens:
    """One token, four of the image and the text; of the attention a single row is known."""
    attention = torch.full((len(heads), len(text), len(heads[0])), torch.nan)
    attention[:, at] = torch.tensor(heads)
    return prefix(4, text, attention=attention)


# Eight patches: attention falls from 3 on, keys point in two directions, patches count in powers of
# two so that a sum says what is in it.
KEYS = torch.tensor([[1.0, 0], [0, 2.0], [1, 0], [1, 0], [1, 0], [0, 1], [3, 0.1], [0.1, 3]])[None]
PATCHES = (2.0 ** torch.arange(8))[None, :, None]
ZIPPED = VisualTokens(
    -PATCHES,
    Grid(2, 4),
    cls_attention=torch.tensor([[0.1, 0.2, 0.3, 0.9, 0.8, 0.0, 0.05, 0.15]]),
    tower=TowerStates(PATCHES, KEYS, project=lambda rows: -rows, cls=torch.full((1, 1, 1), 1000.0)),
)
DOTS = [0.5, -3.0, 2.0, -0.1, 7.0, -1.0]
FOUR = {5: 0.3, 9: 0.5, 20: 0.4, 21: 0.2}
# Means 0.1, 0.2, 0.25, 0.25: no head's own favourite, and the tie goes to the lower index.
HEADS = [[9.0, 0.1, 0.4, 0.0, 0.2, 9.0, 9.0, 9.0], [9.0, 0.1, 0.0, 0.5, 0.3, 9.0, 9.0, 9.0]]
# One position before three visual tokens, then three words; width 2. Two visual tokens are like the
# first word, one like the second, none like the third.
EMBEDDINGS = torch.tensor(
    [[9.0, 9.0], [2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [1.0, 0.0], [0.0, 0.5], [0.0, 0.0]]
)
# Cosines 1e-6, 1e-6, 0: with the published 1e-6 the last has relevance 1 of 2, without it none at
# all, and then the second token would be next although it nearly repeats the first.
HARDLY = replace(
    plain(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])),
    instruction=Instruction(
        torch.tensor([[[1e-6, 1.0], [1e-6, 1.0], [0.0, 1.0]]]),
        torch.tensor([[[1.0, 0.0]]]),
        USED,
        sign=1,
    ),
)
# Two heads of width 2. Token 1 is longest by L2, token 2 by L1 over both heads.
HEAD_KEYS = torch.zeros(2, 6, 2)
HEAD_KEYS[0, 1 + 1], HEAD_KEYS[:, 1 + 2] = torch.tensor([3.0, 0.0]), 1.0
# One head of width 1: the score is the softmax of the keys, whatever the other rows say.
SEQUENCE = torch.tensor([[[5.0], [0.1], [0.9], [0.3], [0.7], [2.0]]])
LAST_ROW = attention_rows(torch.tensor([[[0.0], [1.0]]]), SEQUENCE)[:, 1:]


def rated(rows: list[list[float]]) -> VisualTokens:
    """The image and words of EMBEDDINGS; two heads whose mean over the image is ``rows``."""
    edge = torch.ones(len(rows), 1)
    mean = torch.cat([edge, torch.tensor(rows), edge.expand(-1, 3)], dim=1)
    swing = torch.linspace(-0.05, 0.05, mean.shape[1])
    heads = torch.stack([mean + swing, mean - swing])
    return prefix(3, [True] * 3, embeddings=EMBEDDINGS, attention=heads)


PICKS: dict[str, tuple[str, VisualTokens, int, dict[str, object], list[int]]] = {
    "a high cosine is relevant": (
        "cdpruner", relevant(torch.eye(8), -0.7, 0.7), 4, {}, [7, 6, 5, 4]),
    "a low cosine is relevant": (
        "cdpruner", relevant(torch.eye(8), -0.7, 0.7, -1), 4, {}, [0, 1, 2, 3]),
    "relevance has the published offset": ("cdpruner", HARDLY, 2, {}, [0, 2]),
    # Three directions exist: their most relevant tokens are 9, 10 and 11.
    "beyond the rank the rest is by relevance": (
        "cdpruner", relevant(torch.eye(3).repeat(4, 1), -0.9, 0.9), 8, {}, [11, 10, 9, 8, 7, 6,
        5, 4]),
    "equal tokens come by index": (
        "cdpruner", relevant(torch.ones(20, 4), 0, 0), 6, {}, [*range(6)]),
    "relevance decides among unusual tokens": (
        "cen_cdpruner", relevant(torch.eye(8), -0.7, 0.7), 3, {}, [7, 6, 5]),
    "the farthest from its nearest is first": (
        "divprune", plain(torch.tensor([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.5], [1.0, -0.1]])), 1,
        {}, [2]),
    "a single token is its own selection": ("divprune", plain(torch.ones(1, 4)), 1, {}, [0]),
    "ties go to the lower index": ("idpruner", attended([0.2] * 5), 4, {}, [0, 1, 2, 3]),
    "a balance of 1 is importance alone": (
        "idpruner", attended([0.2, 0.4, 0.1, 0.3]), 3, {"balance": 1.0}, [1, 3, 0]),
    "what adds nothing comes by attention": (
        "scope", attended([0.2, 0.4, 0.1, 0.3], torch.ones(1, 4, 4)), 3, {}, [1, 3, 0]),
    "bands of an uneven number of tokens": (
        "holov", attended([1.0] * 7), 3, {"bands": 3}, [0, 3, 5]),
    "the most attended of each band": (
        "holov", attended([0.1, 0.9, 0.5, 0.6, 0.2, 0.3]), 3, {"bands": 2}, [1, 3, 2]),
    "the last token's attention": ("fastv", heard(HEADS, [True] * 3, 2), 3, {}, [2, 3, 1]),
    "the last token that is no padding": (
        "fastv", heard(HEADS, [True, True, False], 1), 3, {}, [2, 3, 1]),
    "attention from query and keys": (
        "pyramiddrop", prefix(4, [True], attention=LAST_ROW), 3, {}, [1, 3, 2]),
    "strength is the L1 length over all heads": (
        "dart", prefix(4, [True], keys=HEAD_KEYS, normed=torch.ones(6, 2)), 1, {}, [2]),
    "raters alone count": (
        "sparsevlm", rated([[0.2, 0.1, 0.3], [0.9, 0.9, 0.0], [0.9, 0.9, 0.0]]), 2, {}, [2, 0]),
    "the lowest dot products win with CLIP": ("trim", dotted(DOTS), 4, {}, [1, 5, 3]),
    "the sign turns the order around": ("trim", dotted(DOTS, sign=1), 4, {}, [4, 2, 0]),
    "neither side is normalised": ("trim", dotted([-1.0, -2.0, 3.0]), 2, {}, [1]),
    "a single row is a patch": ("trim", dotted(DOTS), 1, {}, [1]),
    "equal dots go to the lower index": ("trim", dotted([1.0] * 4), 3, {}, [0, 1]),
    # Left after 3 and 4: 0 1 2 5 6 7; every third of them is a target.
    "dominant patches, then spaced targets": (
        "visionzip", ZIPPED, 4, {"contextual": 2}, [3, 4, 0, 5]),
    "[CLS] takes the place of a patch": (
        "visionzip", ZIPPED, 4, {"contextual": 1, "patch_only": False}, [3, 4, 0]),
    # Six tokens: two outliers, and the middles of four equal parts of the 38 others.
    "outliers, then an even spread": (
        "prumerge_plus", outlying({30: 0.2, 7: 0.5}), 7, {}, [7, 30, 4, 15, 24, 35]),
    "more outliers than rows": ("prumerge_plus", outlying(FOUR), 4, {}, [9, 20, 5]),
    "without plus attention decides": (
        "prumerge_plus", outlying({30: 0.2, 7: 0.5}), 5, {"plus": False}, [7, 30, 0, 1]),
}  # fmt: skip
"""Fact -> policy, image, K and parameters; picks."""


@pytest.mark.parametrize("fact", PICKS)
def test_picks(fact: str) -> None:
    policy, tokens, budget, params, picks = PICKS[fact]
    assert select(policy, tokens, budget, **params).picks.tolist() == [picks]


NATIVE: dict[str, tuple[str, VisualTokens, int | None, dict[str, object], list[int]]] = {
    "band by band": ("holov", attended([0.1, 0.9, 0.5, 0.6, 0.2, 0.3]), 3, {"bands": 2}, [1, 2, 3]),
    "one stage in raster order": (
        "pyramiddrop", prefix(4, [True], attention=LAST_ROW), 3, {}, [1, 2, 3]),
    "patches in raster order, then the mean": ("trim", dotted(DOTS), 4, {}, [1, 3, 5, -1]),
    "as many patches as outliers": (
        "trim", dotted([{4: -6.0, 17: -7.0}.get(i, 0.1 * (i % 5)) for i in range(30)]), None, {},
        [4, 17, -1]),
    # Dominant: [CLS] and the two strongest patches, in raster order. Then one target: 0.
    "[CLS], dominant, contextual": ("visionzip", ZIPPED, 4, {"contextual": 1}, [-1, 3, 4, 0]),
    # 4 of 40 stand out: the stride is int(10 / 3) = 3, and the last token is never reached.
    "samples beside outliers": ("prumerge_plus", outlying(FOUR), None, {}, [
        9, 20, 5, 21, *(i for i in range(0, 39, 3) if i not in FOUR), -1]),
    "outliers alone": ("prumerge_plus", outlying(FOUR), None, {"plus": False}, [9, 20, 5, 21, -1]),
    # Stride 40 // 6 = 6: 0, 6, 12, 18, ... of which four are free to take.
    "samples from the top, as EffiVLM-Bench": (
        "prumerge_plus", outlying({5: 0.3, 9: 0.5}), 6, {}, [9, 5, 0, 6, 12, 18, -1]),
}  # fmt: skip
"""Fact -> policy, image, K or none, and parameters; indices of the published code."""


@pytest.mark.parametrize("fact", NATIVE)
def test_published_indices(fact: str) -> None:
    policy, tokens, budget, params, indices = NATIVE[fact]
    assert native(policy, tokens, budget, **params).indices[0].tolist() == indices


@pytest.mark.parametrize(
    ("policy", "tokens", "budget", "params", "message"),
    [
        ("holov", attended([1.0] * 6), None, {}, "no count of its own"),
        ("visionzip", ZIPPED, None, {}, "no count of its own"),
        ("trim", dotted(DOTS), 1, {}, "keeps no patch"),
        ("trim", dotted([1.0] * 20), None, {}, "keeps no patch"),
        ("prumerge_plus", outlying({}), None, {}, "0% of the tokens are outliers"),
    ],
)
def test_where_the_published_code_fails_the_error_says_so(
    policy: str, tokens: VisualTokens, budget: int | None, params: dict[str, object], message: str
) -> None:
    with pytest.raises(SelectionError, match=message):
        native(policy, tokens, budget, **params)


def test_an_input_that_the_model_lacks_is_an_error() -> None:
    without = replace(images(7), tower=replace(tower_of(images(7)), cls=None))
    for policy, params, message in (
        ("visionzip", {"patch_only": False}, "patch_only"),
        ("prunesid", {"mode": "cls"}, "use mode 'patch'"),
        ("fastv", {"layer": 40}, r"reads layer 39.*layers 0 to 31.*'layer'"),
    ):
        with pytest.raises(SelectionError, match=message):
            select(policy, without, 4, **params)
    assert select("visionzip", without, 4).picks.shape == (2, 4)


class _LayerRecorder(RecordedPrefix):
    """Names the layer whose attention is read."""

    def attention(self, layer: int) -> Tensor:
        raise KeyError(layer)


@pytest.mark.parametrize(
    ("policy", "layers", "params", "layer"),
    [
        ("fastv", 32, {}, 1),
        ("fastv", 32, {"layer": 1}, 0),
        ("pyramiddrop", 32, {}, 8),
        ("pyramiddrop", 3, {}, 0),
        ("pyramiddrop", 32, {"layer": 24}, 24),
    ],
)
def test_attention_is_of_the_published_layer(
    policy: str, layers: int, params: dict[str, object], layer: int
) -> None:
    recorder = _LayerRecorder(1, torch.ones(1, 3, dtype=torch.bool), layers)
    with pytest.raises(KeyError, match=f"^{layer}$"):
        select(policy, replace(plain(torch.eye(4)), language=recorder), 2, **params)


def test_rows_are_taken_where_each_sequence_ends() -> None:
    rows = torch.arange(2 * 1 * 3 * 2.0).reshape(2, 1, 3, 2)
    text = torch.tensor([[True, True, True], [True, False, False]])
    assert last_token_rows(rows, text).tolist() == [[[4.0, 5.0]], [[6.0, 7.0]]]


def test_theta_sharpens_relevance() -> None:
    quality = torch.tensor([0.0, 0.5, 1.0])
    assert torch.equal(sharpen(quality, None), quality)
    torch.testing.assert_close(sharpen(quality, 0.5), torch.exp(0.5 * quality))


class TestMergedRows:
    """Rows of the picks with others merged in, and rows that no single token stands for."""

    def test_each_other_token_goes_to_its_most_similar_target_as_part_of_a_mean(self) -> None:
        merged = select("visionzip", ZIPPED, 4, contextual=2).merged
        assert merged is not None
        # To 0: tokens 2 and 6; to 5: tokens 1 and 7. The projector here is a minus sign.
        rows = [8, 16, 1 + (4 + 64) / 2, 32 + (2 + 128) / 2]
        assert merged[0, :, 0].tolist() == [-row for row in rows]

    def test_a_target_without_members_is_unchanged(self) -> None:
        keys = KEYS.clone()
        keys[0, 5] = torch.tensor([-1.0, -1.0])  # target 0 is nearer to every other token
        lonely = replace(ZIPPED, tower=replace(tower_of(ZIPPED), keys=keys))
        merged = select("visionzip", lonely, 4, contextual=2).merged
        assert merged is not None
        assert merged[0, 2:, 0].tolist() == [-(1 + (2 + 4 + 64 + 128) / 4), -32]

    def test_only_merged_rows_are_projected_again(self) -> None:
        other = replace(ZIPPED, features=ZIPPED.features + 0.5)
        merged = select("visionzip", other, 4, contextual=2).merged
        assert merged is not None and merged[0, :2, 0].tolist() == [-7.5, -15.5]

    def test_the_row_of_cls_is_projected_too(self) -> None:
        extra = select("visionzip", ZIPPED, 4, contextual=1, patch_only=False).extra
        assert extra is not None and extra.tolist() == [[[-1000.0]]]
        features = native("visionzip", ZIPPED, 4, contextual=1).features
        mean = (2 + 4 + 32 + 64 + 128) / 5
        assert features is not None and features[0][:, 0].tolist() == [1000, 8, 16, 1 + mean]

    def test_prunesid_projects_the_row_of_cls(self) -> None:
        tokens = images(1)
        tower = tower_of(tokens)
        assert tower.cls is not None
        extra = select("prunesid", tokens, 12, mode="cls").extra
        torch.testing.assert_close(extra, tower.project(tower.cls))

    def test_every_tile_has_the_mean_of_its_own_others(self) -> None:
        # Three rows of tile 0, two of tile 1: two patches and one, and a mean each.
        actual = select("trim", dotted(DOTS, tiles=2), 5)
        assert actual.picks.tolist() == [[1, 5, 0]] and actual.extra is not None
        assert actual.extra[0].tolist() == [[0, 0, 2, 0, 0, 0], [0, 0, 0, 1, 1, 0]]

    def test_outliers_are_counted_over_all_tiles(self) -> None:
        dots = [-6.0 if token in (2, 3, 5, 7) else 0.1 * (token % 5) for token in range(60)]
        # Four of 60 stand out: int(30 * 4 / 60) = 2 of each tile, whether they do there or not.
        indices = native("trim", dotted(dots, tiles=2)).indices[0].tolist()
        assert indices[:3] == [2, 3, -1] and len(indices) == 6 and indices[-1] == -1

    def test_the_mean_of_a_half_precision_tower_is_made_in_float32(self) -> None:
        large = torch.full((1, 400, 1), 300.0, dtype=torch.float16)  # their sum would overflow
        states = TowerStates(large, large, project=lambda rows: rows)
        half = replace(dotted([0.0, *[1.0] * 399]), features=large, tower=states)
        extra = select("trim", half, 2).extra
        assert extra is not None and extra.dtype == torch.float16 and extra.item() == 300

    def test_neighbours_are_added_unnormalised_and_the_rest_is_summed(self) -> None:
        # Of 40 tokens every one has 32 neighbours: those of a one-hot key are the first others.
        tokens = outlying({30: 0.2, 7: 0.5})
        actual = select("prumerge_plus", tokens, 3)
        attention = tokens.require_next_layer().attention[0]
        row = attention.clone()
        row[33:], row[7] = 0, 1  # the neighbours of token 7: 0 to 32, less itself
        extra = attention.clone()
        extra[[7, 30]] = 0
        assert actual.picks.tolist() == [[7, 30]]
        assert actual.merged is not None and actual.extra is not None
        torch.testing.assert_close(actual.merged[0, 0], row)
        torch.testing.assert_close(actual.extra[0, 0], extra)
        published = native("prumerge_plus", tokens, 2).features
        assert published is not None
        torch.testing.assert_close(published[0][0], row)

    def test_drop_extra_keeps_one_token_more(self) -> None:
        actual = select("prumerge_plus", images(1), 9, drop_extra=True)
        assert actual.picks.shape == (2, 9) and actual.extra is None

    def test_fsr_changes_rows_of_the_scan_alone(self) -> None:
        # Token 0 has all priority but a little; 3 is the farthest, and 1 and 2 are like it.
        rows = torch.tensor([[1.0, 0.0], [0.1, 1.0], [0.2, 1.0], [0.0, 1.0]])
        tokens = replace(plain(rows), cls_attention=torch.tensor([[0.9, 0.02, 0.01, 0.03]]))
        params = {"alpha": 0.0, "rho": 0.9}
        actual = select("fsr", tokens, 2, **params)
        assert actual.picks.tolist() == [[0, 3]] and actual.merged is not None
        phi = [(a - 0.01) / 0.89 for a in (0.9, 0.02, 0.01, 0.03)]
        mixed = (phi[3] * rows[3] + phi[1] * rows[1]) / (phi[3] + phi[1])  # one token of the scan
        torch.testing.assert_close(actual.merged[0], torch.stack([rows[0], mixed]))
        assert select("fsr", tokens, 2, kappa=0.0, **params).merged is None
        # However many may merge, picks do not; token 2 does, with no priority.
        every = select("fsr", tokens, 2, kappa=9.0, **params)
        assert every.merged is not None
        torch.testing.assert_close(every.merged, actual.merged)
