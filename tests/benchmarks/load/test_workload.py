"""What is sent and when: schedules, cache states, mixes, bodies, images of one's own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks import BenchmarkError
from benchmarks.load.settings import Load, Workload
from benchmarks.load.workload import (
    Prepared,
    _draw_requests,
    _Picture,
    _Request,
    prepare,
)
from tests.tables import parametrize_from_file


def test_arrivals_are_poisson_and_come_at_exactly_the_rate() -> None:
    gaps = np.diff(Load(rate=5.0).due(20_000))
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.05)
    # The pattern is the same at every rate, only faster; another seed has another.
    slow, fast = (Load(rate=rate, seed=3).due(50) for rate in (1.0, 4.0))
    assert np.allclose(slow, 4 * np.array(fast))
    assert not np.allclose(slow, Load(rate=1.0, seed=4).due(50))
    measured = Load(rate=6.0).due(100)[5:]  # behind the ramp
    assert 94 / (measured[-1] - measured[0]) == pytest.approx(6.0) and gaps.min() >= 0


def test_ramp_and_drain_do_not_count() -> None:
    closed = Load(users=3)
    assert closed.select_measured(20) == [False] * 3 + [True] * 14 + [False] * 3
    assert closed.due(3) == [0.0, 0.0, 0.0]
    assert Load(rate=2.0).select_measured(40) == [False] * 2 + [True] * 38
    # Where nothing would remain, everything counts.
    assert all(Load(users=16).select_measured(20))


def draw(cache: str, **changes: object) -> tuple[list[_Request], list[_Request]]:
    """The measured requests, and those of the warm-up."""
    values = {"model": "m", "requests": 200, "warm_up": 5, "cache": cache, **changes}
    workload = Workload.model_validate(values)
    requests = _draw_requests(workload)
    return requests[: workload.requests], requests[workload.requests :]


def pictures_of(requests: Sequence[_Request]) -> list[_Picture]:
    return [picture for request in requests for picture in request.pictures]


@parametrize_from_file("cache", "images", "questions")
def test_what_repeats_is_the_declared_state_of_the_caches(
    cache: str, images: int, questions: int
) -> None:
    measured, warm_up = draw(cache, pool=10)
    every = [*measured, *warm_up]
    assert (
        len(set(pictures_of(every)))
        == len({p.seed for p in pictures_of(every)})
        == images
    )
    assert len({request.question for request in every}) == questions
    # The warm-up shares no image.
    assert len(warm_up) == 5 and not set(pictures_of(measured)) & set(
        pictures_of(warm_up)
    )


def test_draws_follow_their_mixes_and_zipfs_law() -> None:
    measured, _ = draw("unique", requests=400, sides="400,800=3", images="1,3")
    pictures = pictures_of(measured)
    large = sum(max(picture.width, picture.height) == 800 for picture in pictures)
    assert large / len(pictures) == pytest.approx(0.75, abs=0.06)
    assert {(800, 600), (600, 800), (800, 800), (800, 450)} <= {
        p[1:3] for p in pictures
    }
    assert {len(request.pictures) for request in measured} == {1, 3}
    # The number of the question is one word more.
    assert {len(request.question.split()) for request in measured} == {9, 17, 33}
    counts = Counter(draw("repeat", requests=2000, pool=10, zipf=1.0)[0])
    most, second = (number for _, number in counts.most_common(2))
    assert most / 2000 == pytest.approx(1 / sum(1 / k for k in range(1, 11)), rel=0.15)
    assert most / second == pytest.approx(2, rel=0.25)


def test_bodies_are_streamed_chat_requests(tmp_path: Path) -> None:
    small = Workload(
        model="mock", requests=8, warm_up=2, output_tokens=4, sides={64: 1}
    )
    prepared = prepare(small, tmp_path / "w")
    assert (len(prepared.measured), len(prepared.warm_up)) == (8, 2)
    body = json.loads(prepared.measured[3])
    picture, question = body["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/")
    assert question == {"type": "text", "text": _draw_requests(small)[3].question}
    assert (body["model"], body["max_tokens"]) == ("mock", 4)
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True
    plain = prepare(small.model_copy(update={"dialect": "openai"}), tmp_path)
    assert (
        not {"ignore_eos", "skip_special_tokens"} & json.loads(plain.measured[0]).keys()
    )


def test_equal_settings_give_equal_bytes(tmp_path: Path) -> None:
    # Of a published row of docs/data/load.csv; another digest would be another measurement.
    published = Workload(
        model="m", requests=6, sides={336: 1}, output_tokens=4, warm_up=2
    )
    assert prepare(published, tmp_path / "a").digest == "0a90decdeb62e593"
    numbered = published.model_copy(update={"vocabulary": "numbered"})  # as many words
    questions = [request.question.split() for request in _draw_requests(numbered)]
    assert {len(words) for words in questions} <= {8, 16, 32}


def test_a_missing_folder_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"python -m benchmarks\.load prepare"):
        Prepared.read(tmp_path / "nowhere")
