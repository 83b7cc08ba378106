"""The lmms-eval task: complete, independent of the repository, with the scores of the split."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import yaml  # type: ignore[import-untyped]

from benchmarks.yardsticks.examples import Example, draw_examples, grade_answers, png
from benchmarks.yardsticks.lmms import TASK, write_task


class _Loader(yaml.SafeLoader):
    """YAML as lmms-eval reads it: `!function file.name` stays a name."""


_Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return draw_examples("test", 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, examples: list[Example]) -> Path:
    written = tmp_path_factory.mktemp("task")
    write_task(written, "test", examples)
    return written


@pytest.fixture(scope="module")
def functions(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("task_utils", folder / "utils.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_yaml_names_functions_and_data_that_exist(folder: Path, functions: ModuleType) -> None:
    task = yaml.load((folder / f"{TASK}.yaml").read_text(), Loader=_Loader)
    named = [task["doc_to_visual"], task["doc_to_text"], task["process_results"]]
    named += [metric["aggregation"] for metric in task["metric_list"]]

    assert task["task"] == TASK and task["dataset_path"] == "json"
    assert Path(task["dataset_kwargs"]["data_files"][task["test_split"]]).is_file()
    for name in named:
        file, function = name.split(".")
        assert file == "utils" and callable(vars(functions)[function])


def test_every_question_is_a_line_with_its_picture(
    folder: Path, functions: ModuleType, examples: list[Example]
) -> None:
    lines = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]

    assert [line["answer"] for line in lines] == [example.answer for example in examples]
    for line, example in zip(lines, examples, strict=True):
        assert functions.doc_to_text(line, {"pre_prompt": ""}) == example.question
        assert (folder / line["image"]).read_bytes() == png(example.image)
    assert functions.doc_to_visual(lines[0])[0].size == (168, 168)
    assert len(list((folder / "images").iterdir())) == 3


def test_the_task_scores_as_the_split_does(
    folder: Path, functions: ModuleType, examples: list[Example]
) -> None:
    lines = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    answers = [example.answer if number % 3 else "no" for number, example in enumerate(examples)]
    rows = [
        functions.process_results(line, [text]) for line, text in zip(lines, answers, strict=True)
    ]
    expected = grade_answers(examples, answers)

    accuracy = functions.aggregate_accuracy([row["minillava_accuracy"] for row in rows])
    plus = functions.aggregate_accuracy_plus([row["minillava_accuracy_plus"] for row in rows])
    assert accuracy == pytest.approx(expected.accuracy)
    assert plus == pytest.approx(expected.accuracy_plus)
