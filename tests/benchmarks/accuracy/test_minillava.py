"""Accuracy of mini-LLaVA: cases, questions, and runs on a fake server, from the command line."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from benchmarks.accuracy import minillava as module
from benchmarks.accuracy.minillava import (
    BUDGETS,
    FAMILIES,
    Family,
    MiniLlavaSuite,
    build_cases,
    find_model,
    main,
    prepare_questions,
)
from benchmarks.common.fake_server import Answer, Body
from benchmarks.server import ServerDied
from benchmarks.yardsticks.minillava import MiniLlava
from tests.benchmarks.accuracy.minillava_server import answering, arm, asked, kept, reply
from tests.offline_search.endpoint import MODELS, endpoint, error
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.journal import JOURNAL, MME, Journal
from vllm_autoprune.evaluation.questions import questions_digest
from vllm_autoprune.evaluation.report import Report
from vllm_autoprune.evaluation.run import Progress, Settings, evaluate, residual_on
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "benchmarks.md").read_text()
SMALL = ["--scenes", "1", "--budgets", "8", "--cases", "random"]


def test_the_paper_s_tables_by_default() -> None:
    cases = build_cases(144, BUDGETS, FAMILIES)
    assert Counter(case.arm for case in cases) == {
        "full": 1, "random": 5, "resized": 5, "base": 80, "autoprune": 80, "found": 10,
        "quota": 29,
    }  # fmt: skip
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) and names[0] == "full"
    assert all(case.base in names for case in cases if case.base)
    assert not any(case.refused for case in cases)
    assert {case.quota for case in cases if case.arm == "quota"} == {0, 1, 2, 4, 8, 16, 32}
    assert {case.quota for case in cases if case.arm == "autoprune"} == {2}
    # With q_e = 2 and K = 1 the quota shrinks; no case is skipped silently.
    policies = len(BASE_POLICIES) - len(MiniLlava.equal_policies)
    assert len(build_cases(144, [1], ["policies"])) == 1 + 2 * policies
    assert [case.name for case in build_cases(144, [8], ["quota"])] == [
        "full", "cdpruner@8", "cdpruner+autoprune@8",
        *(f"quota-{quota}@8" for quota in (0, 1, 2, 4, 8)),
    ]  # fmt: skip


def test_the_residual_is_the_shipped_one_on_every_base_policy() -> None:
    source = load_state("autoprune")
    for policy in BASE_POLICIES:
        state = residual_on(policy)
        assert state.base_policy.name == policy
        state = state.model_copy(update={"base_policy": source.base_policy})
        assert state.digest == source.digest


def test_no_base_policy_keeps_the_tokens_of_another() -> None:
    yardstick = MiniLlava()
    tokens = yardstick.encode(yardstick.draw("test", 1)).tokens
    picks = {}
    for case in build_cases(144, [18], ["policies"]):
        if case.arm == "base":
            policy = BASE_POLICIES[case.label]
            chosen = policy.select(policy.default_params, tokens, 18).picks.sort(1).values
            picks[case.label] = tuple(chosen.flatten().tolist())
    assert [pair for pair in combinations(picks, 2) if picks[pair[0]] == picks[pair[1]]] == []
    assert len(picks) > 10


def test_one_command_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with endpoint(answering) as server:
        call = ["--server-url", server.url, "--out", str(tmp_path)]
        assert main([*call, *SMALL]) == 0
        captured = capsys.readouterr()
        assert "### K = 8" in captured.out and "100%" in captured.err
        assert main([*call, *SMALL, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["valid"] is True
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"report.html", "report.json", "report.md", "samples.jsonl"}


def test_the_calls_in_the_docs_say_what_they_would_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = re.findall(r"^python -m benchmarks\.accuracy\.minillava(.*)", PAGE, re.MULTILINE)
    assert calls
    for call in (*map(shlex.split, calls), ["--server-url", "http://h"]):
        assert main([*call, "--dry-run", "--out", str(tmp_path / "out"), *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "--autoprune-requests states" in printed and "--autoprune-text-tower" in printed
    assert "http://h" in printed and "2 cases x " in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["--model", "/nowhere"], "has no llava/config.json -> use embedded, or"),
        (["--budgets", "144", "0"], "--budgets 144 0: are not within 1..143"),
    ],
)
def test_a_run_that_cannot_start_says_why(
    call: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(call) == 1
    assert message in capsys.readouterr().err


def test_questions_are_those_of_the_test_split() -> None:
    few, questions = prepare_questions(1), prepare_questions(2)
    assert list(questions[: len(few)]) == list(few)
    assert questions_digest(few) != questions_digest(questions)
    assert {question.record.image for question in questions} == {"0", "1"}
    assert all(question.image.startswith("data:image/png;base64,") for question in questions)
    paired = [question for question in questions if question.record.benchmark == MME]
    assert {question.answer for question in paired} == {"yes", "no"}
    assert all(question.record.category and question.record.pair for question in paired)
    open_kinds = {"digit", "colour", "shape", "text", "count", "quarter", "relation"}
    assert {question.record.benchmark for question in questions} == {MME, *open_kinds}


SCENES, MODEL = 2, find_model("embedded")


def suite_at(url: str, *families: Family, name: str | None = None) -> MiniLlavaSuite:
    settings = Settings(url=url, served_name=name, max_in_flight=4, wait=0.01)
    cases = build_cases(144, [8], families or ("random",))
    return MiniLlavaSuite(MODEL, cases, SCENES, settings, Path("server.log"))


def run(url: str, folder: Path, *families: Family, resume: bool = False) -> Report:
    progress = Progress(lambda line: None)
    return evaluate(suite_at(url, *families), folder, resume=resume, progress=progress)


def test_every_case_is_asked_every_question_once(tmp_path: Path) -> None:
    with endpoint(answering) as server:
        report = run(server.url, tmp_path, "random", "quota")
    assert report.valid, report.reasons
    states = ("cdpruner", "autoprune", *(f"ablation-quota-{quota}" for quota in (0, 1, 2, 4, 8)))
    every = dict.fromkeys(("full", "random", *states), report.questions)
    assert Counter(map(arm, asked(server.requests))) == every
    assert {kept(body) for body in asked(server.requests)} == {144, 8}
    full, random = report.row("full"), report.row("random@8")
    assert full is not None and random is not None
    assert full.all.acc == 100.0 and random.all.acc == 0.0
    assert random.to_full is not None and random.to_full.logprob is not None
    assert random.to_full.logprob.value == pytest.approx(-2.9)
    # Requests about one image are close to each other: of the four in flight, a few may cross.
    images = [
        body["messages"][0]["content"][0]["image_url"]["url"] for body in asked(server.requests)
    ]
    turns = sum(before != after for before, after in pairwise(images))
    assert len(set(images)) == SCENES and turns <= 1 + 2 * 4


def test_answered_questions_are_not_asked_again(tmp_path: Path) -> None:
    with endpoint(answering) as server:
        report = run(server.url, tmp_path)
        count = len(asked(server.requests))
        path = tmp_path / JOURNAL
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-3]) + lines[-3][:10])
        with pytest.raises(ConfigError, match=r"already contains an evaluation.*--resume"):
            run(server.url, tmp_path)
        for _ in range(2):
            assert run(server.url, tmp_path, resume=True) == report
            assert len(asked(server.requests)) == count + 3


@pytest.mark.parametrize(
    ("random", "accuracy", "reason"),
    [
        # The answer continues within a word: it is wrong.
        (lambda body: reply(body, following="7"), {"full": 100.0, "random@8": 0.0}, ""),
        # Nothing is pruned.
        (lambda body: reply(body, tokens=144), {"full": 100.0, "random@8": 100.0},
         "random@8: a prompt has 164 tokens instead of 164 - 136"),
    ],
)  # fmt: skip
def test_what_is_odd_is_no_right_answer_or_a_reason_against_the_report(
    random: Callable[[Body], Answer], accuracy: dict[str, float], reason: str, tmp_path: Path
) -> None:
    def answer(body: Body, number: int) -> Answer:
        return random(body) if arm(body) == "random" else reply(body, following=".")

    with endpoint(answer) as server:
        report = run(server.url, tmp_path)
        assert len(asked(server.requests)) == 2 * report.questions
    assert {row.case.name: row.all.acc for row in report.rows} == accuracy
    assert report.valid == (not reason) and re.search(reason, " ".join(report.reasons))
    with endpoint(answering) as server:
        run(server.url, tmp_path, resume=True)
        assert len(asked(server.requests)) == 0


def test_answers_of_a_server_that_dies_are_kept(tmp_path: Path) -> None:
    def dying(body: Body, number: int) -> Answer:
        if number >= 2 + 10:  # the first two are about a plain image
            # From now on nothing answers, /v1/models no more than the rest.
            server.pages[MODELS] = error(503, "down")
            return error(503, "gone")
        return answering(body, number)

    with endpoint(dying) as server:
        report = run(server.url, tmp_path)
    assert not report.valid and not report.rows
    assert any(r.startswith("stopped:") and "--resume" in r for r in report.reasons)
    with Journal(tmp_path / JOURNAL) as journal:
        assert sum(map(len, journal.contents.answers.values())) == 10
    with endpoint(answering) as server:
        report = run(server.url, tmp_path, resume=True)
        assert report.valid and len(asked(server.requests)) == 2 * report.questions - 10


def test_a_started_server_that_fails_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(*arguments: object, **more: object) -> NoReturn:
        raise ServerDied("vllm serve ended with 1:\nline upon\nline of log")

    monkeypatch.setattr(module, "serve", dead)
    report = run("", tmp_path / "dead")
    reason = "stopped: vllm serve ended with 1 (log: server.log) -> fix that and add --resume"
    assert not report.valid and report.reasons[-1] == reason

    def dying(body: Body, number: int) -> Answer:
        server.pages[MODELS] = error(503, "down")
        return error(503, "gone")

    @contextmanager
    def ended(*arguments: object, **more: object) -> Iterator[SimpleNamespace]:
        process = SimpleNamespace(poll=lambda: 7)
        yield SimpleNamespace(url=server.url, log=tmp_path / "server.log", process=process)

    monkeypatch.setattr(module, "serve", ended)
    with endpoint(dying) as server:
        report = run("", tmp_path / "dying")
    assert "vllm serve ended with 7" in report.reasons[-1] and "--resume" in report.reasons[-1]


def test_a_server_that_cannot_be_asked_is_refused_before_any_request(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        run("http://127.0.0.1:9", tmp_path)
    with endpoint(answering) as server:
        wrong = suite_at(server.url, name="llava")
        with pytest.raises(ConfigError, match="serves m -> serve llava"):
            evaluate(wrong, tmp_path, resume=False, progress=Progress(lambda line: None))
        assert not asked(server.requests)


def test_progress_reports_the_remaining_time() -> None:
    now, lines = [0.0], list[str]()
    progress = Progress(lines.append, clock=lambda: now[0])
    progress.begin(100, earlier=20)
    now[0] = 20.0
    progress.advance(40)
    assert lines == ["20 of 100 are recorded already", " 60%  60 of 100, 2/s, 20 s left"]
