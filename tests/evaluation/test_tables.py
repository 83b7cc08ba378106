"""Tables as spreadsheets, pandas and people write them: what goes in is asked or named."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.evaluation.question_files import refuse_questions, write
from vllm_autoprune.errors import Problem
from vllm_autoprune.evaluation.question_reader import QuestionReader
from vllm_autoprune.evaluation.questions import read_questions

Row = tuple[Sequence[str], str, Sequence[str]]
"""Images, question and answers."""

READ: Mapping[str, tuple[str, list[Row]]] = {
    "semicolons and a comma in a question": (
        "image;question;answer\na.png;Which, red?;4\n",
        [(["a.png"], "Which, red?", ["4"])],
    ),
    "Excel's separator": (
        "\ufeffsep=;\r\nImage;Question;Answer\r\na.png;?;4,5\r\n",
        [(["a.png"], "?", ["4,5"])],
    ),
    "a comment, capitals, spaces, empty rows": (
        "# ours\nIMAGE, Question , answer\n\n,,\na.png, ?, 4\n# end\n",
        [(["a.png"], "?", ["4"])],
    ),
    "lists": (
        "images,question,answers\n"
        "\"['a.png', 'b.jpg']\",?,\"['4' 'four']\"\n"
        '"[""a.png""]",2?,"[4, ""5""]"\n',
        [
            (["a.png", "b.jpg"], "?", ["4", "four"]),
            (["a.png"], "2?", ["4", "5"]),
        ],
    ),
    "a box, and brackets that are no list": (
        'image,question,answer\na.png,?,"[1, 2, 30, 4.5]"\na.png,[2]?,[sic] yes\n',
        [(["a.png"], "?", ["[1, 2, 30, 4.5]"]), (["a.png"], "[2]?", ["[sic] yes"])],
    ),
    "missing values": (
        "image,question,answer,category\na.png,?,nan,\na.png,2?,None,<NA>\na.png,3?\n",
        [(["a.png"], "?", []), (["a.png"], "2?", ["None"]), (["a.png"], "3?", [])],
    ),
    "quotes in quotes": (
        'image,question,answer\na.png,"say ""a, b""\nnow?",4\n',
        [(["a.png"], 'say "a, b"\nnow?', ["4"])],
    ),
}
REFUSED = {
    "a comma too many": (
        "image,question,answer\na.png,?,4\na.png,red, or blue?,4\n",
        ":3: has 4 cells, and the header 3 -> quote cells that have ',' or quotes in them",
    ),
    "an open quote": (
        'image,question,answer\na.png,?,4\na.png,"what?,5\na.png,?,6\n',
        ":3: has quotes that do not end its cell (unexpected end of data)",
    ),
    "a column twice": (
        "image,question,Question,answer\na.png,?,?,4\n",
        ":1: has two columns 'question' -> rename one",
    ),
    "no column of questions": (
        "foo,bar\n1,2\n",
        ":1: has no column of questions: foo,bar -> name the columns image, question",
    ),
}


def read(path: Path) -> tuple[list[Row], list[Problem], str]:
    """Questions of a file, problems with it, and what was passed over."""
    problems = list[Problem]()
    reader = QuestionReader(path, None, "")
    rows: list[Row] = [
        (
            [str(source.name) for source in question.pictures],
            question.text,
            list(question.answers),
        )
        for question in reader.read(problems)
    ]
    return rows, problems, " ".join(reader.file.notes())


@pytest.mark.parametrize("name", READ)
def test_a_table_is_read_as_it_is_meant(tmp_path: Path, name: str) -> None:
    content, expected = READ[name]
    path = write(tmp_path, {"q.csv": content}) / "q.csv"
    assert read(path) == (expected, [], "")
    renamed = path.rename(tmp_path / "q.txt")
    assert read(renamed)[0] == expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_is_none_is_told_with_its_line(tmp_path: Path, name: str) -> None:
    content, said = REFUSED[name]
    path = write(tmp_path, {"q.csv": content}) / "q.csv"
    (text,) = refuse_questions(path)
    assert said in text


def test_a_box_of_json_is_one_answer_and_nan_is_none(tmp_path: Path) -> None:
    line = '{"image": "a.png", "question": "%s", "answer": %s}\n'
    answers = ("[1, 2.50, 3, 4]", "[[1, 2, 3, 4], 7]", "NaN", "[NaN, 5]", '"NaN"')
    content = "".join(line % (number, text) for number, text in enumerate(answers))
    path = write(tmp_path, {"q.jsonl": content}) / "q.jsonl"
    assert [row[2] for row in read(path)[0]] == [
        ["[1, 2.50, 3, 4]"],
        ["[1, 2, 3, 4]", "7"],
        [],
        ["5"],
        ["NaN"],
    ]


# ---- a grammar of tables ----

WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]),
    min_size=1,
    max_size=8,
).filter(
    lambda text: (
        text.strip() == text
        and text not in ("nan", "NaN", "<NA>")
        and text[0] != "["
        and any(letter.isalnum() for letter in text)
    )
)
IMAGES = st.lists(st.sampled_from(("a.png", "b.jpg")), min_size=1, max_size=2)
ROWS = st.lists(
    st.tuples(IMAGES, WORDS, st.lists(WORDS, max_size=3)), min_size=1, max_size=4
)
MISSING = st.sampled_from(("", "nan", "NaN", "<NA>", "  "))


@dataclass
class Table:
    """A table in the dialect of some program, and its rows."""

    text: str
    rows: list[Row]
    unknown: str
    """A column that no question has."""


@st.composite
def tables(draw: st.DrawFn) -> Table:
    rows = draw(ROWS)
    index = draw(st.sampled_from((None, "", "Unnamed: 0", "id")))
    change_case = draw(st.sampled_from((str.lower, str.upper, str.title)))
    plural = draw(st.sampled_from((["image", "answer"], ["images", "answers"])))
    write_list = draw(st.sampled_from((json.dumps, repr)))
    buffer = io.StringIO()
    delimiter = draw(st.sampled_from(",;\t|"))
    writer = csv.writer(
        buffer,
        delimiter=delimiter,
        quoting=draw(st.sampled_from((csv.QUOTE_MINIMAL, csv.QUOTE_ALL))),
        lineterminator=draw(st.sampled_from(("\n", "\r\n"))),
    )
    before = [] if index is None else [index]
    names = [change_case(name) for name in (plural[0], "question", plural[1])]
    writer.writerow([*before, *names])
    for number, (images, question, answers) in enumerate(rows):
        cells = [
            images[0] if len(images) == 1 else write_list(list(images)),
            question,
            answers[0] if len(answers) == 1 else write_list(list(answers)),
        ]
        if not answers:
            cells[2] = draw(MISSING)
        writer.writerow([str(number)][: len(before)] + cells)
    first_lines = draw(st.sampled_from(("", "\ufeff", "# a comment\n")))
    if draw(st.booleans()):
        first_lines += f"sep={delimiter}\n"
    expected: list[Row] = [(list(i), q, list(a)) for i, q, a in rows]
    unknown = "" if index is None else repr(index) if index else "without a name"
    return Table(first_lines + buffer.getvalue(), expected, unknown)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=tables(), name=st.sampled_from(("q.csv", "q.txt")))
def test_what_goes_into_a_table_is_asked_or_named(
    tmp_path: Path, table: Table, name: str
) -> None:
    path = write(tmp_path, {name: table.text}) / name
    rows, problems, notes = read(path)
    assert (rows, problems) == (table.rows, [])
    assert table.unknown in notes and bool(table.unknown) == bool(notes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=tables(), data=st.data())
def test_no_row_of_a_table_that_is_cut_or_has_more_is_lost_in_silence(
    tmp_path: Path, table: Table, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(table.text)))
    insert = data.draw(st.text(",;\t|\"'\n[]#", max_size=2))
    end = data.draw(st.sampled_from((len(table.text), position)))
    text = table.text[:position] + insert + table.text[position:end]
    path = write(tmp_path, {"q.csv": text}) / "q.csv"
    rows, problems, _ = read(path)
    unchanged = [row for row in rows if row in table.rows]
    # Rows behind the place of an edit are asked as they were, or a problem is told.
    assert problems or end == position or len(unchanged) >= len(table.rows) - 1


def test_a_question_of_a_table_is_read_to_its_end(tmp_path: Path) -> None:
    path = write(tmp_path, {"q.tsv": "image\tquestion\tanswer\na.png\t?\t4"}) / "q.tsv"
    assert [question.answers for question in read_questions(path)] == [("4",)]
