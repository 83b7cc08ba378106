"""The held-out splits: deterministic, disjoint, flagged, and scored as documented."""

from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.minillava.layout import Canvas
from benchmarks.minillava.split import Example, draw_examples, grade_answers, is_right, png


@pytest.fixture(scope="module")
def split() -> list[Example]:
    return draw_examples("test", 12)


def _example(kind: str, answer: str, pair: int | None = None) -> Example:
    return Example(0, torch.zeros(3, 168, 168, dtype=torch.uint8), "?", answer, kind, pair, ())


def test_the_splits_are_those_of_published_figures() -> None:
    """In every process, whatever its order of hashes, and with every release of Python."""
    parts = [
        (one.question, one.answer, one.kind, one.pair, one.evidence)
        for name in ("search", "validation", "test")
        for one in draw_examples(name, 4)
    ]

    assert hashlib.sha256(repr(parts).encode()).hexdigest()[:16] == "38a2c89ac0516a96"


def test_a_smaller_split_is_a_prefix_of_a_larger_one(split: list[Example]) -> None:
    smaller = draw_examples("test", 3)

    assert [one.question for one in smaller] == [one.question for one in split[: len(smaller)]]
    assert torch.equal(smaller[-1].image, split[len(smaller) - 1].image)


def test_splits_show_different_scenes(split: list[Example]) -> None:
    images = {name: draw_examples(name, 1)[0].image for name in ("search", "validation", "test")}

    assert not torch.equal(images["search"], images["test"])
    assert not torch.equal(images["search"], images["validation"])


def test_only_the_test_split_has_unseen_wordings_and_styles(split: list[Example]) -> None:
    assert {one.image_id % 4 for one in split if one.unseen_style} == {1}
    assert {one.image_id % 4 for one in split if one.unseen_wording} == {3}
    for name in ("search", "validation"):
        assert not any(one.unseen_style or one.unseen_wording for one in draw_examples(name, 4))


def test_pairs_hold_one_yes_and_one_no_about_one_image(split: list[Example]) -> None:
    pairs: dict[int, list[Example]] = {}
    for one in split:
        if one.pair is not None:
            pairs.setdefault(one.pair, []).append(one)

    assert len(pairs) == 12 * 4
    for pair in pairs.values():
        assert sorted(one.answer for one in pair) == ["no", "yes"]
        assert len({(one.image_id, one.kind) for one in pair}) == 1


def test_evidence_lies_within_the_image() -> None:
    for one in draw_examples("search", 2, Canvas(8)):
        assert one.image.shape == (3, 336, 336)
        assert all(0 <= patch < 576 for patch in one.evidence)


def test_scene_counts_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="scenes must lie in"):
        draw_examples("test", 0)


def test_png_keeps_every_pixel(split: list[Example]) -> None:
    image = np.asarray(Image.open(io.BytesIO(png(split[0].image))))

    assert torch.equal(torch.from_numpy(image.copy()).permute(2, 0, 1), split[0].image)


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        (" 4821", "4821", True),
        (" 482", "4821", False),
        (" Upper left.", "upper left", True),
        (" upper right", "upper left", False),
        ("YES, it is", "yes", True),
        ("", "3", False),
    ],
)
def test_answers_must_start_with_all_words_of_the_reference(
    answer: str, reference: str, right: bool
) -> None:
    assert is_right(answer, reference) is right


def test_scores_are_by_kind_by_category_and_by_pair() -> None:
    examples = [
        _example("digit", "7"),
        _example("colour", "red"),
        _example("existence", "yes", 0),
        _example("existence", "no", 0),
        _example("position", "yes", 1),
        _example("position", "no", 1),
        _example("quarter", "upper left"),
    ]
    result = grade_answers(examples, [" 7", " blue", " yes", " no", " yes", " yes", " upper left"])

    assert result.accuracy == pytest.approx(5 / 7)
    assert result.accuracy_plus == pytest.approx(1 / 2)
    assert result.by_kind["position"] == pytest.approx(1 / 2)
    assert result.by_category["position"] == pytest.approx(2 / 3)
    assert result.by_category["attributes"] == pytest.approx(1 / 2)
    assert "fine text" not in result.by_category


def test_scores_need_one_answer_per_example() -> None:
    with pytest.raises(ValueError, match="1 examples but 2 answers"):
        grade_answers([_example("digit", "7")], ["7", "7"])
