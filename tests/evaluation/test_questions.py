"""Questions of a user's own file, and what is said of each mistake in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from PIL import Image

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.journal import MME
from vllm_autoprune.evaluation.questions import read_questions

LINE = {"image": "a.png", "question": "?", "answer": "x"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a file beside two images, one that is cut off, one that is text, and a folder."""
    for name in ("a.png", "b.jpg"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "b.jpg").read_bytes()[:60])
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "folder.png").mkdir()
    return tmp_path / "questions.jsonl"


def text(*lines: Mapping[str, object]) -> str:
    return "\n".join(json.dumps({**LINE, **line}) for line in lines)


def test_questions_are_ordered_by_image_and_pairs_are_scored_as_mme(path: Path) -> None:
    pair = {"image": "b.jpg", "category": "colour", "pair": 7}
    lines = text({"question": "1?"}, {**pair, "question": "2?", "answer": "yes"},
                 {"question": "3?", "category": "shape"},
                 {**pair, "question": "4?", "answer": "No "})  # fmt: skip
    path.write_text(f"\ufeff{lines}\n\n")  # as Windows writes it
    questions = read_questions(path)
    assert [question.text for question in questions] == ["1?", "3?", "2?", "4?"]
    assert [question.record.benchmark for question in questions] == ["all", "shape", MME, MME]
    assert {question.record.pair for question in questions} == {"", "b.jpg/7"}
    assert questions[0].image.startswith("data:image/png;base64,")
    assert questions[2].image.startswith("data:image/jpeg;base64,")
    # A limit leaves no half of a pair.
    assert [len(read_questions(path, limit)) for limit in (1, 2, 3, 4)] == [1, 2, 2, 4]


PAIRS = (
    [("yes", 1)],
    [("yes", 1), ("no", 1), ("no", 1)],
    [("yes", 1)] * 2,
    [("red", 1), ("no", 1)],
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("\n", "questions.jsonl: contains no example -> "),
        (json.dumps([LINE]), "one JSON array -> write each object on one line: jq -c '.[]'"),
        (text({}) + ",", "questions.jsonl:1: Invalid JSON"),
        (text({}, {"answer": ""}), 'questions.jsonl:2: "answer": String should have at least 1'),
        (text({"topic": "x"}), 'questions.jsonl:1: "topic": Extra inputs are not permitted'),
        (text({}, {"image": "c.png"}, {"image": "c.png"}), ":2: image 'c.png' cannot be read"),
        (text({"image": "text.png"}), "cannot identify image file"),
        (text({"image": "cut.jpg"}), "image 'cut.jpg' "),
        (text({"image": "folder.png"}), "image 'folder.png' cannot be read (Is a directory)"),
        (text({"image": "https://x/y.png"}), "-> give the path of a PNG or JPEG file"),
        *(
            (text(*({"answer": answer, "pair": pair} for answer, pair in pairs)),
             ':1: "pair": 1 about \'a.png\' is not one "yes" and one "no" (lines 1')
            for pairs in PAIRS
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_problem_with_its_line(path: Path, content: str, said: str) -> None:
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_questions(path)
    (problem,) = caught.value.problems
    assert said in str(problem) and problem.fix


def test_many_problems_are_counted_and_a_missing_file_is_said_to_be_missing(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .* -> give the path of a JSONL file"):
        read_questions(path)
    path.write_text(text(*({"answer": ""} for _ in range(30))))
    with pytest.raises(ConfigError, match="10 more problems") as caught:
        read_questions(path)
    assert len(caught.value.problems) == 21
