"""Scenes, pages, their questions and the held-out splits: what is asked is what is shown."""

from __future__ import annotations

import hashlib
import io
import random
import re
from itertools import combinations
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from benchmarks.yardsticks import examples, pages
from benchmarks.yardsticks.examples import CHECKPOINTS, Split, draw_examples
from benchmarks.yardsticks.pages import MERGE, TOKEN
from benchmarks.yardsticks.questions import BRIEF, CATEGORIES, KINDS, SEEN, UNSEEN, Model
from benchmarks.yardsticks.train_miniqwen import shrink_size


@pytest.mark.parametrize(
    ("model", "digest", "moments"),
    [
        ("minillava", "5044a14973a941c3", (143.0791, 43.6981, 143.0789)),
        ("miniqwen", "b7df90b44da06296", (167.1161, 64.5667, 167.1161)),
    ],
)
def test_the_splits_are_those_of_published_figures(
    model: Model, digest: str, moments: tuple[float, float, float]
) -> None:
    """The last bit of few pixels depends on the processor and the number of threads."""
    drawn = [example for name in get_args(Split) for example in draw_examples(name, 16, model)]
    parts = [(e.question, e.answer, e.kind, e.pair, e.evidence) for e in drawn]
    assert hashlib.sha256(repr(parts).encode()).hexdigest()[:16] == digest
    pixels = torch.cat([example.image.flatten() for example in drawn]).double()
    weights = torch.arange(len(pixels)) % 97
    places = (pixels * weights).mean() / weights.double().mean()
    figures = [float(part) for part in (pixels.mean(), pixels.std(), places)]
    assert figures == pytest.approx(moments, abs=1e-3)


@pytest.mark.parametrize("model", get_args(Model))
def test_splits_are_disjoint_and_only_the_test_split_is_new(model: Model) -> None:
    for seeds, others in combinations(examples.SEEDS.values(), 2):
        assert seeds.stop <= others.start or others.stop <= seeds.start
        assert max(seeds.stop, others.stop) <= 2**32
    drawn, few = draw_examples("test", 8, model), draw_examples("test", 3, model)
    for example, prefix in zip(drawn, few, strict=False):
        assert example.question == prefix.question and torch.equal(example.image, prefix.image)
    image = np.asarray(Image.open(io.BytesIO(examples.png(drawn[0].image))))
    assert torch.equal(torch.from_numpy(image.copy()).permute(2, 0, 1), drawn[0].image)
    each = 1 if model == "minillava" else 2
    for example in drawn:
        turn = example.image_id // each % 4
        assert (example.unseen_style, example.unseen_wording) == (turn == 1, turn == 3)
        if model == "miniqwen":
            _, height, width = example.image.shape
            unseen_size = pages.Size(height // TOKEN, width // TOKEN) in pages.UNSEEN_SIZES
            assert unseen_size == example.unseen_style
            assert example.kind in CATEGORIES[model]["pages" if example.image_id % 2 else "scenes"]
    seen = draw_examples("search", 4, model)
    assert not any(example.unseen_style or example.unseen_wording for example in seen)
    pairs: dict[int, list[str]] = {}
    for example in drawn:
        if example.pair is not None:
            pairs.setdefault(example.pair, []).append(example.answer)
    assert pairs and all(answers == ["yes", "no"] for answers in pairs.values())
    with pytest.raises(ValueError, match=r"must lie in 1\.\.5000"):
        draw_examples("test", 5001, model)


def test_every_kind_is_in_one_category_and_has_wordings_in_words_of_training() -> None:
    listed = {model: [k for kinds in CATEGORIES[model].values() for k in kinds]
              for model in get_args(Model)}  # fmt: skip
    assert sorted(listed["minillava"]) == sorted(KINDS)
    assert len(set(listed["miniqwen"])) == len(listed["miniqwen"])
    assert set(SEEN) == set(UNSEEN) == set(BRIEF) == {*KINDS, *CATEGORIES["miniqwen"]["pages"]}
    assert not any(set(SEEN[kind]) & set(UNSEEN[kind]) for kind in SEEN)
    known, new = (
        {word.lower() for kind in KINDS for text in wordings[kind]
         for word in re.findall(r"\{?\w+\}?", text)}
        for wordings in (SEEN, UNSEEN)
    )  # fmt: skip
    assert new <= known


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
    assert examples.is_right(answer, reference) is right


@pytest.mark.parametrize("divisor", [1, 2, 4, 8, 16])
def test_resizing_and_patches_are_those_of_the_processor(divisor: int) -> None:
    processor = AutoProcessor.from_pretrained(CHECKPOINTS["miniqwen"]).image_processor
    for size in (*pages.SIZES, *pages.UNSEEN_SIZES):
        budget = size.tokens // divisor
        seen = shrink_size(size, budget)
        assert seen.tokens <= budget
        images, _ = pages.render_pages([pages.draw_page(random.Random(3), "table", size)], 3)
        limits = {"shortest_edge": TOKEN * TOKEN, "longest_edge": budget * TOKEN * TOKEN}
        inputs = processor(images[0], size=limits, return_tensors="pt")
        assert inputs["image_grid_thw"].tolist() == [[1, seen.rows * MERGE, seen.columns * MERGE]]
        frames = inputs["pixel_values"].unflatten(1, (3, 2, -1))
        assert torch.equal(frames[:, :, 0], frames[:, :, 1])
        patches = pages.split_patches(pages.resize_images(images, seen))[0].flatten(0, 1).float()
        difference = (patches - frames[:, :, 0].flatten(1)).abs()
        # One of 256 levels is 0.015; torchvision resizes bytes in fixed-point arithmetic.
        assert difference.max() < 0.08 and difference.mean() < 0.01
