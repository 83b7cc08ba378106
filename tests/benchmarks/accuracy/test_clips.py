"""The tables of clips, on a server of known answers."""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from PIL import Image

from benchmarks.accuracy import clips
from tests.benchmarks.accuracy.minillava_server import arm, asked, reply
from tests.fake_server import Answer, Body
from tests.offline_search.synthetic import endpoint
from tests.tables import parametrize_from_file

Rows = dict[tuple[str, str], float]
"""Figures by what they are of and their setting."""


def describe(body: Body) -> tuple[int, int]:
    """Frames of a request, and their side in pixels."""
    _, *frames = body["messages"][0]["content"][0]["video_url"]["url"].split(",")
    return len(frames), Image.open(io.BytesIO(base64.b64decode(frames[0]))).width


def answer(body: Body, number: int) -> Answer:
    """Right with eight frames or more; digits are seen at any size."""
    if len(body["messages"]) == 1:  # asks what is refused
        return reply(body, tokens=0)
    (frames, side) = describe(body)
    name = arm(body)
    seen = side >= 84 or "digit" in str(body["messages"])
    budget = body["mm_processor_kwargs"]["autoprune"].get("video_budget")
    exceptions = {("evs", 8, "1/8"), ("vcast", 8, 144)}
    correct = frames >= 8 and seen and name != "random"
    correct &= (name, frames, budget) not in exceptions
    return reply(body, right=correct, tokens=side)


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[tuple[str, list[Body]]]]:
    """What the command printed and asked for so far, when it ran first and again."""
    folder = tmp_path_factory.mktemp("clips")
    results = list[tuple[str, list[Body]]]()
    with endpoint(answer) as server, pytest.MonkeyPatch.context() as monkeypatch:

        @contextlib.contextmanager
        def serve(*words: object, **more: object) -> Iterator[SimpleNamespace]:
            yield SimpleNamespace(url=server.url)

        monkeypatch.setattr(clips, "serve", serve)
        words = ["clips", "--clips", "1", "--out", str(folder)]
        monkeypatch.setattr("sys.argv", words)
        handler = signal.getsignal(signal.SIGTERM)
        for _ in range(2):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                assert clips.main() == 0
            results.append((printed.getvalue(), asked(server.requests)))
        signal.signal(signal.SIGTERM, handler)
        yield results


@pytest.fixture(scope="module")
def rows(runs: list[tuple[str, list[Body]]]) -> Rows:
    table = csv.DictReader(runs[0][0].splitlines())
    return {(row["what"], row["setting"]): float(row["value"]) for row in table}


def test_what_was_answered_is_not_asked_again(
    runs: list[tuple[str, list[Body]]],
) -> None:
    (printed, requests), (again, all_requests) = runs
    assert printed == again and len(requests) == len(all_requests) > 0
    counts = {(n, 168) for n in (1, 2, 4, 8, 16, 32, 64)}
    assert {describe(body) for body in requests} == counts | {
        (8, side) for side in (112, 84, 56)
    }


@pytest.mark.parametrize("share", ["1/2", "1/4", "1/8", "1/16"])
def test_methods_are_beside_fewer_frames_and_the_norm(rows: Rows, share: str) -> None:
    where = f"8 frames, K = {share}"
    names = ("vcast", "fewer frames", "random keep", "norm", "evs")
    correct = [rows["right", f"{where}; {name}; all"] for name in names]
    assert correct == [100, 0, 0, 100, 0 if share == "1/8" else 100]
    assert rows["right less fewer frames", f"{where}; vcast; appears"] == 100
    assert rows["right less norm", f"{where}; evs; all"] == correct[-1] - 100
    assert rows["prompt", f"{where}; norm; all"] == 20 + 168


@pytest.mark.parametrize(("share", "moves"), [("1/2", 100), ("1/4", 100), ("1/8", 0)])
def test_smaller_frames_are_a_method_too(rows: Rows, share: str, moves: int) -> None:
    small = f"8 frames, K = {share}; lower resolution"
    assert rows["right less fewer frames", f"{small}; still"] == 100
    assert rows["right", f"{small}; moves"] == moves
    assert rows["right less norm", f"{small}; moves"] == moves - 100


@pytest.mark.parametrize(("budget", "better"), [(72, 0), (144, 100), (288, 0)])
def test_more_frames_are_beside_eight(rows: Rows, budget: int, better: int) -> None:
    gain = "right less vcast of 8 frames"
    where = f"clips of 64 frames, K = {budget}"
    assert rows["right", f"{where}; vcast of 8 frames; all"] == 100 - better
    assert rows[gain, f"{where}; vidcom2 of 64 frames; all"] == better
    assert (gain, f"{where}; vcast of 8 frames; all") not in rows


@parametrize_from_file("setting")
def test_with_all_tokens_every_answer_is_right(rows: Rows, setting: str) -> None:
    assert rows["right", setting] == 100
