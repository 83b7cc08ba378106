from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.base_policies.samples import START, images, language_of, native, prefix, select
from vllm_autoprune.base_policies.sparsevlm import (
    cluster_count,
    cluster_means,
    density_peak_clusters,
    find_raters,
    rater_attention,
    recycled_count,
)
from vllm_autoprune.tpdsl.prefix import LanguagePrefix


def required(language: LanguagePrefix | None) -> LanguagePrefix:
    assert language is not None
    return language


# One position before three visual tokens, then three words; width 2.
VISUAL = [[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]]
WORDS = [[1.0, 0.0], [0.0, 0.5], [0.0, 0.0]]
EMBEDDINGS = torch.tensor([[9.0, 9.0], *VISUAL, *WORDS])


def test_raters_are_words_with_above_average_similarity() -> None:
    tokens = prefix(3, [True] * 3, embeddings=EMBEDDINGS)
    # Two visual tokens like the first word, one the second, none the third.
    assert find_raters(required(tokens.language), 3).tolist() == [[True, False, False]]


def test_padding_neither_rates_nor_counts_in_the_mean() -> None:
    embeddings = torch.cat([EMBEDDINGS, torch.tensor([[50.0, 50.0]])])
    tokens = prefix(3, [True, True, True, False], embeddings=embeddings)
    assert find_raters(required(tokens.language), 3).tolist() == [[True, False, False, False]]


def test_all_words_rate_if_none_is_above_the_mean() -> None:
    one = prefix(3, [True], embeddings=EMBEDDINGS[:5])
    assert find_raters(required(one.language), 3).tolist() == [[True]]
    alike = torch.cat([EMBEDDINGS[:4], torch.zeros(3, 2)])
    padded = prefix(3, [True, True, False], embeddings=alike)
    assert find_raters(required(padded.language), 3).tolist() == [[True, True, False]]


def attention_of(rows: list[list[float]]) -> Tensor:
    """``(2, Lt, L)``: two heads whose mean over the image is ``rows``."""
    visual = torch.tensor(rows)
    one = torch.cat([torch.ones(len(rows), 1), visual, torch.ones(len(rows), 3)], dim=1)
    swing = torch.linspace(-0.05, 0.05, one.shape[1])
    return torch.stack([one + swing, one - swing])


def test_only_the_raters_attention_counts() -> None:
    attention = attention_of([[0.2, 0.1, 0.3], [0.9, 0.9, 0.0], [0.9, 0.9, 0.0]])
    tokens = prefix(3, [True] * 3, embeddings=EMBEDDINGS, attention=attention)
    assert select("sparsevlm", tokens, 2).picks.tolist() == [[2, 0]]
    score = rater_attention(required(tokens.language), 2, 3)
    assert score[0].tolist() == pytest.approx([0.2, 0.1, 0.3])


def test_of_two_raters_it_is_the_mean() -> None:
    embeddings = EMBEDDINGS.clone()
    embeddings[5] = torch.tensor([1.0, 0.2])  # now the second word is like the image too
    attention = attention_of([[0.2, 0.1, 0.3], [0.0, 0.6, 0.1], [0.9, 0.9, 0.0]])
    tokens = prefix(3, [True] * 3, embeddings=embeddings, attention=attention)
    assert find_raters(required(tokens.language), 3).tolist() == [[True, True, False]]
    score = rater_attention(required(tokens.language), 2, 3)
    assert score[0].tolist() == pytest.approx([0.1, 0.35, 0.2])


class TestRecycling:
    def test_the_published_counts(self) -> None:
        assert [recycled_count(n) for n in (1, 3, 10, 276, 512)] == [1, 1, 4, 83, 154]
        assert [cluster_count(n) for n in (1, 9, 10, 83, 154)] == [1, 1, 2, 9, 16]

    def test_two_separated_groups_are_two_clusters(self) -> None:
        near = torch.tensor([[0.0], [0.125], [0.25], [8.0], [8.25], [8.5]])[None]
        members = density_peak_clusters(near, 2)[0]
        assert members.sum(dim=1).tolist() == [1.0] * 6
        assert {tuple(column.tolist()) for column in members.T} == {
            (1, 1, 1, 0, 0, 0),
            (0, 0, 0, 1, 1, 1),
        }
        # Without a rule for ties, the two tokens that are nearest to each other are both centres.
        tied = density_peak_clusters(near, 2, break_ties=False)[0]
        assert {tuple(column.tolist()) for column in tied.T} != {
            (1, 1, 1, 0, 0, 0),
            (0, 0, 0, 1, 1, 1),
        }
        middle = cluster_means(members[None], near)[0, :, 0].sort().values
        assert middle.tolist() == pytest.approx([0.125, 8.25], abs=1e-4)

    def test_identical_tokens_form_one_cluster(self) -> None:
        members = density_peak_clusters(torch.ones(1, 5, 3), 2)[0]
        assert members.sum(dim=0).tolist() == [5.0, 0.0]
        assert cluster_means(members[None], torch.ones(1, 5, 3))[0, 1].tolist() == [0.0] * 3

    def test_rows_are_made_of_features_and_grouped_by_the_layers_states(self) -> None:
        tokens = images(1)
        budget = 10
        actual = select("sparsevlm", tokens, budget, recycle=True)
        extra = cluster_count(recycled_count(tokens.count - budget))
        assert actual.extra is not None and actual.extra.shape[1] == extra
        assert actual.picks.shape[1] == budget - extra
        states = language_of(tokens).recorded_states
        assert states is not None
        scores = rater_attention(required(tokens.language), 2, tokens.count)
        for image in range(2):
            order = scores[image].argsort(descending=True, stable=True)
            assert actual.picks[image].tolist() == order[: budget - extra].tolist()
            pruned = order[budget - extra :]
            sources = pruned[: recycled_count(len(pruned))]
            members = density_peak_clusters(states[image, START + sources][None], extra)
            expected = cluster_means(members, tokens.features[image, sources][None])
            torch.testing.assert_close(actual.extra[image], expected[0])

    def test_half_of_k_at_most(self) -> None:
        tokens = images(2)
        assert select("sparsevlm", tokens, 1, recycle=True).extra is None
        few = select("sparsevlm", tokens, 3, recycle=True)
        assert few.picks.shape[1] == 2 and few.extra is not None


def test_the_published_stage_keeps_one_less_than_everything_at_most() -> None:
    tokens = images(3, batch=1)
    actual = native("sparsevlm", tokens, 500)
    kept = actual.indices[0][actual.indices[0] >= 0]
    assert kept.tolist() == sorted(kept.tolist()) and kept.numel() == tokens.count - 1
    assert actual.indices[0].tolist()[-1] == -1 and actual.features is not None
    # One token is pruned and recycled: its cluster is itself, but for the 1e-6 in the divisor.
    missing = (set(range(tokens.count)) - set(kept.tolist())).pop()
    states = language_of(tokens).recorded_states
    assert states is not None
    torch.testing.assert_close(actual.features[0][-1], states[0, START + missing])


def test_the_instruction_decides() -> None:
    tokens = images(4)
    language = language_of(tokens)
    embeddings = language.recorded_embeddings
    assert embeddings is not None
    requested = embeddings.clone()
    requested[:, -6:] = requested[:, -6:].flip(1)
    other = replace(tokens, language=replace(language, recorded_embeddings=requested))
    one, two = (select("sparsevlm", image, 8).picks for image in (tokens, other))
    assert not torch.equal(one, two)
