"""Steps of single base policies, with values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.base_policies.samples import prefix, select
from tests.base_policies.test_hand_values import EMBEDDINGS, USED, attended, rated
from tests.tpdsl.samples import plain, with_relevance
from tests.tpdsl.samples import whole_images as images
from vllm_autoprune import Grid
from vllm_autoprune.base_policies.fsr import FSRParams, focus_size, priority
from vllm_autoprune.base_policies.holov import HoloVParams, band_quotas
from vllm_autoprune.base_policies.prunesid import (
    find_distinct,
    group_quotas,
    mean_of_pairs,
    principal_loadings,
)
from vllm_autoprune.base_policies.sparsevlm import (
    cluster_count,
    cluster_means,
    density_peak_clusters,
    find_raters,
    rater_attention,
    recycled_count,
)
from vllm_autoprune.base_policies.visionzip import VisionZipParams
from vllm_autoprune.tpdsl.prefix import RecordedPrefix
from vllm_autoprune.tpdsl.tokens import Words


@pytest.mark.parametrize(
    ("budget", "split"),
    [(192, (162, 30)), (64, (54, 10)), (32, (27, 5)), (16, (14, 2)), (1, (1, 0))],
)
def test_the_published_splits_of_visionzip(budget: int, split: tuple[int, int]) -> None:
    assert VisionZipParams(contextual=None, patch_only=True).split(budget) == split


@pytest.mark.parametrize(
    ("tokens", "budget", "bands"),
    [(576, 64, 16), (576, 128, 8), (1296, 130, 17), (576, 2000, 1), (4, 1, 4)],
)
def test_the_published_numbers_of_bands(tokens: int, budget: int, bands: int) -> None:
    assert HoloVParams(bands=None).count(tokens, budget) == bands


@pytest.mark.parametrize(
    ("attention", "bands", "count", "expected"),
    [
        # Means 4, 2, 1, 1 of 8: the remainder goes to the largest weights, not fractions.
        ([3.0, 5, 4, 4, 4, 4] + [2.0] * 6 + [1.0] * 12, 4, 7, [4, 2, 1, 0]),
        ([3.0, 5, 4, 4, 4, 4] + [2.0] * 6 + [1.0] * 12, 4, 10, [6, 2, 1, 1]),
        ([1.0] * 7, 3, 3, [1, 1, 1]),  # the mean of a band counts, not its sum
        # Fair shares of 6: 4.8, 0.9, 0.3; the first has no room and the others fall short.
        ([16.0, 16, 3, 3, 1, 1], 3, 6, [2, 2, 2]),
        ([16.0, 16, 3, 3, 1, 1], 3, 5, [2, 2, 1]),
        ([0.0] * 6, 3, 5, [2, 2, 1]),
        ([1.0, 1, 0, 0, 0, 0], 3, 4, [2, 1, 1]),
    ],
)
def test_quotas_of_bands(
    attention: list[float], bands: int, count: int, expected: list[int]
) -> None:
    assert band_quotas(torch.tensor([attention]), bands, count).tolist() == [expected]


class TestFocus:
    """FSR's priority."""

    def test_its_size_is_the_least_that_reaches_the_share(self) -> None:
        phi = torch.tensor([[4.0, 3, 2, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
        assert focus_size(phi, 0.7).tolist() == [[2], [0], [1]]
        assert focus_size(phi, 0.71).tolist() == [[3], [0], [1]]

    def test_without_priority_the_scan_begins_as_divprune(self) -> None:
        tokens = images(4, noise=1.0)
        wanted = select("divprune", tokens, 9).picks
        assert torch.equal(select("fsr", tokens, 9, rho=0.0).picks, wanted)

    def test_relevance_is_normalised_over_all_tiles_and_attention_in_each(self) -> None:
        tokens = with_relevance(
            plain(torch.eye(4), Grid(1, 2, tiles=2)), torch.tensor([[0, 0.1, 0.2, 0.4]])
        )
        tokens = replace(tokens, cls_attention=torch.tensor([[0.1, 0.3, 0.5, 0.1]]))
        params = FSRParams(alpha=1.0, beta=1.0, rho=0.9, kappa=1.0)
        expected = torch.tensor([[0.0, 1 * 0.25, 1 * 0.5, 0.0]])
        torch.testing.assert_close(priority(params, tokens), expected)


class TestPrincipalGroups:
    """PruneSID's groups, their distinct members and their quotas."""

    SIMILARITY = torch.tensor([[[1.0, 0.9, 0.2], [0.9, 1.0, 0.8], [0.2, 0.8, 1.0]]])

    def test_loadings_are_the_singular_vectors_of_centred_sigmoids(self) -> None:
        rows = torch.randn(2, 9, 20)
        squashed = torch.sigmoid(rows.double())
        expected, _, _ = torch.linalg.svd(squashed - squashed.mean(dim=2, keepdim=True))
        torch.testing.assert_close(principal_loadings(rows, 4), expected[:, :, :4].abs())

    @pytest.mark.parametrize(
        ("order", "group", "bound", "expected"),
        [
            ([0, 1, 2], [0, 0, 0], 0.5, [True, False, True]),
            # Token 1 repeats token 0 and would have dropped token 2.
            ([0, 1, 2], [0, 0, 0], 0.7, [True, False, True]),
            ([1, 0, 2], [0, 0, 0], 0.7, [False, True, False]),
            ([0, 1, 2], [0, 1, 0], 0.5, [True, True, True]),
            ([2, 1, 0], [0, 0, 0], 1.0, [True, True, True]),
        ],
    )
    def test_a_token_that_repeats_a_better_one_of_its_group_is_dropped(
        self, order: list[int], group: list[int], bound: float, expected: list[bool]
    ) -> None:
        distinct = find_distinct(
            self.SIMILARITY, torch.tensor([order]), torch.tensor([group]), torch.tensor([[bound]])
        )
        assert distinct.tolist() == [expected]

    @pytest.mark.parametrize(
        ("members", "distinct", "budget", "expected"),
        [
            # Shares of 4 beside one each: rounded ends of 4/7, 6/7, 7/7 of 4 are 2, 3 and 4.
            ([10, 10, 10], [8, 4, 2], 7, [3, 2, 2]),
            ([0, 9, 9], [0, 5, 5], 6, [0, 3, 3]),
            ([2, 20], [2, 3], 12, [2, 10]),
            # At most five of a group per 64 tokens, until the budget is reached.
            ([30, 30, 30], [20, 3, 3], 11, [5, 3, 3]),
        ],
    )
    def test_quotas(
        self, members: list[int], distinct: list[int], budget: int, expected: list[int]
    ) -> None:
        sizes = (torch.tensor([members]), torch.tensor([distinct]))
        assert group_quotas(*sizes, budget, budget).tolist() == [expected]

    def test_mean_of_pairs_leaves_the_diagonal_out(self) -> None:
        mean = mean_of_pairs(torch.tensor([[[1.0, 0.4], [0.4, 1.0]]]))
        assert mean.tolist() == [[pytest.approx(0.4)]]

    def test_suppression_prefers_tokens_that_differ(self) -> None:
        """Two directions in one group: the second most attended token repeats the first."""
        one, other = torch.randn(2, 12)
        tokens = attended([0.4, 0.3, 0.2, 0.1], torch.stack([one, one, other, other])[None])
        strict = select("prunesid", tokens, 2, groups=1, threshold=1.0).picks
        lax = select("prunesid", tokens, 2, groups=1, threshold=100.0).picks
        assert (strict.tolist(), lax.tolist()) == ([[0, 2]], [[0, 1]])

    def test_earlier_picks_are_the_first_of_every_group(self) -> None:
        """A core or a prior takes the first picks: no group may be left out of them."""
        tokens = images(8, batch=1)
        group = principal_loadings(tokens.require_encoder(), 3).argmax(dim=2)[0]
        picks = select("prunesid", tokens, 12, groups=3).picks[0]
        kinds = group.unique().numel()
        assert group[picks[:kinds]].unique().numel() == kinds


class TestRaters:
    """SparseVLM: words that resemble the image, and clusters of what is pruned."""

    @pytest.mark.parametrize(
        ("embeddings", "text", "raters"),
        [
            (EMBEDDINGS, [True] * 3, [True, False, False]),
            # Padding neither rates nor counts in the mean.
            (
                torch.cat([EMBEDDINGS, torch.full((1, 2), 50.0)]),
                [True] * 3 + [False],
                [True] + [False] * 3,
            ),
            (EMBEDDINGS[:5], [True], [True]),
            (
                torch.cat([EMBEDDINGS[:4], torch.zeros(3, 2)]),
                [True, True, False],
                [True, True, False],
            ),
        ],
    )
    def test_words_above_the_mean_rate_or_all_of_them(
        self, embeddings: Tensor, text: list[bool], raters: list[bool]
    ) -> None:
        tokens = prefix(3, text, embeddings=embeddings)
        assert find_raters(tokens.require_language(), 3).tolist() == [raters]

    def test_of_two_raters_it_is_the_mean(self) -> None:
        embeddings = EMBEDDINGS.clone()
        embeddings[5] = torch.tensor([1.0, 0.2])  # the second word is like the image too
        tokens = rated([[0.2, 0.1, 0.3], [0.0, 0.6, 0.1], [0.9, 0.9, 0.0]])
        assert isinstance(tokens.language, RecordedPrefix)
        language = replace(tokens.language, recorded_embeddings=embeddings[None])
        score = rater_attention(language, 2, 3)[0]
        assert score.tolist() == pytest.approx([0.1, 0.35, 0.2])

    def test_the_published_counts(self) -> None:
        assert [recycled_count(n) for n in (1, 3, 10, 276, 512)] == [1, 1, 4, 83, 154]
        assert [cluster_count(n) for n in (1, 9, 10, 83, 154)] == [1, 1, 2, 9, 16]

    def test_two_separated_groups_are_two_clusters(self) -> None:
        near = torch.tensor([[0.0], [0.125], [0.25], [8.0], [8.25], [8.5]])[None]
        groups = {(1, 1, 1, 0, 0, 0), (0, 0, 0, 1, 1, 1)}
        members = density_peak_clusters(near, 2)
        assert {tuple(column.tolist()) for column in members[0].T} == groups
        # Without a rule for ties, the two tokens that are nearest to each other are both centres.
        tied = density_peak_clusters(near, 2, break_ties=False)
        assert {tuple(column.tolist()) for column in tied[0].T} != groups
        middle = cluster_means(members, near)[0, :, 0].sort().values
        assert middle.tolist() == pytest.approx([0.125, 8.25], abs=1e-4)

    def test_recycled_rows_are_made_of_features_and_take_half_of_k_at_most(self) -> None:
        tokens = images(1)
        count = cluster_count(recycled_count(tokens.count - 10))
        actual = select("sparsevlm", tokens, 10, recycle=True)
        assert actual.picks.shape == (2, 10 - count) and actual.extra is not None
        language = tokens.require_language()
        order = rater_attention(language, 2, tokens.count).argsort(dim=1, descending=True)
        dropped = order[:, 10 - count :]
        sources = dropped[:, : recycled_count(dropped.shape[1])]
        states = language.states(2).narrow(1, language.start, tokens.count)
        for image in range(2):
            members = density_peak_clusters(states[image, sources[image]][None], count)
            means = cluster_means(members, tokens.features[image, sources[image]][None])
            torch.testing.assert_close(actual.extra[image], means[0])
        assert select("sparsevlm", tokens, 1, recycle=True).extra is None
        assert select("sparsevlm", tokens, 3, recycle=True).picks.shape == (2, 2)


class TestWords:
    """MMTok's words, DART's pivots of text, and text that is padding."""

    def test_the_token_that_matches_a_word_is_kept_first(self) -> None:
        tokens = images(4, batch=1)
        asked = replace(tokens, words=Words(tokens.features[:, 17:18], USED))
        assert select("mmtok", asked, 4).picks[0, 0] == 17
        assert 17 not in select("mmtok", asked, 4, words=False).picks[0].tolist()

    def test_no_words_is_coverage_of_the_image_alone(self) -> None:
        tokens = images(3)
        none = Words(torch.zeros(2, 0, 16), torch.zeros(2, 0, dtype=torch.bool))
        picks = select("mmtok", replace(tokens, words=none), 9).picks
        assert torch.equal(picks, select("mmtok", tokens, 9, words=False).picks)

    def test_padding_is_not_read(self) -> None:
        tokens = images(2)
        words, instruction = tokens.require_words(), tokens.require_instruction()
        unread = torch.zeros(2, 3, dtype=torch.bool)

        def padded(rows: Tensor) -> Tensor:
            return torch.cat([rows, torch.full_like(rows[:, :1], torch.nan).expand(-1, 3, -1)], 1)

        more = replace(
            tokens,
            words=Words(padded(words.embeddings), torch.cat([words.used, unread], dim=1)),
            instruction=replace(
                instruction,
                text=padded(instruction.text),
                segments=torch.cat([instruction.segments, unread], dim=1),
            ),
        )
        for policy in ("mmtok", "cdpruner", "trim"):
            assert torch.equal(select(policy, more, 9).picks, select(policy, tokens, 9).picks)

    def test_no_instruction_is_constant_relevance(self) -> None:
        tokens = images(9)
        instruction = tokens.require_instruction()
        nothing = replace(instruction, segments=torch.zeros_like(instruction.segments))
        flat = with_relevance(tokens, torch.full((2, 36), 0.3))
        picks = select("cdpruner", replace(tokens, instruction=nothing), 9).picks
        assert torch.equal(picks, select("cdpruner", flat, 9).picks)

    def test_text_before_the_image_and_padding_are_no_pivots(self) -> None:
        tokens = images(9, batch=1)
        assert isinstance(tokens.language, RecordedPrefix)
        text = tokens.language.text.clone()
        text[0, -1] = False
        language = replace(tokens.language, text=text)
        wanted = select("dart", replace(tokens, language=language), 20).picks
        assert language.recorded_keys is not None
        keys = language.recorded_keys.clone()
        keys[:, :, : language.start], keys[:, :, -1] = 100.0, 100.0
        louder = replace(tokens, language=replace(language, recorded_keys=keys))
        assert torch.equal(select("dart", louder, 20).picks, wanted)

    def test_an_instruction_of_one_word_is_four_pivots(self) -> None:
        """Each of its four turns takes what is least like it of what is left."""
        language = RecordedPrefix(
            0,
            torch.tensor([[True]]),
            recorded_embeddings=torch.tensor([[[1.0, 0.1 * i] for i in range(12)] + [[-2.0, 0.0]]]),
        )
        tokens = replace(plain(torch.eye(12)), language=language)
        picks = select("dart", tokens, 12 - 1, space="embeddings").picks[0]
        assert picks[:4].tolist() == [11, 10, 9, 8] and picks.unique().numel() == 11
