"""Tasks of lmms-eval, and its output as 0.7.3 writes it."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from pydantic import JsonValue

from benchmarks.yardsticks.examples import draw_examples
from benchmarks.yardsticks.lmms import TASK, write_task
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.journal import MME, RESIZED, EvaluationError
from vllm_autoprune.evaluation.lmms.output import (
    BENCHMARKS,
    COLUMN_SETS,
    IMAGES,
    LOG,
    PINNED,
    Benchmark,
    Output,
    find_tasks,
    read_output,
    select_benchmarks,
)
from vllm_autoprune.evaluation.lmms.suite import parse_servers
from vllm_autoprune.evaluation.published import read_published


def test_benchmarks_are_the_papers_columns_and_the_version_is_the_extras() -> None:
    assert len(BENCHMARKS) == 14
    tables = read_published().tables
    assert {name for table in tables for name in table.benchmarks} < set(COLUMN_SETS["paper"])
    by_backbone = {table.backbone: table.benchmarks for table in tables}
    assert COLUMN_SETS["paper-llava"] == by_backbone["llava-1.5-7b"]
    assert set(COLUMN_SETS["paper-qwen"]) == set(by_backbone["qwen2.5-vl-7b"])
    text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert extras["lmms"] == [f"lmms-eval=={PINNED}"]


def test_columns_tasks_and_sets_may_be_mixed() -> None:
    assert [row.name for row in select_benchmarks("POPE,gqa,mme")] == ["GQA", "POPE", "MME"]
    assert len(select_benchmarks("paper-llava,ocrbench")) == 11
    (perception,), (both,) = select_benchmarks("mme"), select_benchmarks("mme", cognition=True)
    assert perception.name == both.name == MME
    assert len(perception.metrics) == 1 and len(both.metrics) == 2
    for unknown in ("", "gqa,foo"):
        with pytest.raises(ConfigError, match=r"use: paper, .*ocrbench"):
            select_benchmarks(unknown)


def test_tasks_of_a_folder_come_after_the_paper_s(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="declares no task"):
        find_tasks(tmp_path)
    write_task(tmp_path, "test", draw_examples("test", 1))
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.yaml").write_text("group: x\n  task: nested\n")
    (tmp_path / "more" / "b.yaml").write_text("dataset_path: x\ntask: 'mine-2'\n")
    tasks = find_tasks(tmp_path)
    assert [row.task for row in tasks] == [TASK, "mine-2"]
    selected = select_benchmarks("mine-2,minillava,gqa", tasks=tasks)
    assert [row.name for row in selected] == ["GQA", TASK, "mine-2"]


def test_arms_are_parsed_into_cases_and_addresses() -> None:
    servers = parse_servers(["full=http://a:1/v1/", "trim@64=https://b",
                             "trim+autoprune@64=http://c", "resized@64=http://a"])  # fmt: skip
    assert [server.url for server in servers] == ["http://a:1", "https://b", "http://c", "http://a"]
    full, base, ours, control = (server.case for server in servers)
    assert (full.arm, base.arm, ours.arm) == ("full", "base", "autoprune")
    assert ours.base == base.name and ours.budget == base.budget == 64
    assert (control.name, control.arm, control.budget) == ("resized@64", "resized", 64)
    assert control.label == RESIZED


def test_every_wrong_arm_is_reported() -> None:
    wrong = ["full", "nobody@64=http://a", "full=http://a", "full=http://b"]
    with pytest.raises(ConfigError) as caught:
        parse_servers([*wrong, "resized+autoprune@64=http://a", "resized=http://a"])
    assert len(caught.value.problems) == 5
    with pytest.raises(ConfigError, match="is missing"):
        parse_servers([])


@pytest.mark.parametrize("url", ["http://j", "http://j/v1/", "http://j/v1/chat/completions"])
def test_one_address_of_a_judge_serves_every_task(url: str) -> None:
    by_kind = {row.judge: row for row in BENCHMARKS}
    assert by_kind["base"].judge_address(url) == "http://j/v1"
    assert by_kind["path"].judge_address(url) == "http://j/v1/chat/completions"


Line = dict[str, JsonValue]

FILES = Path(__file__).with_name("files")
"""What 0.7.3 wrote about four questions to a real server; in ``failed`` one answered 400."""

OWN = Benchmark("minillava", "minillava", ())
COUNTED: list[JsonValue] = [{"input_tokens": 9, "output_tokens": 1, "reasoning_tokens": 0}]


def line(number: int, **more: JsonValue) -> Line:
    return {"doc_id": number, "filtered_resps": "a", "token_counts": COUNTED, **more}


def output(
    folder: Path, name: str, lines: list[Line], results: Line, reported: int | None = None
) -> Output:
    (benchmark,) = select_benchmarks(name)
    task = benchmark.task
    count = len(lines) if reported is None else reported
    content = {"results": {task: results}, "n-samples": {task: {"effective": count}}}
    images = [{"task": task, "doc_id": n, "image": f"i{n // 2}"} for n in range(len(lines))]
    (folder / "m").mkdir()
    for file, records in (
        ("m/1_results.json", [content]), (f"m/1_samples_{task}.jsonl", lines), (IMAGES, images),
    ):  # fmt: skip
        (folder / file).write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_output(folder, benchmark, "full")


def test_real_files_are_parsed() -> None:
    parsed = read_output(FILES / "answered", OWN, "full")
    assert [answer.text for answer in parsed.answers] == ["5", "blue", "cross", "1247"]
    assert [answer.prompt_tokens for answer in parsed.answers] == [157, 158, 162, 161]
    assert all(answer.score == 1.0 and answer.failure is None for answer in parsed.answers)
    assert [question.id for question in parsed.questions] == [f"minillava/{n}" for n in range(4)]
    # The document, and its image with it, is not among what is logged.
    assert {question.image for question in parsed.questions} == {"minillava/264b78d7448f204c"}
    total = parsed.total
    assert total is not None
    assert (total.metric, total.value, total.count) == ("minillava_accuracy", 100.0, 4)
    failed = read_output(FILES / "failed", OWN, "full")
    (answer,) = (answer for answer in failed.answers if answer.failure is not None)
    assert failed.total is None and answer.question == "minillava/1"
    assert (answer.score, answer.text) == (None, None)
    assert answer.failure is not None and "400 - the engine is gone" in answer.failure


def test_other_result_files_are_ignored_and_a_task_needs_a_metric(tmp_path: Path) -> None:
    """MMBench writes submissions/mmbench_en_dev_results.json beside them."""
    folder = tmp_path / "run"
    shutil.copytree(FILES / "answered", folder)
    (path,) = folder.rglob("*_results.json")
    (folder / "submissions").mkdir()
    (folder / "submissions" / "minillava_results.json").write_text("{}")
    assert read_output(folder, OWN, "full") == read_output(FILES / "answered", OWN, "full")
    results = json.loads(path.read_text())
    results["configs"]["minillava"]["metric_list"] = []
    path.write_text(json.dumps(results))
    with pytest.raises(EvaluationError, match="minillava: has no metric"):
        read_output(folder, OWN, "full")


@pytest.mark.parametrize(
    ("name", "metric", "by_filter", "value"),
    [
        ("ai2d", "exact_match", "flexible-extract", 1.0),
        ("chartqa", "relaxed_overall", "none", True),
        ("pope", "pope_f1_score", "none", {"question_id": 1, "score": 1.0, "prediction": "yes"}),
    ],
)
def test_scores_of_any_filter_may_be_numbers_booleans_or_records(
    tmp_path: Path, name: str, metric: str, by_filter: str, value: JsonValue
) -> None:
    results: Line = {f"{metric}_stderr,{by_filter}": 0.1, f"{metric},{by_filter}": 0.875}
    parsed = output(tmp_path, name, [line(n, **{metric: value}) for n in range(3)], results)
    assert [answer.score for answer in parsed.answers] == [1.0] * 3
    assert parsed.total is not None and (parsed.total.value, parsed.total.count) == (87.5, 3)
    images = [question.image.partition("/")[2] for question in parsed.questions]
    assert images == ["i0", "i0", "i1"]


@pytest.mark.parametrize(
    "failed",
    [
        {"filtered_resps": "[LMMS_EVAL_REQUEST_FAILED after 3 retries] timeout"},
        {"filtered_resps": "A", "resps": ["[LMMS_EVAL_BUDGET_EXCEEDED]"]},
        {"filtered_resps": "A", "token_counts": [{"input_tokens": 0, "output_tokens": 0}]},
        {"filtered_resps": "A", "token_counts": [None]},
        {"filtered_resps": []},
    ],
)
def test_a_failed_request_leaves_no_total(tmp_path: Path, failed: Line) -> None:
    """A task's filter may have made an answer of the words of the failure."""
    lines = [line(0, exact_match=1.0), line(1, exact_match=0.0) | failed]
    parsed = output(tmp_path, "gqa", lines, {"exact_match,none": 0.5})
    assert parsed.total is None and parsed.answers[1].failure and parsed.answers[1].score is None
    assert parsed.answers[0].failure is None


@pytest.mark.parametrize(
    ("name", "metric", "log", "failures"),
    [
        ("hallusion_bench_image", {"aAcc": {"gpt_answer": "x\nOutput:correct"}}, "", 0),
        ("hallusion_bench_image", {"aAcc": {"gpt_answer": "x\nOutput:"}}, "", 1),
        ("hallusion_bench_image", {"aAcc": {"gpt_answer": "x\nOutput:unclear"}},
         "ERROR | All 3 attempts failed. Last error message: 500", 1),
        ("mmvet", {"gpt_eval_score": {"score": 0.8, "eval_model": "gpt-4"}}, "", 0),
        ("mmvet", {"gpt_eval_score": {"score": 0.0, "eval_model": ""}}, "", 1),
        ("gqa", {"exact_match": 1.0}, "ERROR | All 3 attempts failed. Last error message: 500", 0),
    ],
)  # fmt: skip
def test_a_judge_that_does_not_answer_is_a_failure(
    tmp_path: Path, name: str, metric: Line, log: str, failures: int
) -> None:
    (tmp_path / LOG).write_text(log)
    results: Line = {f"{key},none": 0.5 for key in metric}
    parsed = output(tmp_path, name, [line(0, **metric)], results)
    assert [answer.failure is not None for answer in parsed.answers] == [bool(failures)]
    assert (parsed.total is None) == bool(failures)


GOOD = line(0, exact_match=1.0)


@pytest.mark.parametrize(
    ("lines", "results", "reported", "message"),
    [
        ([GOOD], {"exact_match,none": 1.0}, 2, "gqa: 1 samples, but lmms-eval reports 2"),
        ([GOOD, GOOD], {"exact_match,none": 1.0}, 2, "twice"),
        ([GOOD], {"exact_match,none": "N/A"}, 1, "reports no exact_match"),
    ],
)
def test_incomplete_output_is_refused(
    tmp_path: Path, lines: list[Line], results: Line, reported: int, message: str
) -> None:
    with pytest.raises(EvaluationError, match=message):
        output(tmp_path, "gqa", lines, results, reported)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("m/*.jsonl", r"wrote 0 files \*_samples_gqa.jsonl"),
        (IMAGES, "questions about the same image"),
    ],
)
def test_missing_files_are_refused(tmp_path: Path, pattern: str, message: str) -> None:
    output(tmp_path, "gqa", [GOOD], {"exact_match,none": 1.0})
    (path,) = tmp_path.glob(pattern)
    path.unlink()
    (benchmark,) = select_benchmarks("gqa")
    with pytest.raises(EvaluationError, match=message):
        read_output(tmp_path, benchmark, "full")
