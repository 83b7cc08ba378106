"""Tests of the mini-LLaVA suite on a fake server: requests, journal, resuming, valid reports."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from subprocess import Popen
from typing import NoReturn

import pytest

from benchmarks.accuracy.minillava import suite as module
from benchmarks.accuracy.minillava.cases import Family
from benchmarks.accuracy.minillava.model import find_model
from benchmarks.accuracy.minillava.suite import MiniLlavaSuite, Settings, build_suite
from benchmarks.server import ServerDied
from tests.benchmarks.accuracy.minillava.server import answering, arm, kept, reply
from tests.evaluation.samples import read_journal
from tests.offline_search.endpoint import Answer, Body, endpoint, error
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.journal import JOURNAL
from vllm_autoprune.evaluation.report import Report
from vllm_autoprune.evaluation.run import Progress, evaluate

SCENES = 2
MODEL = find_model("embedded")


def connect(url: str, *families: Family, name: str | None = None) -> MiniLlavaSuite:
    settings = Settings(url=url, served_name=name, max_in_flight=4, wait=0.01)
    return build_suite(MODEL, [8], families or ("random",), SCENES, settings)


def run(url: str, folder: Path, *families: Family, resume: bool = False) -> Report:
    progress = Progress(lambda line: None)
    return evaluate(connect(url, *families), folder, resume=resume, progress=progress)


def test_every_case_is_asked_every_question_once(tmp_path: Path) -> None:
    with endpoint(answering) as server:
        report = run(server.url, tmp_path, "random", "quota")
    assert report.valid, report.reasons
    per_case = report.questions
    states = ("cdpruner", "autoprune", *(f"ablation-quota-{quota}" for quota in (0, 1, 2, 4, 8)))
    every = dict.fromkeys(("full", "random", *states), per_case)
    assert Counter(map(arm, server.requests)) == every
    assert {kept(body) for body in server.requests} == {144, 8}
    full, random = report.row("full"), report.row("random@8")
    assert full is not None and random is not None
    assert full.all.acc == 100.0 and random.all.acc == 0.0
    assert random.to_full is not None and random.to_full.logprob is not None
    assert random.to_full.logprob.value == pytest.approx(-2.9)
    assert (tmp_path / "report.md").read_text().startswith("# Accuracy: minillava")
    assert json.loads((tmp_path / "report.json").read_text())["valid"] is True


def test_requests_about_one_image_are_close_to_each_other(tmp_path: Path) -> None:
    with endpoint(answering) as server:
        run(server.url, tmp_path, "quota")
    images = [body["messages"][0]["content"][0]["image_url"]["url"] for body in server.requests]
    turns = sum(before != after for before, after in pairwise(images))
    # Four are in flight, so a few of two neighbouring images may cross.
    assert len(set(images)) == SCENES and turns <= 1 + 2 * 4


def test_answered_questions_are_not_asked_again(tmp_path: Path) -> None:
    with endpoint(answering) as server:
        first = run(server.url, tmp_path)
        asked = len(server.requests)
        path = tmp_path / JOURNAL
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-3]) + lines[-3][:10])
        again = run(server.url, tmp_path, resume=True)
        assert len(server.requests) == asked + 3
        more = run(server.url, tmp_path, resume=True)
        assert len(server.requests) == asked + 3
    assert first == again == more


def test_a_journal_is_continued_only_with_resume(tmp_path: Path) -> None:
    with endpoint(answering) as server:
        run(server.url, tmp_path)
        with pytest.raises(ConfigError, match=r"already contains an evaluation.*--resume"):
            run(server.url, tmp_path)


def test_an_answer_that_continues_within_a_word_is_wrong(tmp_path: Path) -> None:
    def longer(body: Body, number: int) -> Answer:
        return reply(body, following="7" if arm(body) == "random" else ".")

    with endpoint(longer) as server:
        report = run(server.url, tmp_path)
    full, random = report.row("full"), report.row("random@8")
    assert full is not None and random is not None
    assert full.all.acc == 100.0 and random.all.acc == 0.0


def test_a_rejected_request_is_a_failure_not_a_wrong_answer(tmp_path: Path) -> None:
    def refusing(body: Body, number: int) -> Answer:
        return error(400, "no such budget") if arm(body) == "random" else answering(body, number)

    with endpoint(refusing) as server:
        report = run(server.url, tmp_path)
        asked = len(server.requests)
    assert not report.valid and report.row("random@8") is None and report.row("full") is not None
    assert any("requests failed" in r and "no such budget" in r for r in report.reasons)
    assert asked == 2 * report.questions
    with endpoint(answering) as server:
        resumed = run(server.url, tmp_path, resume=True)
        assert len(server.requests) == report.questions
    assert resumed.valid


def test_answers_of_a_server_that_dies_are_kept(tmp_path: Path) -> None:
    def dying(body: Body, number: int) -> Answer:
        if number >= 10:
            # From now on nothing answers, /v1/models no more than the rest.
            server.down = True
            return error(503, "gone")
        return answering(body, number)

    with endpoint(dying) as server:
        report = run(server.url, tmp_path)
    assert not report.valid and not report.rows
    assert any(r.startswith("stopped:") and "--resume" in r for r in report.reasons)
    kept_answers = sum(
        len(answers) for answers in read_journal(tmp_path / JOURNAL).answers.values()
    )
    assert kept_answers == 10
    with endpoint(answering) as server:
        whole = run(server.url, tmp_path, resume=True)
        assert len(server.requests) == 2 * whole.questions - 10
    assert whole.valid


@dataclass
class Started:
    """The part of a started server that the suite uses."""

    url: str
    log: Path
    process: Popen[bytes]


def test_a_failed_start_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(*arguments: object, **more: object) -> NoReturn:
        raise ServerDied("vllm serve ended with 1:\nline upon\nline of log")

    monkeypatch.setattr(module, "serve", dead)
    suite = build_suite(MODEL, [8], ["random"], SCENES, Settings(log=tmp_path / "server.log"))
    report = evaluate(suite, tmp_path, resume=False, progress=Progress(lambda line: None))
    reason = f"stopped: vllm serve ended with 1 (log: {tmp_path}/server.log)"
    assert not report.valid and report.reasons[-1].startswith(reason)


def test_a_started_server_that_ends_is_reported_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(body: Body, number: int) -> Answer:
        server.down = True
        return error(503, "gone")

    @contextmanager
    def ended(*arguments: object, **more: object) -> Iterator[Started]:
        process = Popen([sys.executable, "-c", "raise SystemExit(7)"])
        process.wait()
        yield Started(server.url, tmp_path / "server.log", process)

    monkeypatch.setattr(module, "serve", ended)
    with endpoint(dying) as server:
        suite = build_suite(MODEL, [8], ["random"], SCENES, Settings(max_in_flight=4, wait=0.01))
        report = evaluate(suite, tmp_path, resume=False, progress=Progress(lambda line: None))
    assert "vllm serve ended with 7" in report.reasons[-1] and "--resume" in report.reasons[-1]


def test_a_server_that_is_down_is_reported_before_any_request(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        run("http://127.0.0.1:9", tmp_path)


def test_a_server_with_another_model_is_refused(tmp_path: Path) -> None:
    with endpoint(answering) as server:
        wrong = connect(server.url, name="llava")
        with pytest.raises(ConfigError, match="serves m -> serve llava"):
            evaluate(wrong, tmp_path, resume=False, progress=Progress(lambda line: None))
        assert not server.requests


def test_a_server_that_prunes_nothing_makes_the_report_invalid(tmp_path: Path) -> None:
    def whole(body: Body, number: int) -> Answer:
        return reply(body, tokens=144)

    with endpoint(whole) as server:
        report = run(server.url, tmp_path)
    assert not report.valid
    assert "random@8: a prompt has 164 tokens instead of 164 - 136" in report.reasons[0]


def test_the_plan_names_the_server_and_counts_requests() -> None:
    command, count = connect("http://h").plan()
    assert "http://h" in command and count.startswith("2 cases x ")
    started = build_suite(MODEL, [8], ["random"], 1, Settings()).plan()[0]
    assert "--autoprune-requests states" in started and "--autoprune-text-tower" in started


def test_progress_reports_the_remaining_time() -> None:
    now, lines = [0.0], list[str]()
    progress = Progress(lines.append, clock=lambda: now[0])
    progress.begin(100, earlier=20)
    now[0] = 20.0
    progress.advance(40)
    assert lines == ["20 of 100 are recorded already", " 60%  60 of 100, 2/s, 20 s left"]
