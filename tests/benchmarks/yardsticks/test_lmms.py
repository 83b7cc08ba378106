"""The lmms-eval task: complete, independent of the repository, with the scores of the split."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from benchmarks.yardsticks.examples import draw_examples, grade_answers, png
from benchmarks.yardsticks.lmms import TASK, write_task


def test_a_task_folder_has_all_that_lmms_eval_reads(tmp_path: Path) -> None:
    class Loader(yaml.SafeLoader):
        """YAML as lmms-eval reads it: `!function file.name` stays a name."""

    Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
    examples = draw_examples("test", 3)
    write_task(tmp_path, "test", examples)
    functions = runpy.run_path(str(tmp_path / "utils.py"))
    fields = yaml.load((tmp_path / f"{TASK}.yaml").read_text(), Loader=Loader)
    assert fields["task"] == TASK and fields["dataset_path"] == "json"
    named = [fields[name] for name in ("doc_to_visual", "doc_to_text", "process_results")]
    for name in (*named, *(metric["aggregation"] for metric in fields["metric_list"])):
        assert callable(functions[name.removeprefix("utils.")])

    path = Path(fields["dataset_kwargs"]["data_files"][fields["test_split"]])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    answers = [example.answer if number % 3 else "no" for number, example in enumerate(examples)]
    rows = []
    for line, example, answer in zip(lines, examples, answers, strict=True):
        assert functions["doc_to_text"](line, {"pre_prompt": ""}) == example.question
        assert (tmp_path / line["image"]).read_bytes() == png(example.image)
        rows.append(functions["process_results"](line, [answer]))
    assert functions["doc_to_visual"](lines[0])[0].size == (168, 168)
    grades = grade_answers(examples, answers)
    for name in ("accuracy", "accuracy_plus"):
        score = functions[f"aggregate_{name}"]([row[f"minillava_{name}"] for row in rows])
        assert score == getattr(grades, name)
