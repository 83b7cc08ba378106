"""The files of lmms-eval 0.7.3: as it wrote them, and in the shapes that other tasks give them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from pydantic import JsonValue

from vllm_autoprune.evaluation.journal import EvaluationError
from vllm_autoprune.evaluation.lmms.output import (
    IMAGES,
    Benchmark,
    Output,
    read_output,
    select_benchmarks,
)

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
    (folder / "m").mkdir()
    (folder / "m" / "1_results.json").write_text(json.dumps(content))
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (folder / "m" / f"1_samples_{task}.jsonl").write_text(text)
    images = [{"task": task, "doc_id": n, "image": f"i{n // 2}"} for n in range(len(lines))]
    (folder / IMAGES).write_text("".join(json.dumps(image) + "\n" for image in images))
    return read_output(folder, benchmark, "full")


def test_real_files_are_parsed() -> None:
    parsed = read_output(FILES / "answered", OWN, "full")
    assert [answer.text for answer in parsed.answers] == ["5", "blue", "cross", "1247"]
    assert [answer.prompt_tokens for answer in parsed.answers] == [157, 158, 162, 161]
    assert all(answer.score == 1.0 and answer.failure is None for answer in parsed.answers)
    assert [question.id for question in parsed.questions] == [f"minillava/{n}" for n in range(4)]
    # The document, and its image with it, is not among what is logged.
    assert {question.image for question in parsed.questions} == {"minillava/264b78d7448f204c"}
    assert parsed.total is not None
    assert (parsed.total.metric, parsed.total.value, parsed.total.count) == (
        "minillava_accuracy", 100.0, 4
    )  # fmt: skip


def test_a_failed_request_in_real_files_has_no_score() -> None:
    parsed = read_output(FILES / "failed", OWN, "full")
    assert parsed.total is None
    (failed,) = (answer for answer in parsed.answers if answer.failure is not None)
    assert failed.question == "minillava/1" and failed.score is None and failed.text is None
    assert failed.failure is not None and "400 - the engine is gone" in failed.failure


def test_further_result_files_of_a_task_are_ignored(tmp_path: Path) -> None:
    """MMBench writes submissions/mmbench_en_dev_results.json beside them."""
    folder = tmp_path / "run"
    shutil.copytree(FILES / "answered", folder)
    (folder / "submissions").mkdir()
    (folder / "submissions" / "minillava_results.json").write_text("{}")
    assert read_output(folder, OWN, "full") == read_output(FILES / "answered", OWN, "full")


def test_metrics_are_read_under_any_filter(tmp_path: Path) -> None:
    results: Line = {"alias": "ai2d", "exact_match_stderr,flexible-extract": 0.1,
                     "exact_match,flexible-extract": 0.5}  # fmt: skip
    parsed = output(tmp_path, "ai2d", [line(0, exact_match=1.0), line(1, exact_match=0.0)], results)
    assert parsed.total is not None and parsed.total.value == 50.0 and parsed.total.count == 2
    assert [answer.score for answer in parsed.answers] == [1.0, 0.0]


def test_scores_may_be_booleans_or_records(tmp_path: Path) -> None:
    record: JsonValue = {"question_id": 1, "score": 1.0, "prediction": "yes"}
    metrics: list[tuple[str, str, JsonValue]] = [
        ("chartqa", "relaxed_overall", True),
        ("pope", "pope_f1_score", record),
    ]
    for name, metric, value in metrics:
        folder = tmp_path / name
        folder.mkdir()
        lines = [line(0, **{metric: value})]
        parsed = output(folder, name, lines, {f"{metric},none": 0.875})
        assert parsed.answers[0].score == 1.0
        assert parsed.total is not None and parsed.total.value == 87.5


def test_images_are_identified_by_their_fingerprints(tmp_path: Path) -> None:
    lines = [line(i, exact_match=1.0) for i in range(3)]
    parsed = output(tmp_path, "gqa", lines, {"exact_match,none": 1.0})
    assert [question.image for question in parsed.questions] == ["gqa/i0", "gqa/i0", "gqa/i1"]


def test_output_without_images_is_refused(tmp_path: Path) -> None:
    output(tmp_path, "gqa", [line(0, exact_match=1.0)], {"exact_match,none": 1.0})
    (tmp_path / IMAGES).unlink()
    (benchmark,) = select_benchmarks("gqa")
    with pytest.raises(EvaluationError, match="questions about the same image"):
        read_output(tmp_path, benchmark, "full")


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


def test_missing_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"gqa: 1 samples, but lmms-eval reports 2"):
        output(tmp_path, "gqa", [line(0, exact_match=1.0)], {"exact_match,none": 1.0}, reported=2)


def test_a_repeated_sample_is_refused(tmp_path: Path) -> None:
    lines = [line(0, exact_match=1.0)] * 2
    with pytest.raises(EvaluationError, match="twice"):
        output(tmp_path, "gqa", lines, {"exact_match,none": 1.0})


def test_a_missing_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="reports no exact_match"):
        output(tmp_path, "gqa", [line(0, exact_match=1.0)], {"exact_match,none": "N/A"})


def test_an_own_task_without_a_metric_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(FILES / "answered", folder)
    (path,) = folder.rglob("*_results.json")
    results = json.loads(path.read_text())
    results["configs"]["minillava"]["metric_list"] = []
    path.write_text(json.dumps(results))
    with pytest.raises(EvaluationError, match="minillava: has no metric"):
        read_output(folder, OWN, "full")


def test_missing_files_are_refused(tmp_path: Path) -> None:
    (benchmark,) = select_benchmarks("gqa")
    with pytest.raises(EvaluationError, match=r"wrote 0 files \*_samples_gqa.jsonl"):
        read_output(tmp_path, benchmark, "full")
