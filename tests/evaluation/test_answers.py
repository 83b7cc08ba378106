"""Scores of texts by the rules of published data."""

from __future__ import annotations

import pytest

from vllm_autoprune.evaluation.answers import Rule, score_text


@pytest.mark.parametrize(
    ("rule", "answers", "text", "score"),
    [
        ("text", ["41.20", "Forty one"], " forty  ONE.\n", 1.0),
        ("text", ["41.20"], "41.2", 0.0),
        # The figures of VQAv2's own scorer: 1 to 4 of ten answers.
        *(("vqa", ["cat"] * n + ["dog"] * (10 - n), "A cat!", score)
          for n, score in ((0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0))),
        ("vqa", ["2"] * 10, "Two.", 1.0),
        ("vqa", ["isn't"] * 10, "isnt", 1.0),
        ("vqa", ["dogs"] * 10, "dog's", 0.0),
        ("vqa", ["10.5 a.m"] * 10, "10.5 a.m.", 1.0),
        ("vqa", ["1000"] * 10, "1,000", 1.0),
        ("vqa", ["red-blue"] * 10, "red blue", 1.0),
        ("yes_no", ["Yes"], "yes, there is no cat", 1.0),
        ("yes_no", ["no"], " No.", 1.0),
        ("yes_no", ["no"], "", 0.0),
        ("yes_no", ["no"], "There is no cat.", 0.0),
        ("choice", ["B", "41.20"], "B. 41.20", 1.0),
        ("choice", ["B", "41.20"], "(b)", 1.0),
        ("choice", ["B", "41.20"], "The answer is B.", 1.0),
        ("choice", ["B", "41.20"], "A or B", 0.0),
        ("choice", ["B", "a cat"], "A cat", 1.0),
        ("choice", ["A", "a dog"], "A cat sits on it.", 0.0),
        *(("relaxed", ["20%"], text, score)
          for text, score in (("20.9%", 1.0), ("21.1%", 0.0), ("0.2", 1.0), ("20", 0.0))),
        ("relaxed", ["Red"], "red", 1.0),
        ("relaxed", ["Red"], "dark red", 0.0),
        ("relaxed", ["0"], "0.0", 0.0),
        # 1 less 2 of 8 letters, the best of both answers; 4 of 8 are one half, 5 are none.
        ("anls", ["abcdefgh", "x"], "ABCDEF", 0.75),
        ("anls", ["abcdefgh"], "abcd", 0.5),
        ("anls", ["abcdefgh"], "abc", 0.0),
        ("anls", ["two  words"], "Two words", 1.0),
        ("contains", ["CENTRE"], "It says Centre.", 1.0),
        ("contains", ["CENTRE"], "Center", 0.0),
        ("contains_formula", ["x ^ 2"], "$x^2$", 1.0),
        ("contains_formula", ["x ^ 2"], "X^2", 0.0),
        *(("mmmu", ["8.333"], text, score)
          for text, score in (("The answer is 8.33.", 1.0), ("so x = 8.3", 0.0), ("8.33", 1.0))),
        ("mmmu", ["1,200"], "Thus 1200 dollars", 1.0),
        ("mmmu", ["trigonal", "bent"], "It is Trigonal planar.", 1.0),
        ("mmmu", ["c"], "back", 0.0),
        *(("rounded", ["1.2"], text, score)
          for text, score in (("1.24 cm", 1.0), ("1.26", 0.0), ("1 or 2", 0.0), ("one", 0.0))),
        ("rounded", ["3"], "3.0", 1.0),
    ],
)  # fmt: skip
def test_a_text_is_scored_by_the_rule_of_its_data(
    rule: Rule, answers: list[str], text: str, score: float
) -> None:
    assert score_text(rule, answers, text) == pytest.approx(score)
