"""eval without a server: what a dry run shows and refuses; the folder of an evaluation."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from tests.benchmarks.accuracy.minillava_server import answering
from tests.cli.evaluations import Call
from tests.offline_search.synthetic import endpoint
from vllm_autoprune.cli.main import main
from vllm_autoprune.tpdsl.loading import shipped_states


def test_a_dry_run_shows_the_first_questions_and_needs_no_server(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (call.folder / "questions.jsonl").read_text().splitlines()
    options = {"question": "Which colour?\nA. red\nB. blue", "answer": "B"}
    lines[2] = json.dumps({**options, "image": "b.png"})
    (call.folder / "questions.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(call.folder)
    words = ["eval", "--data", "questions.jsonl", "--dry-run"]
    assert main(words) == 0
    summary, question, *others = call.printed().out.split("\n\n")
    assert summary.splitlines() == [
        "questions.jsonl: 4 questions about 2 images, 4 with an answer",
        "cases: full, random@64, resized@64, norm@64, the server's own state",
        "5 cases x 4 questions: 20 requests, and another that decodes it for every answer that "
        "differs",
    ]
    assert question.splitlines()[1:] == [
        "  user: [image a.png, 8 x 8 pixels]",
        "  user: Which colour?",
        "  accepted (text): red",
    ]
    assert len(others) == 2 and "\n    B. blue" in others[1]
    for name in shipped_states():
        assert main([*words, "--json", "--state", name]) == 0
        record = json.loads(call.printed().out)
        assert record["requests"] >= 12 and not record["refused"]
    (message,) = record["first"][0]["messages"]
    picture, text = message["content"]
    assert picture == {"type": "image", "name": "a.png", "width": 8, "height": 8}
    assert (text["text"], record["first"][0]["answers"]) == ("Which colour?", ["red"])
    assert not (call.folder / "out").exists()


def test_a_dry_run_finds_what_an_evaluation_would_refuse(call: Call) -> None:
    line = {"image": "none.png", "question": "?", "answer": "x"}
    path = call.folder / "wrong.jsonl"
    path.write_text("\n".join([json.dumps(line)] * 3))
    for words, message in (
        (("--data", str(path)), ":1: image 'none.png': cannot be read"),
        (("--data", str(path), "--budgets", "9/8"), "--budgets: '9/8' is not a budget"),
        (("--data", str(path), "--bugdets", "8"), "-> see vllm-autoprune eval --help"),
    ):
        with contextlib.suppress(SystemExit):
            assert main(["eval", "--dry-run", *words]) == 1
        printed = call.printed().err
        assert printed.count(message) == 1 and printed.count("\n") == 1


def test_every_file_has_a_folder_of_its_own(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by its path below the current folder, or by the whole path."""
    for folder, name in (("a", "q.jsonl"), ("b", "q.jsonl"), ("b", "q.json")):
        path = call.folder / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((call.folder / "questions.jsonl").read_bytes())
    (call.folder / "work").mkdir()
    with endpoint(answering) as server:
        words = ["--server-url", server.url, "--budgets", "8", "--state", "norm"]
        words += ["--images", str(call.folder)]
        for start, data in (
            (call.folder, "a/q.jsonl"),
            (call.folder, "b/q.jsonl"),
            (call.folder, "b/q.json"),
            (call.folder / "work", "../a/q.jsonl"),
        ):
            monkeypatch.chdir(start)
            assert main(["eval", "--data", data, *words]) == 0
    pages = {path.parent for path in call.folder.rglob("report.html")}
    outside = Path("work/out/eval/_", *(call.folder / "a/q.jsonl").parts[1:])
    inside = [Path("out/eval", name) for name in ("a/q.jsonl", "b/q.jsonl", "b/q.json")]
    assert pages == {call.folder / folder for folder in (*inside, outside)}
