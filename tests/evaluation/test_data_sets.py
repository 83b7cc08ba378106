"""Published layouts of data sets: what is asked of each, and by which rule its answer is scored."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.question_files import (
    BLUE,
    INLINE,
    RED,
    SHORT,
    jsonl,
    list_asked,
    refuse_questions,
    write,
)
from tests.evaluation.test_question_reader import NAME
from tests.tables import parametrize_from_file
from vllm_autoprune.evaluation.journal import PAIRS
from vllm_autoprune.evaluation.questions import read_questions

SHAREGPT = {
    "system": "Be brief.",
    "conversations": [
        {"from": "human", "value": "Which?"},
        {"from": "gpt", "value": "this"},
    ],
    "images": ["a.png"],
}
QWEN = {"role": "user", "content": [{"image": "file://a.png"}, {"text": "2?"}]}
RESPONSES = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": f"data:image/png;base64,{INLINE}"},
                {"type": "input_text", "text": "2?"},
            ],
        }
    ],
}
ANTHROPIC = {
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {
            "role": "user",
            "content": [
                {
                    "type": "image",
                    "source": {
                        "type": "base64",
                        "media_type": "image/png",
                        "data": INLINE,
                    },
                },
                {"type": "text", "text": "2?"},
            ],
        }
    ],
}


@parametrize_from_file("files", "pictures", "asked")
def test_a_published_layout_is_asked_and_scored_as_its_authors_do(
    files: Mapping[str, Any], pictures: Sequence[str], asked: list[Any], tmp_path: Path
) -> None:
    """Files are text, JSON or lines of JSON."""
    for name, content in files.items():
        if not isinstance(content, str):
            is_lines = name.endswith(".jsonl")
            content = jsonl(*content) if is_lines else json.dumps(content)
        write(tmp_path, {name: content})
    write(tmp_path, {name: BLUE if ".jpg" in name else RED for name in pictures})
    path = tmp_path / next(iter(files))
    if path.parent != tmp_path:
        path = path.parent
    is_video = any(".mp4/" in name for name in pictures)
    questions = list_asked(path, frames=2 if is_video else 0)
    assert sorted(json.loads(json.dumps(questions))) == sorted(asked)


def test_rows_of_the_hub_are_told_apart_within_one_file(tmp_path: Path) -> None:
    """ChartQA with its picture inline, and InfographicVQA as lmms-eval has it."""
    chart = {"imgname": "7.png", "query": "How many?", "label": "7", "type": "human"}
    graphic = {
        "questionId": "1",
        "question": "Total?",
        "answers": ["41"],
        "answer_type": ["span"],
        "image": "b.jpg",
        "image_url": "http://x",
        "operation/reasoning": ["arithmetic"],
        "ocr": "[]",
        "data_split": "val",
    }
    inline = {**chart, "image": f"data:;base64,{INLINE}"}
    path = write(tmp_path, {"q.jsonl": jsonl(inline, graphic)}) / "q.jsonl"
    word = "\nAnswer the question with a single word."
    assert sorted(list_asked(path)) == [
        (f"How many?{word}", ("7",), "relaxed", "human", [NAME]),
        (f"Total?{SHORT}", ("41",), "anls", "span", ["b.jpg"]),
    ]


def test_logs_of_other_services_are_asked(tmp_path: Path) -> None:
    """Of Anthropic, Qwen and the Responses API."""
    inputs: list[Mapping[str, object]] = [
        {"custom_id": "1", "params": ANTHROPIC},
        {"messages": [QWEN]},
        {"model": "m", "input": {"messages": [QWEN]}},
        RESPONSES,
    ]
    path = write(tmp_path, {"log.jsonl": jsonl(*inputs)}) / "log.jsonl"
    assert list_asked(path) == [("2?", (), "text", "all", [NAME])] * 4


def test_system_prompts_of_all_forms_come_first(tmp_path: Path) -> None:
    path = write(tmp_path, {"q.jsonl": jsonl(ANTHROPIC, RESPONSES, SHAREGPT)})
    for question in read_questions(path / "q.jsonl", unlabelled=True):
        system, user = question.messages()
        assert "Be brief." in str(system["content"]) and system["role"] == "system"
        assert user["role"] == "user"


def test_rows_with_some_columns_of_a_data_set_are_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"image": "a.png", "question": "?", "answer": "4"}
    for others in (
        {"answer_type": "number"},
        {"image_id": 7, "answer_type": "number"},
        {"type": "chart", "id": 3},
        {"doc_id": 1, "target": "5"},
        {"text": "seen in it", "question_id": 2},
    ):
        path = write(tmp_path, {"q.jsonl": jsonl({**line, **others})}) / "q.jsonl"
        assert list_asked(path) == [("?", ("4",), "text", "all", ["a.png"])]
        note = capsys.readouterr().err
        assert all(repr(name) in note for name in others)


def write_parquet(path: Path) -> None:
    """A table of the Hub with its pictures inside, one of which is missing."""
    import pyarrow
    from pyarrow import parquet

    rows = {
        "image": [{"bytes": RED, "path": "1.png"}, {"bytes": None, "path": "b.jpg"}],
        "question": ["1?", "2?"],
        "answer": [7, None],
        "category": [1, 0],
    }
    features = {"category": {"_type": "ClassLabel", "names": ["word", "number"]}}
    info = json.dumps({"info": {"features": features}})
    table = pyarrow.table(rows).replace_schema_metadata({"huggingface": info})
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return
    make = pyarrow.ipc.new_stream if path.stem == "stream" else pyarrow.ipc.new_file
    with make(str(path), table.schema) as file:
        file.write_table(table)


SAVED = json.dumps({"_data_files": [{"filename": "stream.arrow"}]})
FOLDERS: Mapping[str, tuple[str, Mapping[str, str | bytes]]] = {
    "test.parquet": ("test.parquet", {}),
    "file.arrow": ("file.arrow", {}),
    "stream.arrow": ("", {"state.json": SAVED, "dataset_info.json": "{}"}),
    "test/stream.arrow": (
        "",
        {"test/state.json": SAVED, "dataset_dict.json": '{"splits": ["test"]}'},
    ),
    "data/test-00000-of-00001.parquet": ("", {}),
    "train/metadata.parquet": ("", {}),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_pictures_in_parquet_and_arrow_are_read(tmp_path: Path, name: str) -> None:
    path, files = FOLDERS[name]
    write(tmp_path, files)
    write_parquet(tmp_path / name)
    assert list_asked(tmp_path / path) == [
        ("1?", ("7",), "text", "number", [NAME]),
        ("2?", (), "text", "word", ["b.jpg"]),
    ]


def test_a_file_without_its_library_and_folders_of_two_splits_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("test", "train"):
        write_parquet(tmp_path / f"data/{split}-00000-of-00001.parquet")
    (said,) = refuse_questions(tmp_path)
    assert "has 2 splits: test-00000-of-00001.parquet, train" in said
    path = tmp_path / "data/test-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:-40])
    assert "cannot be read" in refuse_questions(path)[0]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (said,) = refuse_questions(path)
    assert "which pyarrow reads -> pip install 'vllm-autoprune[data]'" in said


def test_columns_that_a_data_set_never_has_keep_their_meaning(tmp_path: Path) -> None:
    pair = {"image": "a.png", "pair": 1}
    lines = (
        {"index": 1, "question": "1?", "answer": "yes", **pair},
        {"index": 2, "question": "2?", "answer": "no", **pair},
    )
    path = write(tmp_path, {"q.jsonl": jsonl(*lines)}) / "q.jsonl"
    assert {question[3] for question in list_asked(path)} == {PAIRS}
    pope = {"image": "a.png", "text": "A cat?", "label": "no"}
    write(tmp_path, {"q.jsonl": jsonl(pope)})
    assert list_asked(path) == [("A cat?", ("no",), "yes_no", "all", ["a.png"])]
    write(tmp_path, {"q.jsonl": jsonl({**pope, "answer": "yes"})})
    assert "'question' is missing" in refuse_questions(path)[0]


@pytest.mark.parametrize("column", ["options", "choices"])
@pytest.mark.parametrize(
    ("answer", "accepted"),
    [("B", ("B", "2")), ("3", ("A", "3")), (2, ("B", "2")), (0, ("A", "3"))],
)
def test_options_of_ones_own_are_asked_and_scored_by_letter_text_or_number(
    tmp_path: Path, column: str, answer: object, accepted: tuple[str, ...]
) -> None:
    line = {"image": "a.png", "question": "How many?", column: ["3", "2"]}
    write(tmp_path, {"q.jsonl": jsonl({**line, "answer": answer, "category": "c"})})
    text = (
        "How many?\nA. 3\nB. 2\n"
        "Answer with the option's letter from the given choices directly."
    )
    assert list_asked(tmp_path / "q.jsonl") == [
        (text, accepted, "choice", "c", ["a.png"])
    ]
    for answers in ({"answers": ["3", "2"]}, {"answers": ["3"], "answer": "2"}):
        write(tmp_path, {"q.jsonl": jsonl({**line, **answers})})
        problem = refuse_questions(tmp_path / "q.jsonl")[0]
        assert "has 2 answers, and options" in problem


@parametrize_from_file("record", "said")
def test_what_a_layout_does_not_have_is_refused(
    record: dict[str, object], said: str, tmp_path: Path
) -> None:
    path = write(tmp_path, {"q.jsonl": jsonl(record)}) / "q.jsonl"
    assert said in refuse_questions(path, unlabelled=True)[0]
