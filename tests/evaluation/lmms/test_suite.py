"""The lmms-eval suite on a fake program: processes, servers, resuming, reports."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.common.fake_server import Answer, Body, FakeServer
from tests.evaluation.lmms.fake_lmms_eval import GOLD
from tests.evaluation.samples import read_journal
from tests.offline_search.endpoint import MODELS, completion, endpoint, error
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.journal import JOURNAL, MME, Journal
from vllm_autoprune.evaluation.lmms.output import IMAGES, select_benchmarks
from vllm_autoprune.evaluation.lmms.suite import (
    LmmsEval,
    LmmsSuite,
    Server,
    last_error,
    parse_servers,
)
from vllm_autoprune.evaluation.report import Report
from vllm_autoprune.evaluation.run import Progress, build_cases, evaluate

FAKE = Path(__file__).with_name("fake_lmms_eval.py")
NOWHERE = "full=http://127.0.0.1:9"
ERROR = (
    "\x1b[32m2026-11-22\x1b[0m | \x1b[31m\x1b[1mERROR \x1b[0m | \x1b[36mlmms_eval\x1b[0m - "
    "\x1b[31m\x1b[1mError during evaluation: No tasks specified, or no tasks found. Please verify "
    "the task names.. Please set `--verbosity=DEBUG` to get more information.\x1b[0m"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"Traceback (most recent call last):\n{ERROR}\n",
         "No tasks specified, or no tasks found. Please verify the task names."),
        ("\x1b[1mKilled\x1b[0m\n\n", "Killed"),
        ("Responding:   0%\rResponding:  50%\rout of memory\n", "out of memory"),
        ("", "its log is empty"),
    ],
)  # fmt: skip
def test_the_last_error_is_read_from_the_log(tmp_path: Path, text: str, message: str) -> None:
    log = tmp_path / "lmms-eval.log"
    log.write_text(text)
    assert last_error(log) == message


def right(body: Body, number: int) -> Answer:
    """The reference answer; the endpoint reports ten prompt tokens."""
    return completion(GOLD[int(str(body["messages"][0]["content"]).split()[1].rstrip("?"))])


def pruned(body: Body, number: int) -> Answer:
    """The answer "yes" with a shorter prompt."""
    status, content, headers = completion("yes")
    return status, content.replace(b'"prompt_tokens": 10', b'"prompt_tokens": 4'), headers


def suite(
    arms: Sequence[str | Server], folder: Path, tasks: str, judge: str | None = None
) -> LmmsSuite:
    servers = [parse_servers([arm])[0] if isinstance(arm, str) else arm for arm in arms]
    program = LmmsEval(f"{sys.executable} {FAKE}", "m", judge_url=judge, check_interval=0.05)
    return LmmsSuite(
        servers, select_benchmarks(tasks), program, folder / "lmms-eval",
        backbone="llava-1.5-7b", mme_divisor=20.0,
    )  # fmt: skip


def run(
    arms: Sequence[str | Server],
    folder: Path,
    tasks: str = "gqa",
    judge: str | None = None,
    resume: bool = False,
) -> Report:
    progress = Progress(lambda line: None)
    return evaluate(suite(arms, folder, tasks, judge), folder, resume=resume, progress=progress)


def arms(full: FakeServer, base: FakeServer) -> list[str]:
    return [f"full={full.url}", f"cdpruner@64={base.url}"]


def test_a_report_has_totals_scores_and_differences(tmp_path: Path) -> None:
    with endpoint(right) as full, endpoint(pruned) as base:
        report = run(arms(full, base), tmp_path, "mme,gqa")
        assert len(full.requests) == len(base.requests) == 8
        assert run(arms(full, base), tmp_path, "mme,gqa", resume=True) == report
        assert len(full.requests) == 8, "complete tasks are not repeated"
    assert report.valid, report.reasons
    row = report.row("cdpruner@64")
    assert row is not None and row.to_full is not None and row.to_full.mme is not None
    # Of MME's two pairs only the one of perception counts on LLaVA: one of two right, no pair.
    assert row.benchmarks == {"GQA": 50.0, MME: 50.0}
    assert row.to_full.mme.value == -150.0
    assert row.all.acc == (50 + 2.5) / 2 and row.prompt_tokens == 4.0
    questions = read_journal(tmp_path / JOURNAL).questions.values()
    assert {q.image for q in questions} == {"gqa/i0", "gqa/i1", "mme/i0"}
    assert "Ours / published" in (tmp_path / "report.md").read_text()


def test_servers_can_be_measured_one_after_another(tmp_path: Path) -> None:
    with endpoint(pruned) as base:
        alone = run([f"cdpruner@64={base.url}"], tmp_path)
    assert not alone.valid and "full model is not among the cases" in alone.reasons[0]
    with endpoint(right) as full:
        both = run([f"full={full.url}"], tmp_path, resume=True)
    assert both.valid and {row.case.name for row in both.rows} == {"full", "cdpruner@64"}


def test_a_failed_request_is_not_an_answer(tmp_path: Path) -> None:
    """lmms-eval would score its own failure text as a wrong answer and end with 0."""

    def failing(body: Body, number: int) -> Answer:
        return error(500) if number == 1 else pruned(body, number)

    with endpoint(right) as full, endpoint(failing) as base:
        report = run(arms(full, base), tmp_path, "mme,gqa")
        assert not report.valid and report.row("cdpruner@64") is None
        assert any("1 of 6 requests failed" in reason for reason in report.reasons)
        assert run(arms(full, base), tmp_path, "mme,gqa", resume=True).valid
        assert len(full.requests) == 8


@pytest.mark.parametrize(
    ("silent", "requests", "reason"),
    [(False, 4, "stopped answering"), (True, 1, "stopped answering during gqa -> start it again")],
)
def test_a_server_that_dies_stops_the_evaluation(
    tmp_path: Path, silent: bool, requests: int, reason: str
) -> None:
    gone = threading.Event()

    def dying(body: Body, number: int) -> Answer:
        base.pages[MODELS] = error(503, "down")
        if silent:
            gone.wait(30)
        return error(503)

    with endpoint(right) as full, endpoint(dying) as base:
        report = run(arms(full, base), tmp_path)
        gone.set()
        assert len(base.requests) == requests
    assert not report.valid and any(reason in line for line in report.reasons)
    assert [row.case.name for row in report.rows] == ["full"]


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("FAKE_DROP", "1", "3 samples, but lmms-eval reports 4"),
        ("FAKE_EXIT", "3", "ended with 3 and no samples of gqa: CUDA error: out of patience (log"),
        ("FAKE_ERROR", "not found", "ended with 0 and no samples of gqa: not found (log: "),
    ],
)
def test_a_failed_run_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(variable, value)
    with endpoint(right) as full:
        report = run([f"full={full.url}"], tmp_path)
    assert not report.valid and any(reason in line for line in report.reasons)


def test_prompts_and_totals_that_cannot_be_make_the_report_invalid(tmp_path: Path) -> None:
    with endpoint(right) as full, endpoint(right) as base:
        unpruned = run(arms(full, base), tmp_path / "unpruned")
        run([f"full={full.url}"], tmp_path)
    assert any("4 of 4 prompts are as long" in reason for reason in unpruned.reasons)
    with Journal(tmp_path / JOURNAL) as journal:
        total = journal.contents.totals["full"]["GQA"]
        journal.append([total.model_copy(update={"value": 75.0})])
    assert run([NOWHERE], tmp_path, resume=True).reasons == (
        "full: lmms-eval reports 75.00 for GQA, but its samples have a mean of 100.00",
    )


def test_servers_and_versions_are_checked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        run([NOWHERE], tmp_path)
    with endpoint(right) as full:
        monkeypatch.setenv("FAKE_VERSION", "0.9.0")
        with pytest.raises(ConfigError, match=r"is version 0.9.0.*pip install lmms-eval==0.7.3"):
            run([f"full={full.url}"], tmp_path, resume=True)
        assert not full.requests


def test_the_plan_is_the_command_lines(tmp_path: Path) -> None:
    servers = ["full=http://a:1/v1", "trim+autoprune@64=http://b:2"]
    lines = suite(servers, tmp_path, "mme,gqa").plan()
    assert len(lines) == 4
    assert "--tasks mme" in lines[1] and "base_url=http://a:1/v1," in lines[1]
    assert "base_url=http://b:2/v1," in lines[3] and "trim+autoprune@64/mme/1" in lines[3]
    assert all("--log_samples" in line and "--model openai " in line for line in lines)


def test_paths_are_absolute_because_it_runs_in_the_output_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "bin" / "lmms"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    program.chmod(0o755)
    lmms_eval = LmmsEval("bin/lmms", "m", include=Path("tasks"))
    lmms_eval.check()
    command = lmms_eval.command("http://a:1", "gqa", Path("out"))
    assert command[0] == str(program)
    assert command[command.index("--output_path") + 1] == str(tmp_path / "out")
    assert command[command.index("--include_path") + 1] == str(tmp_path / "tasks")
    with endpoint(right) as full:
        (gqa,) = select_benchmarks("gqa")
        lmms_eval.run(full.url, gqa, {}, Path("out"), lambda: True)
    assert (tmp_path / "out" / IMAGES).exists() and (tmp_path / "out" / "m").is_dir()


def test_a_judge_is_asked_and_without_one_the_report_is_not_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_URL", raising=False)
    with endpoint(right) as full:
        unjudged = run([f"full={full.url}"], tmp_path / "0", "mmvet")
        judged = run([f"full={full.url}"], tmp_path / "1", "mmvet", judge="http://judge:1")
    reason = "MM-Vet: the judge gave no usable answer (4 times)"
    assert reason in unjudged.reasons[0] and "--judge-url" in unjudged.reasons[0]
    row = judged.row("full")
    assert not unjudged.rows and judged.valid
    assert row is not None and row.benchmarks == {"MM-Vet": 80.0}


def test_one_server_measures_every_state_and_lists_what_it_refuses(tmp_path: Path) -> None:
    def answer(body: Body, number: int) -> Answer:
        pruning = body["mm_processor_kwargs"]["autoprune"]
        if "state" in pruning and pruning["state"]["base_policy"]["name"] == "trim":
            return error(400, "not on this server")
        if isinstance(body["messages"][0]["content"], list):
            return completion("?")  # the request about a plain image
        return (right if "budget" not in pruning else pruned)(body, number)

    with endpoint(answer) as fake:
        cases = build_cases(["visionzip", "trim"], [8])
        servers = [Server(case, fake.url) for case in cases]
        report = run(servers, tmp_path)
        assert len(fake.requests) == 5 + 4 * 4
        again = run(servers, tmp_path, resume=True)
        assert len(fake.requests) == 5 + 4 * 4 + 1
    assert report.valid, report.reasons
    names = {"full", "random@8", "resized@8", "visionzip@8"}
    assert {row.case.name for row in report.rows} == names
    refused = {case.name: case.refused for case in again.refused}
    assert refused == {"trim@8": "status 400: not on this server"}
