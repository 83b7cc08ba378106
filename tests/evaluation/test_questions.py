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
def path(tmp_path: Path) -> Path:
    for name in ("a.png", "b.jpg"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    return tmp_path / "questions.jsonl"


NUMBERS = count()


def line(image: str = "a.png", answer: str = "x", **more: object) -> dict[str, object]:
    """One question, different in each line."""
    return {"image": image, "question": f"{next(NUMBERS)}?", "answer": answer, **more}


def text(*lines: dict[str, object]) -> str:
    return "\n".join(map(json.dumps, lines))


def problems(path: Path, content: str) -> list[str]:
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_questions(path)
    assert all(problem.fix for problem in caught.value.problems)
    return [str(problem) for problem in caught.value.problems]


def test_questions_are_ordered_by_image_and_pairs_are_scored_as_mme(path: Path) -> None:
    pair = {"image": "b.jpg", "category": "colour", "pair": 7}
    path.write_text(text(
        {"image": "a.png", "question": "1?", "answer": "x"},
        {**pair, "question": "2?", "answer": "yes"},
        {"image": "a.png", "question": "3?", "answer": "y", "category": "shape"},
        {**pair, "question": "4?", "answer": "no"},
    ))  # fmt: skip
    questions = read_questions(path)
    assert [question.text for question in questions] == ["1?", "3?", "2?", "4?"]
    assert [question.record.benchmark for question in questions] == ["all", "shape", MME, MME]
    assert {question.record.pair for question in questions} == {"", "b.jpg/7"}
    assert questions[0].image.startswith("data:image/png;base64,")
    assert questions[2].image.startswith("data:image/jpeg;base64,")
    # A limit leaves no half of a pair.
    assert [len(read_questions(path, limit)) for limit in (1, 2, 3, 4)] == [1, 2, 2, 4]


def test_images_that_cannot_be_sent(path: Path) -> None:
    folder = path.parent
    (folder / "text.png").write_text("not an image")
    (folder / "cut.jpg").write_bytes((folder / "b.jpg").read_bytes()[:60])
    (folder / "folder.png").mkdir()
    what = {"c.png": "does not exist", "text.png": "is not an image", "folder.png": "is a folder",
            "https://x/y.png": "is an address", "cut.jpg": "cut.jpg"}  # fmt: skip
    said = problems(path, text(*(line(image=name) for name in (*what, "c.png"))))
    assert len(said) == len(what), "an image is named once"
    for number, (problem, reason) in enumerate(zip(said, what.values(), strict=True), 1):
        assert problem.startswith(f"questions.jsonl:{number}: image ") and reason in problem
    assert str(folder) in said[0]


@pytest.mark.parametrize("answers", [["yes"], ["yes", "no", "no"], ["yes", "yes"], ["red", "no"]])
def test_pairs_that_cannot_be_scored(path: Path, answers: list[str]) -> None:
    (said,) = problems(path, text(*(line(answer=answer, pair=1) for answer in answers)))
    assert 'is not one "yes" and one "no" (lines 1' in said


QUESTION = line(answer="cat")
TWO = [line(), line()]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("\n", ["contains no example"]),
        (text(*(line(category=kind) for kind in ("colour", "shape", " Colour"))),
         ["questions.jsonl:3: \"category\" ' Colour' is written 'colour' in line 1"]),
        (text(QUESTION, line(), {**QUESTION, "question": f" {QUESTION['question']} "}),
         ["questions.jsonl:3: repeats the question of line 1"]),
        (json.dumps(TWO), ["one JSON array", "jq -c '.[]' questions.jsonl"]),
        (json.dumps(TWO, indent=1), ["one JSON array"]),
        (json.dumps(TWO[0], indent=1), ["over several lines", "jq -c . questions.jsonl"]),
        (text(line()) + ",\n" + text(line()), ["questions.jsonl:1: Invalid JSON"]),
    ],
)  # fmt: skip
def test_mistakes_are_one_problem(path: Path, content: str, said: list[str]) -> None:
    (problem,) = problems(path, content)
    assert all(part in problem for part in said), problem


def test_many_problems_are_counted_and_a_missing_file_is_said_to_be_missing(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .* -> give the path of a JSONL file"):
        read_questions(path)
    said = problems(path, text(*(line(answer="") for _ in range(30))))
    assert len(said) == 21 and "10 more problems" in said[-1]
