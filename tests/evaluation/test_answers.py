"""Scores of texts by the rules of published data."""

from __future__ import annotations

import pytest

from tests.tables import parametrize_from_file
from vllm_autoprune.evaluation.answers import Rule, score_text


@parametrize_from_file("rule", "answers", "text", "score")
def test_a_text_is_scored_by_the_rule_of_its_data(
    rule: Rule, answers: list[str], text: str, score: float
) -> None:
    assert score_text(rule, answers, text) == pytest.approx(score)
