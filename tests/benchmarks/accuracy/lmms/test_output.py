"""The files of lmms-eval 0.7.3, in the shapes that its tasks give them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import JsonValue

from benchmarks.accuracy.errors import EvaluationError
from benchmarks.accuracy.lmms.benchmarks import chosen
from benchmarks.accuracy.lmms.output import Output, read_output

Line = dict[str, JsonValue]


def line(number: int, **more: JsonValue) -> Line:
    return {"doc_id": number, "doc": {}, "resps": ["a"], "filtered_resps": ["a"], **more}


def output(
    folder: Path, name: str, lines: list[Line], results: Line, taken: int | None = None
) -> Output:
    (benchmark,) = chosen(name)
    task = benchmark.task
    count = len(lines) if taken is None else taken
    summed = {"results": {task: results}, "n-samples": {task: {"effective": count}}}
    (folder / "m").mkdir()
    (folder / "m" / "1_results.json").write_text(json.dumps(summed))
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (folder / "m" / f"1_samples_{task}.jsonl").write_text(text)
    return read_output(folder, benchmark, "full")


def test_a_filter_s_name_stands_behind_the_metric(tmp_path: Path) -> None:
    results: Line = {"alias": "ai2d", "exact_match_stderr,flexible-extract": 0.1,
                     "exact_match,flexible-extract": 0.5}  # fmt: skip
    found = output(tmp_path, "ai2d", [line(0, exact_match=1.0), line(1, exact_match=0.0)], results)
    assert found.total is not None and found.total.value == 50.0 and found.total.count == 2
    assert [answer.score for answer in found.answers] == [1.0, 0.0]


def test_scores_may_be_truth_values_or_records(tmp_path: Path) -> None:
    record: JsonValue = {"question_id": 1, "score": 1.0, "prediction": "yes"}
    known: list[tuple[str, str, JsonValue]] = [
        ("chartqa", "relaxed_overall", True),
        ("pope", "pope_f1_score", record),
    ]
    for name, metric, value in known:
        folder = tmp_path / name
        folder.mkdir()
        lines = [line(0, **{metric: value})]
        found = output(folder, name, lines, {f"{metric},none": 0.875})
        assert found.answers[0].score == 1.0
        assert found.total is not None and found.total.value == 87.5


def test_images_are_told_apart_by_what_the_task_calls_them(tmp_path: Path) -> None:
    docs: list[JsonValue] = [{"imageId": "n1"}, {"imageId": "n1"}, {"question": "?"}]
    lines = [line(i, exact_match=1.0) | {"doc": doc} for i, doc in enumerate(docs)]
    found = output(tmp_path, "gqa", lines, {"exact_match,none": 1.0})
    assert [question.image for question in found.questions] == ["gqa/n1", "gqa/n1", "gqa/#2"]


@pytest.mark.parametrize(
    "said",
    [
        ["[LMMS_EVAL_REQUEST_FAILED after 3 retries] timeout"],
        [["[LMMS_EVAL_BUDGET_EXCEEDED]"]],
        [],
    ],
)
def test_what_never_came_is_a_failure_and_leaves_no_total(
    tmp_path: Path, said: list[JsonValue]
) -> None:
    lines = [line(0, exact_match=1.0), line(1, exact_match=0.0)]
    lines[1] |= {"resps": said, "filtered_resps": said}
    found = output(tmp_path, "gqa", lines, {"exact_match,none": 0.5})
    assert found.total is None and found.answers[1].failure and found.answers[1].score is None
    assert found.answers[0].failure is None


def test_counts_have_to_agree(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"gqa: 1 samples where lmms-eval took 2"):
        output(tmp_path, "gqa", [line(0, exact_match=1.0)], {"exact_match,none": 1.0}, taken=2)


def test_a_sample_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    lines = [line(0, exact_match=1.0)] * 2
    with pytest.raises(EvaluationError, match="twice"):
        output(tmp_path, "gqa", lines, {"exact_match,none": 1.0})


def test_a_metric_that_is_not_reported_is_told(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="reports no exact_match"):
        output(tmp_path, "gqa", [line(0, exact_match=1.0)], {"exact_match,none": "N/A"})


def test_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    (benchmark,) = chosen("gqa")
    with pytest.raises(EvaluationError, match=r"wrote 0 files \*_results.json"):
        read_output(tmp_path, benchmark, "full")
