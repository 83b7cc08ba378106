"""Drawn requests: cache states, distributions, determinism by seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from benchmarks.load.requests import PictureSpec, Request, draw_requests
from benchmarks.load.workload import Cache, Workload, format_mix, parse_mix

BASE = Workload(model="m", requests=200, warm_up=5)


def of(cache: Cache, **changes: object) -> Workload:
    return BASE.model_copy(update={"cache": cache, **changes})


def drawn(requests: Sequence[Request]) -> list[PictureSpec]:
    pictures = [picture for request in requests for picture in request.pictures]
    assert all(isinstance(picture, PictureSpec) for picture in pictures)
    return [picture for picture in pictures if isinstance(picture, PictureSpec)]


def test_unique_images_and_questions_never_repeat() -> None:
    measured, warm_up = draw_requests(of("unique"))
    every = [*measured, *warm_up]
    seeds = [picture.seed for picture in drawn(every)]
    assert len(set(seeds)) == len(seeds) == 205
    assert len({request.question for request in every}) == 205


@pytest.mark.parametrize("cache", ["repeat", "off"])
def test_repeated_requests_follow_zipfs_law(cache: Cache) -> None:
    measured, _ = draw_requests(of(cache, requests=2000, pool=10, zipf=1.0))
    counts = Counter((request.pictures, request.question) for request in measured)
    assert len(counts) == 10
    first, second = (number for _, number in counts.most_common(2))
    assert first / 2000 == pytest.approx(1 / sum(1 / k for k in range(1, 11)), rel=0.15)
    assert first / second == pytest.approx(2, rel=0.25)


def test_same_image_has_a_new_question_each_time() -> None:
    measured, _ = draw_requests(of("same-image", pool=10))
    assert len({request.pictures for request in measured}) <= 10
    assert len({request.question for request in measured}) == 200


@pytest.mark.parametrize("cache", ["repeat", "off", "same-image"])
def test_warm_up_images_are_not_measured(cache: Cache) -> None:
    measured, warm_up = draw_requests(of(cache))
    shown = {picture.seed for picture in drawn(measured)}
    assert len(warm_up) == 5
    assert not shown & {picture.seed for picture in drawn(warm_up)}


def test_sizes_counts_formats_and_lengths_follow_their_mixes() -> None:
    measured, _ = draw_requests(
        of(
            "unique",
            requests=400,
            sides=((400, 1.0), (800, 3.0)),
            aspects=(("2/1", 1.0), ("1/2", 1.0)),
            images=((1, 1.0), (3, 1.0)),
            formats=(("png", 1.0),),
            words=((5, 1.0), (9, 1.0)),
        )
    )
    pictures = drawn(measured)
    sizes = Counter((picture.width, picture.height) for picture in pictures)
    assert set(sizes) == {(400, 200), (200, 400), (800, 400), (400, 800)}
    large = sum(number for size, number in sizes.items() if max(size) == 800)
    assert large / len(pictures) == pytest.approx(0.75, abs=0.06)
    assert {picture.format for picture in pictures} == {"png"}
    assert {len(request.pictures) for request in measured} == {1, 3}
    # The number of the question is one word more.
    assert {len(request.question.split()) for request in measured} == {6, 10}


def test_the_seed_determines_all_requests() -> None:
    assert draw_requests(of("repeat")) == draw_requests(of("repeat"))
    assert draw_requests(of("repeat")) != draw_requests(of("repeat", seed=1))


def test_numbered_questions_have_as_many_words_and_differ() -> None:
    measured, _ = draw_requests(of("unique", vocabulary="numbered", words=((4, 1.0),)))
    assert len({request.question for request in measured}) == 200
    assert all(len(request.question.split()) == 4 for request in measured)
    assert all(word[0] == "w" and word[1:].isdecimal() for word in measured[0].question.split())


def test_mixes_survive_a_round_trip() -> None:
    assert parse_mix("480=1,640=2.5,32", int) == ((480, 1.0), (640, 2.5), (32, 1.0))
    assert parse_mix(format_mix(BASE.sides), int) == BASE.sides
    with pytest.raises(ValidationError, match="weights above 0"):
        Workload(model="m", sides=((480, 0.0),))
    with pytest.raises(ValidationError, match="at least one value"):
        Workload(model="m", aspects=())
