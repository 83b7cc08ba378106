"""Splits: the same every time, disjoint, and novelty in the test split only."""

from __future__ import annotations

import torch

from benchmarks.miniqwen.sizes import UNSEEN_SIZES
from benchmarks.miniqwen.split import draw_examples, grade_answers, image_size
from benchmarks.miniqwen.wordings import PAGE_KINDS, SCENE_KINDS


def test_fewer_images_give_a_prefix() -> None:
    more, fewer = draw_examples("validation", 6), draw_examples("validation", 4)
    for one, other in zip(fewer, more, strict=False):
        assert (one.question, one.answer) == (other.question, other.answer)
        assert torch.equal(one.image, other.image)
    assert fewer[-1].image_id == 3


def test_scenes_and_pages_alternate() -> None:
    examples = draw_examples("search", 8)
    assert {one.kind for one in examples if one.image_id % 2 == 0} <= set(SCENE_KINDS)
    assert {one.kind for one in examples if one.image_id % 2} <= set(PAGE_KINDS)


def test_only_the_test_split_has_unseen_sizes_and_wordings() -> None:
    test, validation = draw_examples("test", 8), draw_examples("validation", 8)
    for one in (*test, *validation):
        assert one.unseen_style == (image_size(one.image) in UNSEEN_SIZES)
    assert {one.image_id for one in test if one.unseen_style} == {2, 3}
    assert {one.image_id for one in test if one.unseen_wording} == {6, 7}
    assert not any(one.unseen_style or one.unseen_wording for one in validation)


def test_right_answers_score_one_in_both_categories() -> None:
    examples = draw_examples("test", 4)
    answers = [one.answer for one in examples]
    scores = grade_answers(examples, answers)
    assert scores.accuracy == 1.0
    assert scores.by_category == {"scenes": 1.0, "pages": 1.0}
    wrong = grade_answers(examples, ["?"] * len(examples))
    assert wrong.accuracy == 0.0
