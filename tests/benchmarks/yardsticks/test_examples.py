"""The held-out splits: those of published figures, disjoint, flagged, and scored as documented."""

from __future__ import annotations

import hashlib
import io
from itertools import combinations
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.yardsticks.examples import (
    CHECKPOINTS,
    SEEDS,
    Example,
    Split,
    draw_examples,
    grade_answers,
    image_size,
    image_token_id,
    is_right,
    png,
    weights_digest,
)
from benchmarks.yardsticks.pages import SIZES, UNSEEN_SIZES
from benchmarks.yardsticks.questions import CATEGORIES, Model

SPLITS: tuple[Split, ...] = get_args(Split)
MODELS: tuple[Model, ...] = ("minillava", "miniqwen")


@pytest.mark.parametrize(
    ("model", "digest", "moments"),
    [
        ("minillava", "38a2c89ac0516a96", (130.3908, 45.7212, 130.3892)),
        ("miniqwen", "6701d69dad73a5ca", (131.3984, 75.5445, 131.3978)),
    ],
)
def test_the_splits_are_those_of_published_figures(
    model: Model, digest: str, moments: tuple[float, float, float]
) -> None:
    """In every process, whatever its order of hashes, and with every release of Python.

    The last bit of few pixels depends on the processor and the number of threads.
    """
    examples = [one for name in SPLITS for one in draw_examples(name, 4, model)]
    parts = [(one.question, one.answer, one.kind, one.pair, one.evidence) for one in examples]
    assert hashlib.sha256(repr(parts).encode()).hexdigest()[:16] == digest
    pixels = torch.cat([one.image.flatten() for one in examples]).double()
    weights = torch.arange(len(pixels)) % 97
    places = (pixels * weights).mean() / weights.double().mean()
    drawn = [float(part) for part in (pixels.mean(), pixels.std(), places)]
    assert drawn == pytest.approx(moments, abs=1e-3)


def test_the_weights_are_those_of_published_figures() -> None:
    digests = {name: weights_digest(folder) for name, folder in CHECKPOINTS.items()}
    assert digests == {"minillava": "88389577245b", "miniqwen": "e03ce4913f3b"}
    assert image_token_id() == 4


@pytest.mark.parametrize("model", MODELS)
def test_a_smaller_split_is_a_prefix_of_a_larger_one(model: Model) -> None:
    smaller, larger = draw_examples("test", 3, model), draw_examples("test", 6, model)
    for one, other in zip(smaller, larger, strict=False):
        assert (one.question, one.pair) == (other.question, other.pair)
        assert torch.equal(one.image, other.image)
    assert smaller[-1].image_id == 2


def test_the_number_of_images_is_limited() -> None:
    for images in (0, 5001):
        with pytest.raises(ValueError, match=r"must lie in 1\.\.5000"):
            draw_examples("test", images)


def test_seed_ranges_never_touch_and_fit_the_generator() -> None:
    for one, other in combinations(SEEDS.values(), 2):
        assert one.stop <= other.start or other.stop <= one.start
    assert max(seeds.stop for seeds in SEEDS.values()) <= 2**32


def test_only_the_test_split_has_what_training_never_uses() -> None:
    scenes = draw_examples("test", 12)
    assert {one.image_id % 4 for one in scenes if one.unseen_style} == {1}
    assert {one.image_id % 4 for one in scenes if one.unseen_wording} == {3}
    pictures = draw_examples("test", 8, "miniqwen")
    assert {one.image_id for one in pictures if one.unseen_style} == {2, 3}
    assert {one.image_id for one in pictures if one.unseen_wording} == {6, 7}
    for one in (*pictures, *draw_examples("validation", 8, "miniqwen")):
        assert one.unseen_style == (image_size(one.image) in UNSEEN_SIZES)
    for split in ("search", "validation"):
        for model in MODELS:
            drawn = draw_examples(split, 4, model)
            assert not any(one.unseen_style or one.unseen_wording for one in drawn)
    assert not set(SIZES) & set(UNSEEN_SIZES)


def test_scenes_and_pages_alternate() -> None:
    for one in draw_examples("search", 8, "miniqwen"):
        category = "pages" if one.image_id % 2 else "scenes"
        assert one.kind in CATEGORIES["miniqwen"][category]


@pytest.mark.parametrize("model", MODELS)
def test_pairs_hold_one_yes_and_one_no_about_one_image(model: Model) -> None:
    pairs: dict[int, list[Example]] = {}
    for one in draw_examples("test", 12, model):
        if one.pair is not None:
            pairs.setdefault(one.pair, []).append(one)
    assert len(pairs) >= 12
    for pair in pairs.values():
        assert sorted(one.answer for one in pair) == ["no", "yes"]
        assert len({(one.image_id, one.kind) for one in pair}) == 1


def test_a_png_has_the_pixels_of_the_image() -> None:
    example = draw_examples("test", 1)[0]
    image = np.asarray(Image.open(io.BytesIO(png(example.image))))
    assert torch.equal(torch.from_numpy(image.copy()).permute(2, 0, 1), example.image)


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


def _example(kind: str, answer: str, pair: int | None = None) -> Example:
    return Example(0, torch.zeros(3, 168, 168, dtype=torch.uint8), "?", answer, kind, pair, ())


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
    with pytest.raises(ValueError, match="shorter"):
        grade_answers(examples, ["7"])
