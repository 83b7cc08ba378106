from __future__ import annotations

import json
from pathlib import Path

import pytest

from offline_search.dataset import Dataset, read_dataset
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.questions import read_lines


def test_splits_are_shuffled_by_image_and_cut_by_image(data: Dataset) -> None:
    read = read_dataset(data.folder, seed=1)
    assert read.examples("search") != data.examples("search")
    assert sorted(map(repr, read.examples("search"))) == sorted(map(repr, data.examples("search")))
    images = [example.image for example in read.examples("search")]
    assert images[::2] == images[1::2], "questions of an image stay together"
    few = read_dataset(data.folder, seed=1, limit=2)
    assert list(few.examples("search")) == list(read.examples("search"))[:4]
    assert few.digest != read.digest == read_dataset(data.folder, seed=1).digest


def test_questions_of_an_image_need_not_be_neighbours(data: Dataset) -> None:
    neighbours = read_dataset(data.folder, seed=1, limit=3).examples("search")
    path = data.folder / "search.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[::2], *lines[1::2]]))
    assert read_dataset(data.folder, seed=1, limit=3).examples("search") == neighbours


def test_an_image_in_two_splits_is_refused_under_any_name(data: Dataset) -> None:
    (data.folder / "test-0.png").write_bytes((data.folder / "search-3.png").read_bytes())
    with pytest.raises(ConfigError, match="the same image is in search and in test"):
        read_dataset(data.folder)


def test_all_problems_are_reported_together(data: Dataset) -> None:
    folder = data.folder
    with (folder / "search.jsonl").open("a") as file:
        file.write('{"image": "x.png", "question": "", "answer": "a"}\n')
        file.write("not json\n")
        file.write(json.dumps({"image": "x.png", "question": "q", "answer": "a", "k": 1}) + "\n")
    (folder / "validation.jsonl").unlink()
    (folder / "test-2.png").unlink()
    with pytest.raises(ConfigError) as caught:
        read_dataset(folder)
    where = {problem.where for problem in caught.value.problems}
    assert {"search.jsonl:25", "search.jsonl:26", "search.jsonl:27"} <= where
    assert {"validation.jsonl", "test-2.png"} <= where
    assert all(problem.fix for problem in caught.value.problems)


def test_each_problem_of_a_line_has_a_fix(data: Dataset) -> None:
    wrong = {
        '{"image": "a.png" "question": "q"}': (
            "is not JSON: Expecting ',' delimiter",
            "one object",
        ),
        '["a.png", "q", "a"]': ("is a list, not an object", "one object"),
        '{"image": "a.png", "question": "q"}': ('has no "answer"', "give the right answer"),
        '{"image": "a.png", "question": "q", "answer": 7}': ('"answer" is a number', "in quotes"),
        '{"image": "a.png", "question": "", "answer": "a"}': ('"question" is empty', "as text"),
        '{"image": "a.png", "question": "q", "answer": "a", "category": null}': (
            '"category" is empty',
            "or leave it out",
        ),
        '{"image": "a.png", "question": "q", "answer": "a", "pair": "x"}': (
            '"pair"',
            "a whole number",
        ),
        '{"image": "a.png", "question": "q", "answer": "a", "kind": "k"}': (
            'unknown field "kind"',
            'rename it to "category"',
        ),
        '{"image": "a.png", "qeustion": "q", "answer": "a"}': (
            'unknown field "qeustion"',
            'rename it to "question"',
        ),
        '{"image": "a.png", "question": "q", "answer": "a", "zzz": 1}': (
            'unknown field "zzz"',
            "remove it",
        ),
        '{"image": "a.png", "question": "q", "answer": "\\ud800"}': ("is not JSON", "one object"),
    }
    path = data.folder / "mine.jsonl"
    path.write_text("\n".join(wrong))
    problems: list[Problem] = []
    assert read_lines(path, problems, "") == []
    assert len(problems) == len(wrong), "a field of another name is not missing as well"
    for number, (problem, (what, fix)) in enumerate(zip(problems, wrong.values(), strict=True), 1):
        assert problem.where == f"mine.jsonl:{number}"
        assert what in problem.what and fix in problem.fix, problem


def test_files_of_windows_editors_are_read(data: Dataset) -> None:
    path = data.folder / "mine.jsonl"
    line = '{"image": "a.png", "question": "q\u2028r", "answer": "a"}'
    path.write_bytes(f"\ufeff{line}\r\n\r\n{line}\r\n".encode())
    problems: list[Problem] = []
    assert [number for number, _ in read_lines(path, problems, "")] == [1, 3]
    assert problems == []


def test_an_empty_split_and_a_missing_folder_are_errors(data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_dataset(tmp_path / "nowhere")
    (data.folder / "test.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="contains no example"):
        read_dataset(data.folder)
