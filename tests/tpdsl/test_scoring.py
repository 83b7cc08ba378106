"""Signals, fusion, kernels and partitions, with values computed by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tpdsl.samples import call, images, means, plain
from vllm_autoprune import Grid, Instruction, VisualTokens
from vllm_autoprune.ops.similarity import spherical_kmeans
from vllm_autoprune.tpdsl.atoms.pools import run_partition
from vllm_autoprune.tpdsl.atoms.scoring import (
    run_fusion,
    run_kernel,
    run_signal,
)

E1, E2 = [1.0, 0.0], [0.0, 1.0]


def score(
    name: str, tokens: VisualTokens, picks: Tensor | None = None, **parameters: object
) -> Tensor:
    first = torch.zeros(tokens.batch, 1, dtype=torch.int64)
    return run_signal(call(name, **parameters), tokens, first if picks is None else picks)


def rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


@means("instruction_guided_visual_relevance")
class TestRelevance:
    NAME = "instruction_guided_visual_relevance"

    def instruction(self, sign: int = 1, used: tuple[bool, ...] = (True, True)) -> VisualTokens:
        patches = torch.tensor([[[2.0, 0.0], [0.0, 0.5], [3.0, 4.0], [0.0, 0.0]]])
        text = torch.tensor([[[7.0, 0.0], [0.0, 0.1]]])
        given = Instruction(patches, text, torch.tensor([used]), sign)
        return VisualTokens(torch.ones(1, 4, 3), Grid(1, 4), instruction=given)

    def test_mean_over_segments_by_hand(self) -> None:
        # Cosines with the two segments: (1, 0), (0, 1), (0.6, 0.8); a zero patch has none.
        assert rounded(score(self.NAME, self.instruction())[0]) == [0.5, 0.5, 0.7, 0.0]

    def test_max_over_segments_by_hand(self) -> None:
        actual = score(self.NAME, self.instruction(), reduce="max")
        assert rounded(actual[0]) == [1.0, 1.0, 0.8, 0.0]

    @pytest.mark.parametrize("reduce", ["mean", "max"])
    def test_padding_is_not_a_segment(self, reduce: str) -> None:
        actual = score(self.NAME, self.instruction(used=(True, False)), reduce=reduce)
        assert rounded(actual[0]) == [1.0, 0.0, 0.6, 0.0]

    @pytest.mark.parametrize("reduce", ["mean", "max"])
    def test_relevance_is_zero_without_an_instruction(self, reduce: str) -> None:
        actual = score(self.NAME, self.instruction(used=(False, False)), reduce=reduce)
        assert actual.abs().tolist() == [[0, 0, 0, 0]]

    @pytest.mark.parametrize(
        ("sign", "tower", "factor"),
        [("auto", 1, 1), ("auto", -1, -1), ("+", -1, 1), ("-", 1, -1), ("-", -1, -1)],
    )
    def test_the_sign_is_the_towers_unless_the_state_says_otherwise(
        self, sign: str, tower: int, factor: int
    ) -> None:
        actual = score(self.NAME, self.instruction(tower, (True, False)), sign=sign)
        assert rounded(factor * actual[0]) == [1.0, 0.0, 0.6, 0.0]


@means("attention_proxy_saliency")
class TestAttention:
    NAME = "attention_proxy_saliency"

    def attention(self, *values: float) -> VisualTokens:
        return VisualTokens(
            torch.ones(1, len(values), 2), Grid(1, len(values)), torch.tensor([values])
        )

    def test_the_row_of_cls_is_taken_as_it_is(self) -> None:
        assert rounded(score(self.NAME, self.attention(0.1, 0.64, 0.26))[0]) == [0.1, 0.64, 0.26]

    def test_temperature_flattens_by_hand(self) -> None:
        actual = score(self.NAME, self.attention(0.04, 0.64, 0.36), temperature=2.0)
        assert rounded(actual[0]) == [0.2, 0.8, 0.6]

    def test_rounding_below_zero_does_not_make_nan(self) -> None:
        actual = score(self.NAME, self.attention(-1e-9, 0.5), temperature=2.0)
        assert rounded(actual[0]) == [0.0, 0.7071]

    def test_without_attention_closeness_to_the_mean_token_by_hand(self) -> None:
        tokens = plain(torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 2.0]]))
        # The mean token points along (1, 1), so closeness is (x + y) / sqrt 2.
        weights = [math.exp(value / math.sqrt(2)) for value in (2, 1, 3)]
        expected = [round(weight / sum(weights), 4) for weight in weights]
        assert rounded(score(self.NAME, tokens)[0]) == expected


@means("spatial_centrality_prior")
class TestCentrality:
    NAME = "spatial_centrality_prior"

    def test_by_hand(self) -> None:
        # Rows at -0.5 and 0.5, columns at -2/3, 0, 2/3; 2 sigma^2 is 0.5 for the default.
        actual = score(self.NAME, plain(torch.ones(6, 2), Grid(2, 3)))[0]
        corner, middle = math.exp(-(0.25 + 4 / 9) / 0.5), math.exp(-0.25 / 0.5)
        expected = [round(v, 4) for v in (corner, middle, corner) * 2]
        assert rounded(actual) == expected

    def test_sigma_widens_the_centre(self) -> None:
        tokens = plain(torch.ones(25, 2), Grid(5, 5))
        narrow, wide = score(self.NAME, tokens), score(self.NAME, tokens, sigma=2.0)
        assert narrow[0, 12] == wide[0, 12] == 1.0
        assert bool((wide > narrow).sum() == 24)

    def test_every_tile_has_its_own_centre(self) -> None:
        actual = score(self.NAME, plain(torch.ones(27, 2), Grid(3, 3, tiles=3)))[0]
        assert actual.reshape(3, 9).argmax(dim=1).tolist() == [4, 4, 4]


@means("redundancy_density_penalty")
class TestRedundancy:
    NAME = "redundancy_density_penalty"

    def test_by_hand(self) -> None:
        # Cosines: 0 with 1: 1, 0 with 2: 0, 0 with 3: -1, 2 with the others: 0.
        tokens = plain(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
        assert rounded(score(self.NAME, tokens, m=1)[0]) == [-1.0, -1.0, 0.0, 0.0]
        assert rounded(score(self.NAME, tokens, m=2)[0]) == [-0.5, -0.5, 0.0, 0.5]

    def test_tokens_of_other_tiles_do_not_count(self) -> None:
        tokens = plain(torch.tensor([E1, E2, E1, E1]), Grid(1, 2, tiles=2))
        assert rounded(score(self.NAME, tokens, m=1)[0]) == [0.0, 0.0, -1.0, -1.0]


@means("local_contrast_saliency")
class TestContrast:
    NAME = "local_contrast_saliency"

    @given(seed=st.integers(0, 1000), radius=st.integers(1, 3))
    def test_it_is_the_mean_of_pairwise_cosines(self, seed: int, radius: int) -> None:
        tokens = images(seed, batch=1, grid=Grid(4, 5, tiles=2))
        actual = score(self.NAME, tokens, radius=radius)[0].reshape(2, 20)
        place = [(i // 5, i % 5) for i in range(20)]
        for tile, cosine in enumerate(tokens.tile_cosine):
            for i, (y, x) in enumerate(place):
                near = [
                    float(cosine[i, j])
                    for j, (v, u) in enumerate(place)
                    if j != i and max(abs(v - y), abs(u - x)) <= radius
                ]
                expected = 1 - sum(near) / len(near)
                assert float(actual[tile, i]) == pytest.approx(expected, abs=1e-5)


@means("visual_token_norm_saliency")
def test_length_is_euclidean_or_the_sum_of_absolute_values() -> None:
    tokens = plain(torch.tensor([[3.0, -4.0], [0.0, 2.0]]))
    assert score("visual_token_norm_saliency", tokens).tolist() == [[5, 2]]
    assert score("visual_token_norm_saliency", tokens, p=1).tolist() == [[7, 2]]


@means("cluster_centroid_representativeness")
def test_cluster_centre_is_most_similar_to_its_centroid() -> None:
    angles = torch.tensor([-10.0, 0.0, 10.0, 170.0, 190.0]).deg2rad()
    tokens = plain(torch.stack([angles.cos(), angles.sin()], dim=1))
    actual = score("cluster_centroid_representativeness", tokens, clusters=2)
    # Centroids point to 0 and 180 degrees.
    rim = math.cos(math.radians(10))
    assert actual[0].tolist() == pytest.approx([rim, 1.0, rim, rim, rim], abs=1e-6)


class TestGlobalMean:
    NAME = "global_mean_representativeness"
    TOKENS = plain(
        torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 5.0], [0.0, 3.0]]), Grid(1, 2, tiles=2)
    )

    @means("global_mean_representativeness")
    def test_by_hand(self) -> None:
        # Directions add up to (1, 3), whatever the lengths.
        along = [1 / math.sqrt(10), *[3 / math.sqrt(10)] * 3]
        assert score(self.NAME, self.TOKENS)[0].tolist() == pytest.approx(along)

    def test_of_each_tile_by_hand(self) -> None:
        half = 1 / math.sqrt(2)
        actual = score(self.NAME, self.TOKENS, scope="tile")
        assert actual[0].tolist() == pytest.approx([half, half, 1.0, 1.0])


@means("channel_entropy_informativeness")
def test_entropy_is_largest_where_all_channels_are_alike() -> None:
    tokens = plain(torch.tensor([[1.0, -1.0, 1.0, -1.0], [0.0, 0.0, 0.0, 50.0], [0, 0, 0, 0]]))
    actual = score("channel_entropy_informativeness", tokens)[0].tolist()
    assert actual == pytest.approx([1.0, 0.0, 1.0], abs=1e-6)
    # Two channels with |x| = ln 3 and 0 have shares 3/4 and 1/4.
    two = plain(torch.tensor([[-math.log(3), 0.0]]))
    expected = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert float(score("channel_entropy_informativeness", two)) == pytest.approx(expected)
    warm = plain(torch.tensor([[2 * math.log(3), 0.0]]))
    actual = score("channel_entropy_informativeness", warm, temperature=2.0)[0].tolist()
    assert actual == pytest.approx([expected])


@means("reference_selection_confidence")
def test_confidence_decreases_with_pick_order() -> None:
    tokens, picks = plain(torch.eye(5)), torch.tensor([[3, 0, 4, 1]])
    actual = score("reference_selection_confidence", tokens, picks)
    assert actual.tolist() == [[0.75, 0.25, 0.0, 1.0, 0.5]]
    raised = score("reference_selection_confidence", tokens, picks, floor=0.5)
    assert raised.tolist() == [[0.875, 0.625, 0.5, 1.0, 0.75]]


class TestDetail:
    NAME = "local_detail_energy"

    @means("local_detail_energy")
    def test_it_is_the_variance_of_directions_in_the_window(self) -> None:
        tokens = images(3, grid=Grid(4, 5, tiles=2))
        actual = score(self.NAME, tokens, radius=1)
        unit = tokens.unit.reshape(2, 2, 4, 5, -1)
        for image, tile, y, x in ((0, 0, 0, 0), (1, 1, 2, 3), (0, 1, 3, 4)):
            window = unit[image, tile, max(0, y - 1) : y + 2, max(0, x - 1) : x + 2]
            rows = window.reshape(-1, window.shape[-1])
            variance = (rows - rows.mean(dim=0)).square().sum(dim=1).mean()
            here = actual.reshape(2, 2, 4, 5)[image, tile, y, x]
            assert float(here) == pytest.approx(float(variance), abs=1e-5)


DISSIMILARITY = "mean_dissimilarity_saliency"
FIRST = torch.zeros(1, 1, dtype=torch.int64)
"""Two tokens of one direction and one across: mean cosines of 1/2, 1/2 and 0."""


def dissimilarity(tokens: VisualTokens, **parameters: object) -> list[float]:
    values: list[float] = run_signal(call(DISSIMILARITY, **parameters), tokens, FIRST)[0].tolist()
    return values


@means(DISSIMILARITY)
def test_dissimilarity_of_scaled_channels() -> None:
    rows = torch.tensor([[1e3, 1.0], [2e3, -3.0], [1e3, -1.0]])
    scaled = rows / (rows - rows.mean(dim=0)).square().mean(dim=0).sqrt()
    unit = scaled / scaled.norm(dim=1, keepdim=True)
    g = -((unit @ unit.T).sum(dim=1) - 1) / 2
    expected = ((g - g.min()) / (g.max() - g.min())).tolist()
    assert dissimilarity(plain(rows), scale_variance=True) == pytest.approx(expected, abs=1e-4)
    assert dissimilarity(plain(rows)) != pytest.approx(expected, abs=0.1)


def test_tiles_are_compared_as_the_view_says() -> None:
    grid = Grid(3, 4, tiles=3)
    tokens = images(2, batch=1, grid=grid)
    alone = [
        dissimilarity(plain(tokens.features[0, 12 * tile : 12 * tile + 12])) for tile in range(3)
    ]
    assert dissimilarity(tokens) == pytest.approx(
        [value for tile in alone for value in tile], abs=1e-6
    )
    whole = dataclasses.replace(tokens, tile_scope="global")
    assert dissimilarity(whole) == pytest.approx(dissimilarity(plain(tokens.features[0])), abs=1e-6)


PRODUCT = call("weighted_product_fusion")
PICKS = torch.tensor([[2, 0]])


@means("weighted_product_fusion")
def test_product_of_powers_by_hand() -> None:
    first = torch.tensor([[0.0, 5.0, 10.0]])  # normalised: 0, 0.5, 1
    second = torch.tensor([[8.0, 4.0, 0.0]])  # normalised: 1, 0.5, 0
    g = run_fusion(PRODUCT, [first, second], [2.0, 0.5], PICKS)
    expected = [0.001**2, 0.5**2 * 0.5**0.5, 0.001**0.5]
    assert g[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_a_signal_of_weight_zero_changes_nothing() -> None:
    one, other = torch.rand(2, 9), torch.rand(2, 9)
    with_it = run_fusion(PRODUCT, [one, other], [0.7, 0.0], PICKS)
    assert torch.equal(with_it, run_fusion(PRODUCT, [one], [0.7], PICKS))


def test_nan_is_not_hidden_by_the_floor() -> None:
    g = run_fusion(PRODUCT, [torch.tensor([[0.0, torch.nan], [0.0, 1.0]])], [1.0], PICKS)
    assert not g[0].isfinite().all() and g[1].isfinite().all()


@means("weighted_sum_fusion")
def test_sum_by_hand() -> None:
    first = torch.tensor([[0.0, 5.0, 10.0]])
    second = torch.tensor([[8.0, 4.0, 0.0]])
    g = run_fusion(call("weighted_sum_fusion"), [first, second], [2.0, 0.5], PICKS)
    assert g.tolist() == [[0.5, 1.25, 2.0]]


@means("reference_confidence_weighted_product_fusion")
def test_confidence_raises_the_first_pick_most_by_hand() -> None:
    fusion = call("reference_confidence_weighted_product_fusion", beta=0.5)
    signal = torch.tensor([[0.0, 5.0, 10.0]])
    g = run_fusion(fusion, [signal], [1.0], PICKS)
    # Token 2 was picked first: confidence 1; token 0 second of two: 0.5; token 1 not at all.
    assert g[0].tolist() == pytest.approx([0.001 * 1.25, 0.5, 1.5], rel=1e-5)
    none = call("reference_confidence_weighted_product_fusion", beta=0.0)
    assert torch.equal(
        run_fusion(none, [signal], [1.0], PICKS), run_fusion(PRODUCT, [signal], [1.0], PICKS)
    )


TOKENS = plain(torch.tensor([[1.0, 0.0], [3.0, 4.0], [-2.0, 0.0]]))
G = torch.tensor([[0.1, 0.3, 0.5]])


def approx(rows: list[list[float]]) -> list[object]:
    return [pytest.approx(row, abs=1e-6) for row in rows]


@means("pairwise_cosine_kernel")
def test_cosine_kernel_ignores_quality() -> None:
    kernel = run_kernel(call("pairwise_cosine_kernel"), TOKENS, G)
    assert kernel.similarity[0].tolist() == approx([[1, 0.6, -1], [0.6, 1, -0.6], [-1, -0.6, 1]])
    assert kernel.quality.tolist() == [[1, 1, 1]]


def test_opposite_tokens_may_count_as_unrelated() -> None:
    kernel = run_kernel(call("pairwise_cosine_kernel", clamp_negative=True), TOKENS, G)
    assert kernel.similarity[0].tolist() == approx([[1, 0.6, 0], [0.6, 1, 0], [0, 0, 1]])


@means("runtime_conditional_similarity_kernel")
def test_the_conditional_kernel_scales_by_normalised_quality() -> None:
    kernel = run_kernel(call("runtime_conditional_similarity_kernel", eps=1e-3), TOKENS, G)
    assert torch.equal(kernel.similarity, TOKENS.cosine)
    assert kernel.quality[0].tolist() == pytest.approx([0.0025, 0.5025, 1.0025], rel=1e-4)


def test_theta_is_the_exponential_balance() -> None:
    kernel = run_kernel(call("runtime_conditional_similarity_kernel", theta=0.8), TOKENS, G)
    # alpha = 0.8 / (2 * 0.2) = 2
    assert kernel.quality[0].tolist() == pytest.approx([1, math.e, math.e**2], rel=1e-4)


@means("centred_cosine_kernel")
def test_the_centred_kernel_compares_what_tokens_do_not_share() -> None:
    """The mean token is (2, 4): less it, two tokens are opposite and one stands across them."""
    tokens = plain(torch.tensor([[1.0, 4.0], [3.0, 4.0], [2.0, 7.0], [2.0, 1.0]]))
    kernel = run_kernel(call("centred_cosine_kernel"), tokens, torch.rand(1, 4))
    expected = [[1.0, -1, 0, 0], [-1.0, 1, 0, 0], [0.0, 0, 1, -1], [0.0, 0, -1, 1]]
    assert kernel.similarity[0].tolist() == approx(expected)
    assert kernel.quality.tolist() == [[1, 1, 1, 1]]


def test_each_tile_has_a_mean_of_its_own() -> None:
    features = torch.tensor([[[1.0, 0.0], [3.0, 0.0], [0.0, 5.0], [0.0, 9.0]]])
    tokens = plain(features, Grid(1, 2, tiles=2))
    kernel = run_kernel(call("centred_cosine_kernel"), tokens, torch.ones(1, 4))
    expected = [[1.0, -1, 0, 0], [-1.0, 1, 0, 0], [0.0, 0, 1, -1], [0.0, 0, -1, 1]]
    assert kernel.similarity[0].tolist() == approx(expected)


def test_scaled_variance_lets_no_channel_dominate() -> None:
    """By the first channel alone the tokens are two pairs; scaled, both channels count alike."""
    tokens = plain(torch.tensor([[1e3, 1.0], [1e3, -1.0], [-1e3, 1.0], [-1e3, -1.0]]))
    flat, scaled = (
        run_kernel(call("centred_cosine_kernel", scale_variance=on), tokens, torch.ones(1, 4))
        for on in (False, True)
    )
    assert flat.similarity[0, 0].tolist() == pytest.approx([1, 1, -1, -1], abs=1e-4)
    assert scaled.similarity[0, 0].tolist() == pytest.approx([1, 0, 0, -1], abs=1e-4)


def test_the_centred_kernel_may_be_scaled_by_quality() -> None:
    kernel = run_kernel(call("centred_cosine_kernel", weighted=True), TOKENS, G)
    assert kernel.quality[0].tolist() == pytest.approx([0, 0.5, 1], abs=1e-4)


@means("spatial_grid_partition")
def test_cells_by_hand() -> None:
    labels = run_partition(
        call("spatial_grid_partition", cells=2), plain(torch.eye(12), Grid(3, 4))
    )
    assert labels.tolist() == [[0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3]]


def test_tiles_have_cells_of_their_own_and_small_tiles_fewer() -> None:
    tokens = plain(torch.eye(8), Grid(2, 2, tiles=2))
    labels = run_partition(call("spatial_grid_partition", cells=12), tokens)
    assert labels.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


@means("feature_cluster_partition")
def test_well_separated_clusters() -> None:
    angles = torch.tensor([0.0, 180.0, 5.0, 90.0, 185.0, 95.0, 355.0]).deg2rad()
    tokens = plain(torch.stack([angles.cos(), angles.sin()], dim=1) * torch.rand(7, 1).add(0.5))
    labels = run_partition(call("feature_cluster_partition", clusters=3), tokens)[0].tolist()
    groups = {frozenset(i for i in range(7) if labels[i] == label) for label in set(labels)}
    assert groups == {frozenset({0, 2, 6}), frozenset({1, 4}), frozenset({3, 5})}


@pytest.mark.parametrize("iters", [2, 5])
def test_cosines_to_centroids_are_those_of_the_mean_directions(iters: int) -> None:
    tokens = images(3, batch=1)
    before, _ = spherical_kmeans(tokens.cosine, 4, iters - 1)
    _, near = spherical_kmeans(tokens.cosine, 4, iters)
    unit = tokens.unit[0]
    for cluster in range(4):
        centroid = unit[before[0] == cluster].sum(dim=0)
        expected = unit @ (centroid / centroid.norm())
        assert torch.allclose(near[0, :, cluster], expected, atol=1e-5)


def test_tokens_that_cancel_out_leave_their_centroid_where_it_was() -> None:
    tokens = plain(torch.tensor([[1.0, 0.0], [-1.0, 0.0]] * 2))
    labels = run_partition(call("feature_cluster_partition", clusters=2), tokens)
    assert labels[0, 0] == labels[0, 2] != labels[0, 1] == labels[0, 3]
