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
    Asked,
    jsonl,
    list_asked,
    refuse_questions,
    write,
)
from tests.evaluation.test_question_reader import NAME
from vllm_autoprune.evaluation.journal import PAIRS
from vllm_autoprune.evaluation.questions import read_questions

LETTER = "\nAnswer with the option's letter from the given choices directly."
CHART = "\nAnswer the question with a single word."
CLIP = {"v/1.png": RED, "v/2.png": RED}
"""A video as a folder of frames; a name with an ending is a folder too."""
SCIENCE = {
    "question": "Which?",
    "choices": ["2", "1"],
    "answer": 1,
    "hint": "Look.",
    "task": "t",
    "grade": "g",
    "subject": "physics",
    "topic": "t",
    "category": "c",
    "skill": "s",
    "lecture": "",
    "solution": "",
}
SEED = {
    "choice_a": "one",
    "choice_b": "2",
    "choice_c": "3",
    "choice_d": "4",
    "answer": "B",
    "data_id": "a.png",
    "data_type": "image",
    "question": "How many?",
    "question_id": "101",
    "question_type_id": 5,
}
MMMU = {
    "id": "validation_Art_Theory_3",
    "question": "See <image 2>?",
    "explanation": "",
    "options": "['red', '<image 1>']",
    "answer": "B",
    "img_type": "['Photo']",
    "topic_difficulty": "Easy",
    "question_type": "multiple-choice",
    "subfield": "Art",
    "image_1": "a.png",
    "image_2": "b.jpg",
    "image_3": None,
}
MATH: dict[str, Any] = {
    "pid": "1",
    "question": "How long?",
    "image": "a.png",
    "unit": "cm",
    "choices": None,
    "precision": 1.0,
    "answer": "1.2",
    "question_type": "free_form",
    "answer_type": "float",
    "metadata": {"task": "geometry"},
    "query": "Hint: x",
}
MATH_CHOICE = {"question_type": "multi_choice", "answer_type": "text", "unit": None}
AOKVQA = {
    "split": "val",
    "image_id": 42,
    "question_id": "q",
    "question": "Why?",
    "choices": ["2", "1", "0"],
    "correct_choice_idx": 1,
    "direct_answers": ["1"],
    "difficult_direct_answer": False,
    "rationales": [],
}
VIDEO_MME = {
    "video_id": "001",
    "duration": "short",
    "domain": "Knowledge",
    "url": "u",
    "sub_category": "Law",
    "videoID": "x",
    "question_id": "001-1",
    "question": "Who?",
    "task_type": "OCR",
    "options": ["A. him", "B. her"],
    "answer": "B",
}
MLVU = {
    "video": "x.mp4",
    "duration": 9.5,
    "question": "What?",
    "answer": "red",
    "candidates": ["blue", "red"],
    "question_type": "plotQA",
}
EGO = {"q_uid": "x", "google_drive_id": "g", "question": "Why?"} | {
    f"option {number}": f"because {number}" for number in range(5)
}
REASONS = [f"{letter}. because {number}" for number, letter in enumerate("ABCDE")]
EGO_TEXT = "\n".join(["Why?", *REASONS])
DOC = {
    "questionId": 1,
    "question": "Total?",
    "question_types": ["form"],
    "image": "a.png",
    "docId": 2,
    "ucsf_document_id": "u",
    "data_split": "val",
    "ucsf_document_page_no": "1",
    "answers": ["41", "41.0"],
}
INFO = {
    "questionId": 1,
    "question": "Total?",
    "image": None,
    "data_split": "val",
    "image_local_name": "a.png",
    "image_url": "http://x",
    "answers": ["41"],
    "answer_type": ["span"],
}
INFO_ON_HUB = {
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
OCR = {
    "dataset_name": "HME100k",
    "image_path": "a.png",
    "question": "Write it.",
    "answers": ["x ^ 2"],
    "type": "Handwritten",
    "id": 0,
}
SWIFT = {
    "messages": [
        {"role": "user", "content": "<image><image>Same?"},
        {"role": "assistant", "content": "no"},
    ],
    "images": ["a.png", {"bytes": None, "path": "b.jpg"}],
}
TRL = {
    "messages": [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
    ],
    "images": ["a.png"],
    "solution": "4",
}
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

LAYOUTS: Mapping[str, tuple[Mapping[str, str | bytes], Sequence[Asked]]] = {
    "ChartQA": ({"q.json": json.dumps([{"imgname": "7.png", "query": "How many?", "label": "7"}]),
        "png/7.png": RED},
        [(f"How many?{CHART}", ("7",), "relaxed", "all", ["png/7.png"])]),
    "ChartQA on the Hub": ({"q.jsonl": jsonl(
        {"type": "human_test", "question": "How many?", "answer": "7", "image": "a.png"},
        {"image": "a.png", "query": "When?", "label": ["7"], "human_or_machine": 0})},
        [(f"How many?{CHART}", ("7",), "relaxed", "human_test", ["a.png"]),
         (f"When?{CHART}", ("7",), "relaxed", "all", ["a.png"])]),
    "DocVQA and InfographicVQA": (
        {"q.json": json.dumps({"dataset_name": "d", "data": [DOC, INFO]}, indent=1)},
        [(f"Total?{SHORT}", ("41", "41.0"), "anls", "form", ["a.png"]),
         (f"Total?{SHORT}", ("41",), "anls", "span", ["a.png"])]),
    "ChartQA and InfographicVQA as their authors and lmms-eval have them on the Hub": (
        {"q.jsonl": jsonl({"imgname": "7.png", "query": "How many?", "label": "7", "type": "human",
            "image": f"data:;base64,{INLINE}"}, INFO_ON_HUB)},
        [(f"How many?{CHART}", ("7",), "relaxed", "human", [NAME]),
         (f"Total?{SHORT}", ("41",), "anls", "span", ["b.jpg"])]),
    "OCRBench": ({"q.json": jsonl(OCR, {"dataset": "IIIT5K", "question": "Read it.",
        "question_type": "Regular", "answer": ["CENTRE"], "image": "a.png"})},
        [("Write it.", ("x ^ 2",), "contains_formula", "Handwritten", ["a.png"]),
         ("Read it.", ("CENTRE",), "contains", "Regular", ["a.png"])]),
    "MMMU": ({"q.jsonl": jsonl(MMMU, {**MMMU, "question": "<image 1> 2?", "options": "[]",
        "question_type": "open", "answer": "['3/4', '0.75']"})},
        [(f"See <image 2>?\nA. red\nB. <image 1>\n{LETTER}", ("B", "<image 1>"), "choice",
          "Art_Theory", ["a.png", "b.jpg"]),
         (f"<image 1> 2?\n{SHORT}", ("3/4", "0.75"), "mmmu", "Art_Theory", ["a.png"])]),
    "MathVista": ({"testmini.json": json.dumps({"1": MATH, "2": {**MATH, **MATH_CHOICE,
        "pid": "2", "choices": ["B", "A"], "answer": "B"}})},
        [("How long? (Unit: cm)\nAnswer the question using a single floating-point number with "
          "1 decimal places.", ("1.2",), "rounded", "geometry", ["a.png"]),
         (f"How long?\nA. B\nB. A{LETTER}", ("A", "B"), "choice", "geometry", ["a.png"])]),
    "ScienceQA": ({"problems.json": json.dumps({"3": {**SCIENCE, "image": "image.png",
        "split": "test"}, "4": {**SCIENCE, "image": None, "split": "test"}}),
        "test/3/image.png": RED},
        [(f"Context: Look.\nWhich?\nA. 2\nB. 1{LETTER}", ("B", "1"), "choice", "physics",
          ["test/3/image.png"])]),
    "SEED-Bench": ({"q.json": json.dumps({"question_type": {"x": 5}, "questions": [SEED]})},
        [(f"How many?\nA. one\nB. 2\nC. 3\nD. 4{LETTER}", ("B", "2"), "choice", "type 5",
          ["a.png"])]),
    "A-OKVQA": ({"q.json": json.dumps([AOKVQA]), "val2017/000000000042.jpg": BLUE},
        [(f"Why?\nA. 2\nB. 1\nC. 0{LETTER}", ("B", "1"), "choice", "all",
          ["val2017/000000000042.jpg"])]),
    "A-OKVQA on the Hub": ({"q.jsonl": jsonl({**{name: value for name, value in AOKVQA.items()
        if name not in ("split", "image_id")}, "image": "a.png", "direct_answers": "['1']"})},
        [(f"Why?\nA. 2\nB. 1\nC. 0{LETTER}", ("B", "1"), "choice", "all", ["a.png"])]),
    "POPE": ({"q.json": jsonl({"question_id": 0, "image": "a.png", "image_id": 548882,
        "text": "A cat?", "label": "no"})}, [("A cat?", ("no",), "yes_no", "all", ["a.png"])]),
    "POPE on the Hub": ({"q.jsonl": jsonl({"id": "1", "question_id": "1", "question": "A cat?",
        "answer": "yes", "image_source": "s", "image": "a.png", "category": "popular"})},
        [("A cat?", ("yes",), "yes_no", "popular", ["a.png"])]),
    "MME on the Hub": ({"q.jsonl": jsonl(*({"question_id": "color/1.png", "image": "a.png",
        "question": f"{answer}?", "answer": answer, "category": "color"}
        for answer in ("Yes", "No")))},
        [("Yes?", ("Yes",), "yes_no", PAIRS, ["a.png"]),
         ("No?", ("No",), "yes_no", PAIRS, ["a.png"])]),
    "Video-MME": ({"q.jsonl": jsonl(VIDEO_MME), **{f"data/x.mp4/{n}.png": RED for n in "12"}},
        [("Select the best answer to the following multiple-choice question based on the video. "
          "Respond with only the letter (A, B, C, or D) of the correct option.\nWho?\nA. him\n"
          "B. her\nThe best answer is:", ("B", "her"), "choice", "OCR", ["data/x.mp4"])]),
    "MLVU": ({"q.json": json.dumps([MLVU, {"video_name": "x.mp4", "duration": 9.5,
        "question": "What?\n(A) blue\n(B) red", "candidates": ["blue", "red"], "answer": "B",
        "task_type": "plotQA", "question_id": "1"}]),
        **{f"video/1_plotQA/x.mp4/{n}.png": RED for n in "12"}},
        [(f"What?\nA. blue\nB. red{LETTER}", ("B", "red"), "choice", "plotQA",
          ["video/1_plotQA/x.mp4"])] * 2),
    "EgoSchema": ({"q.json": json.dumps([EGO]), "subset_answers.json": '{"x": 3}',
        **{f"x.mp4/{n}.png": RED for n in "12"}},
        [(f"{EGO_TEXT}{LETTER}", ("D", "because 3"), "choice", "all", ["x.mp4"])]),
    "EgoSchema on the Hub": ({"q.jsonl": jsonl({"question_idx": "1", "question": "Why?",
        "video_idx": "x", "option": REASONS,
        "answer": "3"}, {"question_idx": "2", "question": "Why?", "video_idx": "x",
        "option": REASONS, "answer": None}), **{f"videos/x.mp4/{n}.png": RED for n in "12"}},
        [(f"{EGO_TEXT}{LETTER}", ("D", "because 3"), "choice", "all", ["videos/x.mp4"]),
         (f"{EGO_TEXT}{LETTER}", (), "choice", "all", ["videos/x.mp4"])]),
    "LLaMA-Factory and ms-swift": ({"q.jsonl": jsonl(SWIFT,
        {"query": "Which?", "response": "this", "images": ["a.png"]},
        {"instruction": "Which?", "input": "Now", "output": "this", "images": ["a.png"]})},
        [("Same?", ("no",), "text", "all", ["a.png", "b.jpg"]),
         ("Which?", ("this",), "text", "all", ["a.png"]),
         ("Which?\nNow", ("this",), "text", "all", ["a.png"])]),
    "TRL, and Qwen-VL's conversations": ({"q.jsonl": jsonl(TRL, {"conversations": [
        {"from": "user", "value": "Picture 1: <img>a.png</img>\nWhich?"},
        {"from": "assistant", "value": "this"}]})},
        [("?", ("4",), "text", "all", ["a.png"]),
         ("Picture 1:\nWhich?", ("this",), "text", "all", ["a.png"])]),
    "The Cauldron, and roles in conversations": ({"q.jsonl": jsonl(
        {"images": ["a.png"], "texts": [{"user": "1?", "assistant": "1", "source": "s"},
            {"user": "2?", "assistant": "2", "source": "s"}]},
        {"image": "b.jpg", "conversations": [{"role": "user", "content": "<image>\n3?"},
            {"role": "assistant", "content": "3"}]})},
        [("2?", ("2",), "text", "all", ["a.png"]), ("3?", ("3",), "text", "all", ["b.jpg"])]),
    "LLaVA-Video": ({"q.json": json.dumps([{"id": "1", "video": "x.mp4", "conversations": [
        {"from": "human", "value": "<image>\nWho?"}, {"from": "gpt", "value": "he"}]}]),
        **{f"x.mp4/{n}.png": RED for n in "12"}},
        [("Who?", ("he",), "text", "all", ["x.mp4"])]),
    "ShareGPT": ({"q.json": json.dumps([SHAREGPT])},
        [("Which?", ("this",), "text", "all", ["a.png"])]),
    "logs of Anthropic's, Qwen's and the Responses API": ({"log.jsonl": jsonl(
        {"custom_id": "1", "params": ANTHROPIC}, {"messages": [QWEN]},
        {"model": "m", "input": {"messages": [QWEN]}}, RESPONSES)},
        [("2?", (), "text", "all", [NAME])] * 4),
    "ImageFolder": ({"folder/metadata.csv": "file_name,question,answer\n1.png,Which?,red\n",
        "folder/1.png": RED},
        [("Which?", ("red",), "text", "all", ["1.png"])]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_is_asked_and_scored_as_its_authors_do(
    tmp_path: Path, name: str
) -> None:
    files, expected = LAYOUTS[name]
    write(tmp_path, files)
    path = tmp_path / next(iter(files))
    if path.parent != tmp_path:
        path = path.parent
    is_video = any(".mp4/" in file for file in files)
    assert sorted(list_asked(path, frames=2 if is_video else 0)) == sorted(expected)


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


WRONG = {
    "an answer that is no option": (
        {**SCIENCE, "image": "a.png", "answer": 5},
        "has the answer '5', which is none of its options -> give the number",
    ),
    "options that are no list": (
        {**MLVU, "candidates": "red"},
        "'candidates' is not a list of options",
    ),
    "a picture too many": (
        {**SWIFT, "images": ["a.png"] * 3},
        "has 3 files for 2 <image> -> give one for each",
    ),
    "an answer of another kind": (
        {"image": "a.png", "question": "?", "answer": {"text": "4"}},
        "'answer' is not text",
    ),
    "two names of one field": (
        {"image": "a.png", "question": "?", "answer": "4", "answers": ["5"]},
        "has 'answer' and 'answers', of which one can be read",
    ),
    "a picture too many for TRL's parts": (
        {**TRL, "images": ["a.png", "b.jpg"]},
        "has 2 files for 1 <image>",
    ),
    "a file by its id": (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}
            ]
        },
        "has a part of type 'input_image'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_layout_does_not_have_is_refused(tmp_path: Path, name: str) -> None:
    record, said = WRONG[name]
    path = write(tmp_path, {"q.jsonl": jsonl(record)}) / "q.jsonl"
    assert said in refuse_questions(path, unlabelled=True)[0]
