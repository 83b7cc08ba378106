"""The suite against a server that is told what to say: what is asked, recorded and believed."""

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

from benchmarks.accuracy.journal import JOURNAL, read
from benchmarks.accuracy.minillava import suite as module
from benchmarks.accuracy.minillava.cases import Family
from benchmarks.accuracy.minillava.model import find
from benchmarks.accuracy.minillava.suite import MiniLlavaSuite, Settings, suite
from benchmarks.accuracy.progress import Progress
from benchmarks.accuracy.report import Report
from benchmarks.accuracy.run import evaluate
from benchmarks.server import ServerDied
from tests.benchmarks.accuracy.minillava.server import answering, arm, kept, reply
from tests.offline_search.endpoint import Answer, Body, endpoint, error
from vllm_autoprune.errors import ConfigError

SCENES = 2
MODEL = find("embedded")


def made(url: str, *families: Family, name: str | None = None) -> MiniLlavaSuite:
    settings = Settings(url=url, served_name=name, at_once=4, wait=0.01)
    return suite(MODEL, [8], families or ("random",), SCENES, settings)


def run(url: str, folder: Path, *families: Family, resume: bool = False) -> Report:
    said: list[str] = []
    return evaluate(made(url, *families), folder, resume=resume, progress=Progress(said.append))


def test_every_case_is_asked_every_question_once(tmp_path: Path) -> None:
    with endpoint(answering) as told:
        report = run(told.url, tmp_path, "random", "quota")
    assert report.valid, report.reasons
    per_case = report.questions
    states = ("cdpruner", "autoprune", *(f"ablation-quota-{quota}" for quota in (0, 1, 4)))
    every = dict.fromkeys(("full", "random", *states), per_case)
    assert Counter(map(arm, told.asked)) == every
    assert {kept(body) for body in told.asked} == {144, 8}
    full, random = report.of("full"), report.of("random@8")
    assert full is not None and random is not None
    assert full.all.acc == 100.0 and random.all.acc == 0.0
    assert random.to_full is not None and random.to_full.logprob is not None
    assert random.to_full.logprob.value == pytest.approx(-2.9)
    assert (tmp_path / "report.md").read_text().startswith("# Accuracy: minillava")
    assert json.loads((tmp_path / "report.json").read_text())["valid"] is True


def test_requests_about_one_image_are_near_each_other(tmp_path: Path) -> None:
    with endpoint(answering) as told:
        run(told.url, tmp_path, "policies")
    images = [body["messages"][0]["content"][0]["image_url"]["url"] for body in told.asked]
    turns = sum(before != after for before, after in pairwise(images))
    # Four are in flight, so a few of two neighbouring images may cross.
    assert len(set(images)) == SCENES and turns <= 1 + 2 * 4


def test_what_is_answered_is_not_asked_again(tmp_path: Path) -> None:
    with endpoint(answering) as told:
        first = run(told.url, tmp_path)
        asked = len(told.asked)
        path = tmp_path / JOURNAL
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-3]) + lines[-3][:10])
        again = run(told.url, tmp_path, resume=True)
        assert len(told.asked) == asked + 3
        more = run(told.url, tmp_path, resume=True)
        assert len(told.asked) == asked + 3
    assert first == again == more


def test_a_journal_is_not_gone_on_with_unasked(tmp_path: Path) -> None:
    with endpoint(answering) as told:
        run(told.url, tmp_path)
        with pytest.raises(ConfigError, match=r"holds an evaluation already.*--resume"):
            run(told.url, tmp_path)


def test_a_word_that_goes_on_is_another_answer(tmp_path: Path) -> None:
    def longer(body: Body, number: int) -> Answer:
        return reply(body, after="7" if arm(body) == "random" else ".")

    with endpoint(longer) as told:
        report = run(told.url, tmp_path)
    full, random = report.of("full"), report.of("random@8")
    assert full is not None and random is not None
    assert full.all.acc == 100.0 and random.all.acc == 0.0


def test_a_refused_request_is_a_failure_and_no_wrong_answer(tmp_path: Path) -> None:
    def refusing(body: Body, number: int) -> Answer:
        return error(400, "no such budget") if arm(body) == "random" else answering(body, number)

    with endpoint(refusing) as told:
        report = run(told.url, tmp_path)
        asked = len(told.asked)
    assert not report.valid and report.of("random@8") is None and report.of("full") is not None
    assert any("requests failed" in r and "no such budget" in r for r in report.reasons)
    assert asked == 2 * report.questions
    with endpoint(answering) as told:
        fixed = run(told.url, tmp_path, resume=True)
        assert len(told.asked) == report.questions
    assert fixed.valid


def test_a_server_that_dies_leaves_what_it_answered(tmp_path: Path) -> None:
    def dying(body: Body, number: int) -> Answer:
        if number >= 10:
            # From now on nothing answers, /v1/models no more than the rest.
            told.down = True
            return error(503, "gone")
        return answering(body, number)

    with endpoint(dying) as told:
        report = run(told.url, tmp_path)
    assert not report.valid and not report.rows
    assert any(r.startswith("stopped:") and "--resume" in r for r in report.reasons)
    kept_answers = sum(len(found) for found in read(tmp_path / JOURNAL).answers.values())
    assert kept_answers == 10
    with endpoint(answering) as told:
        whole = run(told.url, tmp_path, resume=True)
        assert len(told.asked) == 2 * whole.questions - 10
    assert whole.valid


@dataclass
class Started:
    """As much of a started server as the suite looks at."""

    url: str
    log: Path
    process: Popen[bytes]


def test_a_server_that_does_not_start_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(*arguments: object, **more: object) -> NoReturn:
        raise ServerDied("vllm serve ended with 1:\nline upon\nline of log")

    monkeypatch.setattr(module, "serve", dead)
    made_here = suite(MODEL, [8], ["random"], SCENES, Settings(log=tmp_path / "server.log"))
    report = evaluate(made_here, tmp_path, resume=False, progress=Progress(lambda line: None))
    told = f"stopped: vllm serve ended with 1 (log: {tmp_path}/server.log)"
    assert not report.valid and report.reasons[-1].startswith(told)


def test_a_started_server_that_ends_is_told_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(body: Body, number: int) -> Answer:
        told.down = True
        return error(503, "gone")

    @contextmanager
    def ended(*arguments: object, **more: object) -> Iterator[Started]:
        process = Popen([sys.executable, "-c", "raise SystemExit(7)"])
        process.wait()
        yield Started(told.url, tmp_path / "server.log", process)

    monkeypatch.setattr(module, "serve", ended)
    with endpoint(dying) as told:
        made_here = suite(MODEL, [8], ["random"], SCENES, Settings(at_once=4, wait=0.01))
        report = evaluate(made_here, tmp_path, resume=False, progress=Progress(lambda line: None))
    assert "vllm serve ended with 7" in report.reasons[-1] and "--resume" in report.reasons[-1]


def test_a_server_that_is_down_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        run("http://127.0.0.1:9", tmp_path)


def test_another_model_is_told(tmp_path: Path) -> None:
    with endpoint(answering) as told:
        wrong = made(told.url, name="llava")
        with pytest.raises(ConfigError, match="serves m -> serve llava"):
            evaluate(wrong, tmp_path, resume=False, progress=Progress(lambda line: None))
        assert not told.asked


def test_a_server_that_prunes_nothing_is_not_believed(tmp_path: Path) -> None:
    def whole(body: Body, number: int) -> Answer:
        return reply(body, tokens=144)

    with endpoint(whole) as told:
        report = run(told.url, tmp_path)
    assert not report.valid
    assert "random@8: a prompt of 164 tokens where 164 - 136 were due" in report.reasons[0]


def test_the_plan_names_the_server_and_counts_requests() -> None:
    command, count = made("http://h").plan()
    assert "http://h" in command and count.startswith("2 cases x ")
    started = suite(MODEL, [8], ["random"], 1, Settings()).plan()[0]
    assert "--autoprune-requests states" in started and "--autoprune-text-tower" in started


def test_progress_tells_how_long_still() -> None:
    now, said = [0.0], list[str]()
    progress = Progress(said.append, clock=lambda: now[0])
    progress.begin(100, before=20)
    now[0] = 20.0
    progress.advance(40)
    assert said == ["20 of 100 are there already", " 60%  60 of 100, 2/s, 20 s left"]
