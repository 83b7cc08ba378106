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
    examples = [example for name in SPLITS for example in draw_examples(name, 4, model)]
    parts = [(e.question, e.answer, e.kind, e.pair, e.evidence) for e in examples]
    assert hashlib.sha256(repr(parts).encode()).hexdigest()[:16] == digest
    pixels = torch.cat([example.image.flatten() for example in examples]).double()
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
    for example, other in zip(smaller, larger, strict=False):
        assert (example.question, example.pair) == (other.question, other.pair)
        assert torch.equal(example.image, other.image)
    assert smaller[-1].image_id == 2
    image = np.asarray(Image.open(io.BytesIO(png(smaller[0].image))))
    assert torch.equal(torch.from_numpy(image.copy()).permute(2, 0, 1), smaller[0].image)
    for images in (0, 5001):
        with pytest.raises(ValueError, match=r"must lie in 1\.\.5000"):
            draw_examples("test", images, model)


def test_seed_ranges_never_touch_and_fit_the_generator() -> None:
    for seeds, others in combinations(SEEDS.values(), 2):
        assert seeds.stop <= others.start or others.stop <= seeds.start
    assert max(seeds.stop for seeds in SEEDS.values()) <= 2**32


def test_only_the_test_split_has_what_training_never_uses() -> None:
    scenes, pictures = draw_examples("test", 12), draw_examples("test", 8, "miniqwen")
    assert {e.image_id % 4 for e in scenes if e.unseen_style} == {1}
    assert {e.image_id % 4 for e in scenes if e.unseen_wording} == {3}
    assert {e.image_id for e in pictures if e.unseen_style} == {2, 3}
    assert {e.image_id for e in pictures if e.unseen_wording} == {6, 7}
    for example in (*pictures, *draw_examples("validation", 8, "miniqwen")):
        assert example.unseen_style == (image_size(example.image) in UNSEEN_SIZES)
        category = "pages" if example.image_id % 2 else "scenes"
        assert example.kind in CATEGORIES["miniqwen"][category]
    for split in ("search", "validation"):
        for model in MODELS:
            examples = draw_examples(split, 4, model)
            assert not any(e.unseen_style or e.unseen_wording for e in examples)
    assert not set(SIZES) & set(UNSEEN_SIZES)


@pytest.mark.parametrize("model", MODELS)
def test_pairs_hold_one_yes_and_one_no_about_one_image(model: Model) -> None:
    pairs: dict[int, list[Example]] = {}
    for example in draw_examples("test", 12, model):
        if example.pair is not None:
            pairs.setdefault(example.pair, []).append(example)
    assert len(pairs) >= 12
    for pair in pairs.values():
        assert sorted(example.answer for example in pair) == ["no", "yes"]
        assert len({(example.image_id, example.kind) for example in pair}) == 1


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


def test_grades_are_by_kind_and_by_pair() -> None:
    image = torch.zeros(3, 168, 168, dtype=torch.uint8)
    questions = [
        ("digit", "7", None), ("colour", "red", None), ("existence", "yes", 0),
        ("existence", "no", 0), ("position", "yes", 1), ("position", "no", 1),
        ("quarter", "upper left", None),
    ]  # fmt: skip
    examples = [Example(0, image, "?", answer, kind, pair, ()) for kind, answer, pair in questions]
    grades = grade_answers(examples, [" 7", " blue", " yes", " no", " yes", " yes", " upper left"])
    assert grades.accuracy == pytest.approx(5 / 7)
    assert grades.accuracy_plus == pytest.approx(1 / 2)
    assert grades.by_kind["position"] == pytest.approx(1 / 2) and "text" not in grades.by_kind
    with pytest.raises(ValueError, match="shorter"):
        grade_answers(examples, ["7"])
