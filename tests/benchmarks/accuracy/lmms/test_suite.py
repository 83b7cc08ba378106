"""Benchmarks through a stand-in for lmms-eval that asks real HTTP and writes the real files."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from benchmarks.accuracy.journal import JOURNAL, Journal, read
from benchmarks.accuracy.lmms.arms import servers
from benchmarks.accuracy.lmms.benchmarks import Benchmark, chosen
from benchmarks.accuracy.lmms.process import IMAGES, LmmsEval
from benchmarks.accuracy.lmms.suite import LmmsSuite
from benchmarks.accuracy.progress import Progress
from benchmarks.accuracy.records import MME
from benchmarks.accuracy.report import Report
from benchmarks.accuracy.run import evaluate
from tests.benchmarks.accuracy.lmms.fake_lmms_eval import GOLD
from tests.offline_search.endpoint import Answer, Body, Told, endpoint, error, said
from vllm_autoprune.errors import ConfigError

FAKE = Path(__file__).with_name("fake_lmms_eval.py")


def right(body: Body, number: int) -> Answer:
    """The gold answer; ten prompt tokens, as the endpoint counts them."""
    return said(GOLD[int(str(body["messages"][0]["content"]).split()[1].rstrip("?"))])


def pruned(body: Body, number: int) -> Answer:
    """Always yes, in shorter prompts."""
    status, content, headers = said("yes")
    return status, content.replace(b'"prompt_tokens": 10', b'"prompt_tokens": 4'), headers


def suite(arms: list[str], folder: Path, tasks: str = "mme,gqa") -> LmmsSuite:
    return LmmsSuite(
        servers(arms),
        chosen(tasks, own=[Benchmark("own", "own", ())]),
        LmmsEval(f"{sys.executable} {FAKE}", "m", look=0.05),
        folder / "lmms-eval",
        backbone="llava-1.5-7b",
        mme_divisor=20.0,
    )


def run(arms: list[str], folder: Path, tasks: str = "mme,gqa", *, resume: bool = False) -> Report:
    progress = Progress(lambda line: None)
    return evaluate(suite(arms, folder, tasks), folder, resume=resume, progress=progress)


def arms(full: Told, base: Told) -> list[str]:
    return [f"full={full.url}", f"cdpruner@64={base.url}"]


def test_totals_samples_and_differences(tmp_path: Path) -> None:
    with endpoint(right) as full, endpoint(pruned) as base:
        report = run(arms(full, base), tmp_path)
        assert len(full.asked) == len(base.asked) == 8
    assert report.valid, report.reasons
    row = report.of("cdpruner@64")
    assert row is not None and row.to_full is not None and row.to_full.mme is not None
    # Of MME's two pairs only the one of perception counts on LLaVA: one of two right, no pair.
    assert row.benchmarks == {"GQA": 50.0, MME: 50.0}
    assert row.to_full.mme.value == -150.0
    assert row.all.acc == (50 + 2.5) / 2 and row.prompt_tokens == 4.0
    questions = read(tmp_path / JOURNAL).questions.values()
    assert {q.image for q in questions} == {"gqa/i0", "gqa/i1", "mme/i0"}
    assert "Ours / published" in (tmp_path / "report.md").read_text()


def test_one_server_after_another_where_there_is_room_for_one(tmp_path: Path) -> None:
    with endpoint(pruned) as base:
        first = run([f"cdpruner@64={base.url}"], tmp_path)
    assert not first.valid and "full model is not among the cases" in first.reasons[0]
    with endpoint(right) as full:
        both = run([f"full={full.url}"], tmp_path, resume=True)
    assert both.valid and {row.case.name for row in both.rows} == {"full", "cdpruner@64"}


def test_what_is_complete_is_not_run_again(tmp_path: Path) -> None:
    with endpoint(right) as full, endpoint(pruned) as base:
        first = run(arms(full, base), tmp_path)
        again = run(arms(full, base), tmp_path, resume=True)
        assert len(full.asked) == 8
    assert first == again


def test_a_request_that_failed_is_no_answer(tmp_path: Path) -> None:
    """lmms-eval would score its own failure text as a wrong answer and end with 0."""

    def failing(body: Body, number: int) -> Answer:
        return error(500) if number == 1 else pruned(body, number)

    with endpoint(right) as full, endpoint(failing) as base:
        report = run(arms(full, base), tmp_path)
        assert not report.valid and report.of("cdpruner@64") is None
        assert any("1 of 6 requests failed" in reason for reason in report.reasons)
        fixed = run(arms(full, base), tmp_path, resume=True)
        assert len(full.asked) == 8
    assert fixed.valid


def test_a_server_that_dies_stops_the_evaluation(tmp_path: Path) -> None:
    def dying(body: Body, number: int) -> Answer:
        base.down = True
        return error(503)

    with endpoint(right) as full, endpoint(dying) as base:
        report = run(arms(full, base), tmp_path)
        assert len(base.asked) == 4
    assert not report.valid
    assert any("does not answer any more" in reason for reason in report.reasons)
    assert [row.case.name for row in report.rows] == ["full"]


def test_missing_samples_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DROP", "1")
    with endpoint(right) as full:
        report = run([f"full={full.url}"], tmp_path, "gqa")
    assert not report.valid
    assert any("3 samples where lmms-eval took 4" in reason for reason in report.reasons)


def test_a_run_that_ends_badly_tells_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_EXIT", "3")
    with endpoint(right) as full:
        report = run([f"full={full.url}"], tmp_path, "gqa")
    told = "ended with 3 and no samples of gqa: CUDA error: out of patience (log: "
    assert any(told in reason for reason in report.reasons)


def test_a_run_that_ends_well_but_wrote_nothing_tells_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ERROR", "Tasks not found: gqa")
    with endpoint(right) as full:
        report = run([f"full={full.url}"], tmp_path, "gqa")
    told = "ended with 0 and no samples of gqa: Tasks not found: gqa (log: "
    assert any(told in reason for reason in report.reasons)


def test_a_server_that_goes_silent_is_not_asked_to_the_last_question(tmp_path: Path) -> None:
    gone = threading.Event()

    def hanging(body: Body, number: int) -> Answer:
        base.down = True
        gone.wait(30)
        return error(503)

    with endpoint(right) as full, endpoint(hanging) as base:
        report = run(arms(full, base), tmp_path, "gqa")
        gone.set()
        assert len(base.asked) == 1
    assert any("in the middle of gqa -> start it again" in reason for reason in report.reasons)
    assert [row.case.name for row in report.rows] == ["full"]


def test_a_task_of_one_s_own_counts_by_its_first_metric(tmp_path: Path) -> None:
    with endpoint(right) as full, endpoint(pruned) as base:
        report = run(arms(full, base), tmp_path, "own")
    row = report.of("cdpruner@64")
    assert report.valid and row is not None and row.to_full is not None
    assert row.benchmarks == {"own": 50.0} and row.to_full.acc is not None
    assert row.to_full.acc.value == -50.0
    assert "published" not in (tmp_path / "report.md").read_text()


def test_a_server_that_does_not_prune_is_not_believed(tmp_path: Path) -> None:
    with endpoint(right) as full, endpoint(right) as base:
        report = run(arms(full, base), tmp_path, "gqa")
    assert any("4 of 4 prompts are as long" in reason for reason in report.reasons)


def test_a_total_that_is_not_of_its_samples_is_not_believed(tmp_path: Path) -> None:
    with endpoint(right) as full:
        run([f"full={full.url}"], tmp_path, "gqa")
    with Journal(tmp_path / JOURNAL) as journal:
        wrong = journal.contents.totals["full"]["GQA"].model_copy(update={"value": 75.0})
        journal.put([wrong])
    report = run(["full=http://127.0.0.1:9"], tmp_path, "gqa", resume=True)
    told = "full: GQA is 75.00 by lmms-eval, but its samples have a mean of 100.00"
    assert report.reasons == (told,)


def test_a_benchmark_without_scores_of_single_answers_has_a_total(tmp_path: Path) -> None:
    with endpoint(right) as full, endpoint(pruned) as base:
        report = run(arms(full, base), tmp_path, "mmbench_en_dev,gqa")
    row = report.of("cdpruner@64")
    assert report.valid and row is not None and row.to_full is not None
    assert row.benchmarks == {"GQA": 50.0, "MMB-EN": 50.0}
    assert row.to_full.acc is None and row.to_full.accuracy is not None
    assert row.without_mmbench is not None and row.without_mmbench.acc == 50.0


def test_servers_and_versions_are_looked_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        run(["full=http://127.0.0.1:9"], tmp_path)
    with endpoint(right) as full:
        monkeypatch.setenv("FAKE_VERSION", "0.9.0")
        with pytest.raises(ConfigError, match=r"is version 0.9.0.*pip install lmms-eval==0.7.3"):
            run([f"full={full.url}"], tmp_path, resume=True)
        assert not full.asked


def test_the_plan_is_the_command_lines(tmp_path: Path) -> None:
    lines = suite(["full=http://a:1/v1", "trim+autoprune@64=http://b:2"], tmp_path).plan()
    assert len(lines) == 4
    assert "--tasks mme" in lines[1] and "base_url=http://a:1/v1," in lines[1]
    assert "base_url=http://b:2/v1," in lines[3] and "trim+autoprune@64/mme/1" in lines[3]
    assert all("--log_samples" in line and "--model openai " in line for line in lines)


def test_paths_hold_from_the_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run there, for it takes a task for a folder where one of that name lies."""
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
        lmms_eval.run(full.url.removesuffix("/v1"), "gqa", Path("out"), lambda: True)
    assert (tmp_path / "out" / IMAGES).exists() and (tmp_path / "out" / "m").is_dir()
