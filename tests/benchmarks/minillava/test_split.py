"""The held-out split: deterministic, balanced, truthful, and scored as documented."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.minillava.questions import PAIR_KINDS
from benchmarks.minillava.scenes import COLOURS, EVALUATION_SEEDS, SHAPES, Thing, draw
from benchmarks.minillava.split import (
    LEARNT_KINDS,
    UNLEARNT_KINDS,
    Example,
    evaluation_split,
    png,
    scores,
)


@pytest.fixture(scope="module")
def split() -> list[Example]:
    return evaluation_split(24)


def _example(kind: str, answer: str, pair: int | None = None) -> Example:
    image = torch.zeros(3, 168, 168, dtype=torch.uint8)
    return Example(0, image, "?", answer, kind, pair, ())


def test_a_smaller_split_begins_a_larger_one(split: list[Example]) -> None:
    smaller = evaluation_split(3)

    assert [item.question for item in smaller] == [item.question for item in split[:45]]
    assert torch.equal(smaller[-1].image, split[44].image)


def test_another_seed_gives_another_split(split: list[Example]) -> None:
    other = evaluation_split(2, seed=1)

    assert not torch.equal(other[0].image, split[0].image)


def test_scene_counts_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.\.1000"):
        evaluation_split(1001)


def test_every_kind_is_asked_about_every_scene(split: list[Example]) -> None:
    for image_id in range(24):
        kinds = {item.kind for item in split if item.image_id == image_id}
        assert kinds == {*LEARNT_KINDS, *UNLEARNT_KINDS}


def test_pairs_hold_one_yes_and_one_no_about_one_image(split: list[Example]) -> None:
    pairs: dict[int, list[Example]] = {}
    for item in split:
        assert (item.pair is not None) == (item.kind in {*PAIR_KINDS, "position"})
        if item.pair is not None:
            pairs.setdefault(item.pair, []).append(item)

    assert len(pairs) == 24 * 4
    for both in pairs.values():
        assert sorted(item.answer for item in both) == ["no", "yes"]
        assert len({(item.image_id, item.kind) for item in both}) == 1


def _asked(things: Sequence[Thing], question: str) -> Thing:
    """The one thing that the question's own words single out."""
    named = [thing for thing in things if thing.name in question]
    if not named:
        named = [thing for thing in things if f"digit {thing.digit}" in question]
    (thing,) = named
    return thing


def _truth(item: Example, thing: Thing) -> str:
    """The right answer to a question that is about one thing."""
    if item.kind in {"digit", "colour", "shape"}:
        every = {"digit": str(thing.digit), "colour": COLOURS[thing.colour]}
        return every.get(item.kind, SHAPES[thing.shape])
    if item.kind == "position":
        row, column = divmod(thing.cell, 4)
        halves = ("upper" if row < 2 else "lower", "left" if column < 2 else "right")
        return "yes" if any(f" {half} half" in item.question for half in halves) else "no"
    if item.kind == "reading":
        return "yes" if str(thing.digit) in item.question else "no"
    return "yes"


def test_evidence_is_the_asked_thing_and_the_answer_is_true(split: list[Example]) -> None:
    for item in split:
        things = draw(EVALUATION_SEEDS[item.image_id], 1).scenes[0].things
        if item.kind == "existence" and item.answer == "no":
            assert not any(thing.name in item.question for thing in things)
            assert item.evidence == ()
        elif item.kind == "count":
            words = item.question.rstrip("?").split()
            found = [thing for thing in things if COLOURS[thing.colour] in words]
            assert item.answer == str(len(found))
            assert item.evidence == tuple(sorted(p for thing in found for p in thing.patches))
        else:
            thing = _asked(things, item.question)
            assert item.evidence == thing.patches
            assert item.answer == _truth(item, thing)


def test_png_keeps_every_pixel(split: list[Example]) -> None:
    image = np.asarray(Image.open(io.BytesIO(png(split[0].image))))

    assert torch.equal(torch.from_numpy(image.copy()).permute(2, 0, 1), split[0].image)


def test_scores_compare_first_words_and_need_both_of_a_pair() -> None:
    examples = [
        _example("digit", "7"),
        _example("colour", "red"),
        _example("existence", "yes", 0),
        _example("existence", "no", 0),
        _example("reading", "yes", 1),
        _example("reading", "no", 1),
        _example("position", "yes", 2),
        _example("count", "3"),
    ]
    answers = [" 7.", "Red, I think", "YES", "no", "yes", "yes", "no", ""]

    found = scores(examples, answers)

    assert found.accuracy == pytest.approx(5 / 6)
    assert found.accuracy_plus == pytest.approx(1 / 2)
    assert found.by_kind["reading"] == pytest.approx(1 / 2)
    assert found.by_kind["position"] == 0.0 and found.by_kind["count"] == 0.0


def test_scores_need_one_answer_an_example() -> None:
    with pytest.raises(ValueError, match="1 examples but 2 answers"):
        scores([_example("digit", "7")], ["7", "7"])
