"""Questions of a user's own file, and what is said of each mistake in it."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
from PIL import Image

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.journal import MME
from vllm_autoprune.evaluation.questions import read_questions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "b.jpg"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    return tmp_path


def written(folder: Path, *lines: dict[str, object]) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


NUMBERS = count()


def line(image: str = "a.png", answer: str = "x", **more: object) -> dict[str, object]:
    """One question, different in each line."""
    return {"image": image, "question": f"{next(NUMBERS)}?", "answer": answer, **more}


def problems(folder: Path, *lines: dict[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_questions(written(folder, *lines))
    assert all(problem.fix for problem in caught.value.problems)
    return [str(problem) for problem in caught.value.problems]


def test_questions_are_ordered_by_image_and_pairs_are_scored_as_mme(folder: Path) -> None:
    path = written(
        folder,
        {"image": "a.png", "question": "1?", "answer": "x"},
        {"image": "b.jpg", "question": "2?", "answer": "yes", "category": "colour", "pair": 7},
        {"image": "a.png", "question": "3?", "answer": "y", "category": "shape"},
        {"image": "b.jpg", "question": "4?", "answer": "no", "category": "colour", "pair": 7},
    )
    questions = read_questions(path)
    assert [question.text for question in questions] == ["1?", "3?", "2?", "4?"]
    assert [question.record.benchmark for question in questions] == ["all", "shape", MME, MME]
    assert {q.record.pair for q in questions} == {"", "b.jpg/7"}
    assert questions[0].image.startswith("data:image/png;base64,")
    assert questions[2].image.startswith("data:image/jpeg;base64,")


def test_a_limit_leaves_no_half_of_a_pair(folder: Path) -> None:
    pair = [line(answer="yes", pair=1), line(answer="no", pair=1)]
    path = written(folder, line(), *pair)
    assert [len(read_questions(path, limit)) for limit in (1, 2, 3)] == [1, 1, 3]


def test_an_empty_file_is_refused(folder: Path) -> None:
    path = folder / "questions.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="contains no example"):
        read_questions(path)


def test_a_missing_file_is_said_to_be_missing(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .* -> give the path of a JSONL file"):
        read_questions(folder / "nowhere.jsonl")


def test_images_that_cannot_be_sent(folder: Path) -> None:
    (folder / "text.png").write_text("not an image")
    cut = (folder / "b.jpg").read_bytes()[:60]
    (folder / "cut.jpg").write_bytes(cut)
    (folder / "folder.png").mkdir()
    names = ("c.png", "text.png", "folder.png", "https://x/y.png", "cut.jpg")
    said = problems(folder, *(line(image=name) for name in names), line(image="c.png"))
    assert len(said) == len(names), "an image is named once"
    for number, (problem, what) in enumerate(
        zip(
            said,
            ("does not exist", "is not an image", "is a folder", "is an address", "cut.jpg"),
            strict=True,
        ),
        1,
    ):
        assert problem.startswith(f"questions.jsonl:{number}: image ")
        assert what in problem
    assert str(folder) in said[0]


def test_one_kind_in_two_spellings(folder: Path) -> None:
    kinds = ("colour", "shape", "colour", " Colour")
    (said,) = problems(folder, *(line(category=kind) for kind in kinds))
    assert said.startswith("questions.jsonl:4: ")
    assert "' Colour' is written 'colour' in line 1" in said


@pytest.mark.parametrize(
    ("answers", "what"),
    [
        (["yes"], "has 1 question(s): line 1"),
        (["yes", "no", "no"], "has 3 question(s): line 1, 2, 3"),
        (["yes", "yes"], 'is not one "yes" and one "no"'),
        (["red", "no"], 'is not one "yes" and one "no"'),
    ],
)
def test_pairs_that_cannot_be_scored(folder: Path, answers: list[str], what: str) -> None:
    (said,) = problems(folder, *(line(answer=answer, pair=1) for answer in answers))
    assert what in said


def test_many_problems_are_counted(folder: Path) -> None:
    said = problems(folder, *(line(answer="") for _ in range(30)))
    assert len(said) == 21
    assert "10 more problems" in said[-1]


def test_a_question_asked_twice_about_an_image(folder: Path) -> None:
    same = line(answer="cat")
    other = {**same, "answer": "dog", "question": f" {same['question']} "}
    said = problems(folder, same, line(), {**same}, other, {**same, "image": "b.jpg"})
    assert len(said) == 2
    assert "questions.jsonl:3: repeats the question of line 1 -> remove one" in said[0]
    assert "line 1 with another answer, 'dog' instead of 'cat' -> keep" in said[1]


@pytest.mark.parametrize("indent", [None, 1])
def test_one_array_is_one_problem(folder: Path, indent: int | None) -> None:
    path = folder / "questions.json"
    path.write_text(json.dumps([line(), line()], indent=indent))
    with pytest.raises(ConfigError) as caught:
        read_questions(path)
    (problem,) = caught.value.problems
    assert "one JSON array" in problem.what and "jq -c '.[]' questions.json" in problem.fix


def test_objects_over_several_lines_are_one_problem(folder: Path) -> None:
    path = folder / "questions.json"
    path.write_text("\n".join(json.dumps(line(), indent=1) for _ in range(3)))
    with pytest.raises(ConfigError) as caught:
        read_questions(path)
    (problem,) = caught.value.problems
    assert "over several lines" in problem.what and "jq -c ." in problem.fix


def test_a_comma_behind_a_line_is_named(folder: Path) -> None:
    path = folder / "questions.jsonl"
    path.write_text(json.dumps(line()) + ",\n" + json.dumps(line()) + "\n")
    with pytest.raises(ConfigError, match="remove the comma at the end of the line"):
        read_questions(path)
