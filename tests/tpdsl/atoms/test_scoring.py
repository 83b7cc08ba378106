from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.tpdsl.atom_policies import means
from tests.tpdsl.samples import call, images, plain, with_relevance
from vllm_autoprune import Grid, Instruction, SelectionError, VisualTokens
from vllm_autoprune.tpdsl.atoms.scoring import instruction_relevance, run_signal
from vllm_autoprune.tpdsl.registry import ATOMS

SIGNALS = ATOMS.names("scoring")
E1, E2 = [1.0, 0.0], [0.0, 1.0]


def score(
    name: str, tokens: VisualTokens, picks: Tensor | None = None, **parameters: object
) -> Tensor:
    first = torch.zeros(tokens.batch, 1, dtype=torch.int64)
    return run_signal(call(name, **parameters), tokens, first if picks is None else picks)


def rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("grid", [Grid(4, 6), Grid(3, 3, tiles=5), Grid(1, 1), Grid(1, 7)])
def test_every_signal_is_one_finite_float32_a_token(
    name: str, dtype: torch.dtype, grid: Grid
) -> None:
    tokens = images(1, grid=grid, dtype=dtype)
    actual = score(name, tokens)
    assert actual.shape == (2, grid.tokens) and actual.dtype == torch.float32
    assert bool(actual.isfinite().all())
    assert torch.equal(actual, score(name, images(1, grid=grid, dtype=dtype)))


@pytest.mark.parametrize("name", SIGNALS)
def test_nan_in_one_image_stays_there(name: str) -> None:
    clean, tokens = images(2), images(2)
    assert tokens.cls_attention is not None and tokens.instruction is not None
    for values in (tokens.features, tokens.cls_attention, tokens.instruction.patches):
        values[1, 3] = torch.nan
    assert torch.equal(score(name, tokens)[0], score(name, clean)[0])


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

    def test_max_is_taken_in_the_direction_of_relevance(self) -> None:
        actual = score(self.NAME, self.instruction(sign=-1), reduce="max")
        assert rounded(actual[0]) == [0.0, 0.0, -0.6, 0.0]

    def test_length_of_an_embedding_does_not_count(self) -> None:
        given = images(3).instruction
        assert given is not None
        longer = dataclasses.replace(given, patches=given.patches * 8, text=given.text / 4)
        assert torch.equal(instruction_relevance(longer), instruction_relevance(given))

    def test_missing_instruction_is_named_in_the_error(self) -> None:
        with pytest.raises(SelectionError, match=r"VisualTokens\.instruction is None"):
            score(self.NAME, plain(torch.eye(3)))


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

    def test_m_beyond_the_tile_means_all_others(self) -> None:
        tokens = plain(torch.tensor([E1, E1, E2]))
        assert rounded(score(self.NAME, tokens, m=64)[0]) == [-0.5, -0.5, 0.0]

    def test_tokens_of_other_tiles_do_not_count(self) -> None:
        tokens = plain(torch.tensor([E1, E2, E1, E1]), Grid(1, 2, tiles=2))
        assert rounded(score(self.NAME, tokens, m=1)[0]) == [0.0, 0.0, -1.0, -1.0]


@means("local_contrast_saliency")
class TestContrast:
    NAME = "local_contrast_saliency"

    def test_by_hand_in_a_row(self) -> None:
        tokens = plain(torch.tensor([E1, E1, E2, E2]), Grid(1, 4))
        assert rounded(score(self.NAME, tokens)[0]) == [0.0, 0.5, 0.5, 0.0]

    def test_by_hand_with_corners_as_neighbours(self) -> None:
        tokens = plain(torch.tensor([E1, E1, E1, E2, E1, E1]), Grid(2, 3))
        actual = rounded(score(self.NAME, tokens)[0])
        # Token 3, the odd one out, is a neighbour of 0, 1 and 4, not of 2 and 5.
        assert actual == [round(1 / 3, 4), 0.2, 0.0, 1.0, 0.2, 0.0]

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


def test_helper_produces_the_requested_relevance() -> None:
    wanted = torch.tensor([[0.9, -0.3, 0.0]])
    actual = score(
        "instruction_guided_visual_relevance", with_relevance(plain(torch.eye(3)), wanted)
    )
    assert rounded(actual[0]) == [0.9, -0.3, 0.0]


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

    def test_detail_is_highest_on_varied_directions(self) -> None:
        # Nine letters, each another direction, in the middle of a page of one direction.
        rows = torch.zeros(7, 7, 12)
        rows[..., 0] = 1.0
        rows[2:5, 2:5] = torch.eye(12)[1:10].reshape(3, 3, 12)
        actual = score(self.NAME, plain(rows.reshape(49, 12), Grid(7, 7)))[0].reshape(7, 7)
        assert actual[3, 3] == actual.max() and float(actual[0, 0]) == pytest.approx(0, abs=1e-6)
        assert float(actual[3, 3]) == pytest.approx(1 - 1 / 9, abs=1e-6)
        odd = torch.zeros(49, 12)
        odd[:, 0] = 1.0
        odd[24] = torch.eye(12)[5]
        alone = score(self.NAME, plain(odd, Grid(7, 7)))[0]
        assert float(alone.max()) < float(actual[3, 3]) / 2
