"""The tables of clips, on a server of known answers."""

from __future__ import annotations

import base64
import contextlib
import csv
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from benchmarks.accuracy import clips
from tests.benchmarks.accuracy.minillava_server import arm, asked, reply
from tests.fake_server import Answer, Body
from tests.offline_search.synthetic import endpoint


def test_methods_are_beside_fewer_and_smaller_frames_and_more_frames_beside_eight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(body: Body) -> tuple[int, int]:
        """Frames of a request, and their side in pixels."""
        _, *frames = body["messages"][0]["content"][0]["video_url"]["url"].split(",")
        return len(frames), Image.open(io.BytesIO(base64.b64decode(frames[0]))).width

    def answer(body: Body, number: int) -> Answer:
        if len(body["messages"]) == 1:  # asks what is refused
            return reply(body, tokens=0)
        (frames, side) = shown(body)
        name = arm(body)
        seen = side >= 84 or "digit" in str(body["messages"])
        right = frames >= 8 and seen and name != "random"
        budget = body["mm_processor_kwargs"]["autoprune"].get("video_budget")
        right &= (name, budget) != ("evs", "1/8") and (name, frames, budget) != (
            "vcast",
            8,
            144,
        )
        return reply(body, right=right, tokens=side)

    words = ["clips", "--clips", "1", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    with endpoint(answer) as server:

        @contextlib.contextmanager
        def serve(*words: object, **more: object) -> Iterator[SimpleNamespace]:
            yield SimpleNamespace(url=server.url)

        monkeypatch.setattr(clips, "serve", serve)
        assert clips.main() == 0
        count = len(asked(server.requests))
        sizes = {shown(body) for body in asked(server.requests)}
        printed = capsys.readouterr().out
        assert clips.main() == 0
        assert count == len(asked(server.requests)), (
            "what was answered is not asked again"
        )
        assert printed == capsys.readouterr().out
    assert sizes == {(n, 168) for n in (1, 2, 4, 8, 16, 32, 64)} | {
        (8, s) for s in (112, 84, 56)
    }
    rows = {
        (row["what"], row["setting"]): float(row["value"])
        for row in csv.DictReader(printed.splitlines())
    }
    assert rows["right", "8 frames, all tokens; full; all"] == 100
    for share in ("1/2", "1/4", "1/8", "1/16"):
        where = f"8 frames, K = {share}"
        names = ("vcast", "fewer frames", "random keep", "norm", "evs")
        right = [rows["right", f"{where}; {name}; all"] for name in names]
        assert right == [100, 0, 0, 100, 0 if share == "1/8" else 100]
        assert rows["right less fewer frames", f"{where}; vcast; appears"] == 100
        assert rows["right less norm", f"{where}; evs; all"] == right[-1] - 100
        assert rows["prompt", f"{where}; norm; all"] == 20 + 168
    for share, moves in (("1/2", 100), ("1/4", 100), ("1/8", 0)):
        small = f"8 frames, K = {share}; lower resolution"
        assert rows["right less fewer frames", f"{small}; still"] == 100
        assert rows["right", f"{small}; moves"] == moves
        assert rows["right less norm", f"{small}; moves"] == moves - 100
    more = "right less vcast of 8 frames"
    for budget, better in ((72, 0), (144, 100), (288, 0)):
        where = f"clips of 64 frames, K = {budget}"
        assert rows["right", f"{where}; vcast of 8 frames; all"] == 100 - better
        assert rows[more, f"{where}; vidcom2 of 64 frames; all"] == better
        assert (more, f"{where}; vcast of 8 frames; all") not in rows
    assert (
        rows["right", "clips of 64 frames, all tokens; full of 32 frames; all"] == 100
    )
