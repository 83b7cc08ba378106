"""The lmms-eval task: complete, independent of the repository, with the scores of the split."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from benchmarks.yardsticks.examples import draw_examples, grade_answers, png
from benchmarks.yardsticks.lmms import TASK, write_task

EXAMPLES = draw_examples("test", 3)
Task = tuple[Path, dict[str, Callable[..., Any]], list[dict[str, Any]]]
"""Folder, functions of `utils.py` and lines of the questions."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = tmp_path_factory.mktemp("task")
    write_task(folder, "test", EXAMPLES)
    lines = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    return folder, runpy.run_path(str(folder / "utils.py")), lines


def test_the_yaml_names_functions_and_data_that_exist(task: Task) -> None:
    class Loader(yaml.SafeLoader):
        """YAML as lmms-eval reads it: `!function file.name` stays a name."""

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    folder, functions, _ = task
    fields = yaml.load((folder / f"{TASK}.yaml").read_text(), Loader=Loader)
    assert fields["task"] == TASK and fields["dataset_path"] == "json"
    assert Path(fields["dataset_kwargs"]["data_files"][fields["test_split"]]).is_file()
    names = [fields["doc_to_visual"], fields["doc_to_text"], fields["process_results"]]
    for name in (*names, *(metric["aggregation"] for metric in fields["metric_list"])):
        file, function = name.split(".")
        assert file == "utils" and callable(functions[function])


def test_every_question_is_a_line_with_its_picture(task: Task) -> None:
    folder, functions, lines = task
    for line, example in zip(lines, EXAMPLES, strict=True):
        assert line["answer"] == example.answer
        assert functions["doc_to_text"](line, {"pre_prompt": ""}) == example.question
        assert (folder / line["image"]).read_bytes() == png(example.image)
    assert functions["doc_to_visual"](lines[0])[0].size == (168, 168)
    assert len(list((folder / "images").iterdir())) == 3


def test_the_task_scores_as_the_split_does(task: Task) -> None:
    _, functions, lines = task
    answers = [example.answer if number % 3 else "no" for number, example in enumerate(EXAMPLES)]
    results = functions["process_results"]
    rows = [results(line, [answer]) for line, answer in zip(lines, answers, strict=True)]
    grades = grade_answers(EXAMPLES, answers)
    for name, grade in (("accuracy", grades.accuracy), ("accuracy_plus", grades.accuracy_plus)):
        score = functions[f"aggregate_{name}"]([row[f"minillava_{name}"] for row in rows])
        assert score == pytest.approx(grade)
