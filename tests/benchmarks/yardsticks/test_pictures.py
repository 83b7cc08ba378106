"""Scenes, pages, their questions and the held-out splits: what is asked is what is shown."""

from __future__ import annotations

import hashlib
import io
import random
from dataclasses import replace
from itertools import combinations
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from benchmarks.yardsticks import pages
from benchmarks.yardsticks.examples import CHECKPOINTS, SEEDS, Split, draw_examples
from benchmarks.yardsticks.pages import MERGE, TOKEN
from benchmarks.yardsticks.questions import Model


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


@pytest.mark.parametrize("model", ["minillava", "miniqwen"])
def test_clean_pictures_are_the_same_without_grain(model: Model) -> None:
    grained, clean = (draw_examples("test", 4, model, clean=clean) for clean in (False, True))
    assert [e.question for e in grained] == [e.question for e in clean]
    for example, other in zip(grained, clean, strict=True):
        grain = example.image.double() - other.image
        assert 4 < grain[grain != 0].std() < 6 and abs(float(grain.mean())) < 2
    if model == "miniqwen":
        assert len(clean[-1].image.flatten(1).unique(dim=1).T) < 200, "a page has few colours"


def test_splits_are_disjoint_and_fewer_images_are_the_first_ones() -> None:
    for seeds, others in combinations(SEEDS.values(), 2):
        assert max(seeds.start, others.start) >= min(seeds.stop, others.stop)
        assert max(seeds.stop, others.stop) <= 2**32
    drawn, few = draw_examples("test", 3), draw_examples("test", 1)
    assert [e.question for e in few] == [e.question for e in drawn if e.image_id == 0]
    image = np.asarray(Image.open(io.BytesIO(drawn[0].png)))
    assert torch.equal(torch.from_numpy(image.copy()).permute(2, 0, 1), few[0].image)


def test_answers_must_start_with_all_words_of_the_reference() -> None:
    (example, *_) = draw_examples("test", 1)
    for answer, reference in (
        (" 4821", "4821"),
        (" Upper left.", "upper left"),
        ("YES, it", "yes"),
    ):
        assert replace(example, answer=reference).is_right(answer)
    for answer, reference in ((" 482", "4821"), (" upper right", "upper left"), ("", "3")):
        assert not replace(example, answer=reference).is_right(answer)


@pytest.mark.parametrize("divisor", [1, 4, 16])
def test_resizing_and_patches_are_those_of_the_processor(divisor: int) -> None:
    processor = AutoProcessor.from_pretrained(CHECKPOINTS["miniqwen"]).image_processor
    for size in (*pages.SIZES, *pages.UNSEEN_SIZES):
        budget = size.tokens // divisor
        seen = size.limit(budget)
        assert seen.tokens <= budget
        images, _ = pages.render_pages([pages.Page.draw(random.Random(3), "table", size)], 3)
        limits = {"shortest_edge": TOKEN * TOKEN, "longest_edge": budget * TOKEN * TOKEN}
        inputs = processor(images[0], size=limits, return_tensors="pt")
        assert inputs["image_grid_thw"].tolist() == [[1, seen.rows * MERGE, seen.columns * MERGE]]
        frames = inputs["pixel_values"].unflatten(1, (3, 2, -1))
        patches = seen.split_patches(images)[0].flatten(0, 1).float()
        difference = (patches[:, None] - frames.transpose(1, 2).flatten(2)).abs()
        # One of 256 levels is 0.015; torchvision resizes bytes in fixed-point arithmetic.
        assert difference.max() < 0.08 and difference.mean() < 0.01
