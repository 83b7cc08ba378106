"""Arms take turns: the first turn only warms up, nothing is seen twice, ratios are of pairs."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import BenchmarkError
from benchmarks.cost import cells, clips, front_end
from benchmarks.cost.turns import Table, Turns, as_fields
from benchmarks.server import Server
from tests.fake_server import Body, Reply, fake_server

ARMS = ({"enabled": False}, {"budget": "1/8"})


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Works for a while, as a server does."""
    command = [
        sys.executable,
        "-c",
        "for _ in range(10**6): pass\nprint(flush=True)\ninput()",
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
        child.kill()


def test_arms_take_turns(
    process: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    got: list[tuple[object, str]] = []

    def reply(body: Body) -> Reply:
        entry = body["mm_processor_kwargs"]["autoprune"]
        text = body["messages"][0]["content"]
        got.append((entry, text[0]["text"]))
        return Reply(ttft=0.01 if "budget" in entry else 0.05, gaps=(0.001,))

    turns = Turns("pages")
    with fake_server(reply, model=None) as fake:
        server = Server(fake.url, "served", process, Path("log"))
        arms = dict(
            zip(("whole", "half"), ((server, as_fields(a)) for a in ARMS), strict=True)
        )
        for each, rounds in ((turns, 2), (Turns("later"), 0)):
            each.take(
                arms, 1, rounds, lambda seed: [{"type": "text", "text": str(seed)}]
            )
    # One that warms up and three times two; the order turns round each time.
    order = [ARMS.index(entry) for entry, _ in got[:-2]]
    assert order == [1, 0, *[0, 1, 1, 0] * 3]
    assert len({text for _, text in got}) == len(got)
    assert {name: len(taken) for name, taken in turns.seconds.items()} == {
        "whole": 6,
        "half": 6,
    }
    assert min(turns.ttft["whole"]) >= 0.05 > min(turns.ttft["half"]) >= 0.01
    assert all(0 <= work < 1 for work in turns.work["whole"])

    turns.seconds.update(whole=[0.5] * 6, half=[0.2, 0.2, 0.25, 0.25, 0.25, 0.3])
    turns.work.update(whole=[1.0] * 6, half=[1.1] * 6)
    capsys.readouterr()
    turns.write(Table(), {("whole", "half"): 1.5, ("whole", "absent"): None})
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    found = {row["what"]: row for row in rows if row["setting"] == "pages"}
    gain = found["throughput, half over whole"]
    work = found["processor time, half over whole"]
    assert (gain["value"], gain["verdict"]) == ("2", "at least 1.5: holds")
    assert (work["value"], work["verdict"]) == ("1.1", "at most 0.667: does not hold")
    assert len(found) == 2 and len(rows) == 8


def test_a_request_that_fails_ends_it(process: subprocess.Popen[bytes]) -> None:
    with fake_server(lambda body: Reply(status=500), model=None) as fake:
        server = Server(fake.url, "served", process, Path("log"))
        with pytest.raises(BenchmarkError, match=r"pages, whole: .*the engine is gone"):
            Turns("pages").take({"whole": (server, {})}, 1, 1, lambda seed: [])


def test_every_picture_and_clip_is_new() -> None:
    drawn = [
        cells._draw(kind, seed, 0.25).tobytes()
        for kind in cells._SIZES
        for seed in (0, 1)
    ]
    drawn += [str(clips.draw_clip(seed)).encode() for seed in (0, 1)]
    drawn += [str(front_end.draw_new(2, seed)).encode() for seed in (0, 255, 256)]
    assert len({*drawn}) == len(drawn) == 11
    ((video, _),) = [clips.draw_clip(0)]
    assert str(video).count(",") >= clips._FRAMES
