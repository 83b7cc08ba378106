"""Files and folders that people have: what is asked and accepted of each, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.evaluation.question_files import (
    BLUE,
    INLINE,
    RED,
    SHORT,
    Asked,
    assert_told,
    jsonl,
    list_asked,
    refuse_questions,
    write,
)
from tests.fake_server import Answer, fake_server
from tests.json_values import json_values
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.journal import PAIRS, EvaluationError
from vllm_autoprune.evaluation.questions import (
    PreparedQuestion,
    read_examples,
    read_questions,
)

NAME, BLUE_NAME = (
    f"sha256:{hashlib.sha256(picture).hexdigest()[:16]}" for picture in (RED, BLUE)
)
TEN = ["2"] * 4 + ["two"] * 2 + ["a pair"] * 4
OPTIONS = (
    "Hint: Look.\nQuestion: Which?\nOptions:\nA. a cat\nB. 41.20\n"
    "Please select the correct answer from the options above. \n"
)


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def image_part(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


VQA = {
    "data_subtype": "val2014",
    "questions": [
        {"image_id": 42, "question": "How many?", "question_id": 420001},
        {"image_id": 42, "question": "Where?", "question_id": 420002},
    ],
}
ANNOTATIONS = {
    "annotations": [
        {
            "question_id": number,
            "image_id": 42,
            "answer_type": kind,
            "multiple_choice_answer": "2",
            "answers": [
                {"answer": answer, "answer_confidence": "yes"} for answer in TEN
            ],
        }
        for number, kind in ((420001, "number"), (420002, "other"))
    ]
}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image_part("a.png"), text_part("1?")]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": ["2?", image_part(f"data:;base64,{INLINE}")]},
    ],
}
LLAVA = {
    "id": "1",
    "image": ["a.png", "b.jpg"],
    "conversations": [
        {"from": "human", "value": "<image>\nand <image>\nWhich is red?"},
        {"from": "gpt", "value": "the first"},
    ],
}
TABLE = [
    ("index", "image", "question", "hint", "A", "B", "answer", "category"),
    ("7", INLINE, "Which?", "Look.", "a cat", "41.20", "B", "number"),
    ("1000007", "7", "Is it?", "", "", "", "Yes", "word"),
    (
        "8",
        f"['{INLINE}', '{base64.b64encode(BLUE).decode()}']",
        "Count.",
        "",
        "",
        "",
        str(TEN),
        "",
    ),
]
SAMPLE = {
    "doc_id": 3,
    "doc": {"question": "?"},
    "target": ["4", "four"],
    "input": "How many?",
    "arguments": ["How many?", {"max_new_tokens": 16}],
    "input_media": ["a.png"],
    "resps": "4",
    "filtered_resps": "4",
    "doc_hash": "0",
}

FORMATS: Mapping[str, tuple[str, dict[str, str | bytes], list[Asked]]] = {
    "numbers, several answers and images": ("q.jsonl", {"q.jsonl":
        '{"image": "a.png", "question": "?", "answer": 41.20}\n'
        '{"images": ["a.png", "b.jpg"], "question": "2?", "answers": [1e3, "7"], "category": 5}\n'},
        [("?", ("41.20",), "text", "all", ["a.png"]),
         ("2?", ("1e3", "7"), "text", "5", ["a.png", "b.jpg"])]),
    "CSV": ("q.csv", {"q.csv": 'image,question,answer\nb.jpg,"a, b\nc?",4.0\n'},
        [("a, b\nc?", ("4.0",), "text", "all", ["b.jpg"])]),
    "VQAv2": ("v2_questions.json", {
        "v2_questions.json": json.dumps(VQA), "v2_annotations.json": json.dumps(ANNOTATIONS),
        "val2014/COCO_val2014_000000000042.jpg": BLUE},
        [(f"{text}{SHORT}", tuple(TEN), "vqa", kind, ["val2014/COCO_val2014_000000000042.jpg"])
         for text, kind in (("How many?", "number"), ("Where?", "other"))]),
    "VQAv2 without annotations": ("q.json", {
        "q.json": json.dumps(VQA, indent=1), "000000000042.jpg": BLUE},
        [(f"{text}{SHORT}", (), "text", "all", ["000000000042.jpg"])
         for text in ("How many?", "Where?")]),
    "TextVQA": ("q.json", {"q.json": json.dumps({"dataset_type": "val", "data": [
        {"question": "How many?", "image_id": "003a", "answers": TEN, "question_id": 1}]}),
        "train_images/003a.jpg": BLUE},
        [(f"How many?{SHORT}", tuple(TEN), "vqa", "all", ["train_images/003a.jpg"])]),
    "VizWiz": ("q.json", {"q.json": json.dumps([{"image": "b.jpg", "question": "?",
        "answer_type": "other", "answers": [{"answer": answer} for answer in TEN]}])},
        [(f"?{SHORT}", tuple(TEN), "vqa", "other", ["b.jpg"])]),
    "POPE": ("q.json", {"q.json": jsonl(
        {"question_id": 1, "image": "a.png", "text": "Is there a cat?", "label": "no"},
        {"question_id": 2, "image": "b.jpg", "text": "Is there a dog?", "label": "yes"})},
        [("Is there a cat?", ("no",), "yes_no", "all", ["a.png"]),
         ("Is there a dog?", ("yes",), "yes_no", "all", ["b.jpg"])]),
    "MME": ("mme", {"mme/color/a.txt": "Is it red?\tYes\nIs it blue?\tNo\n",
        "mme/color/a.png": RED, "mme/OCR/images/b.jpg": BLUE,
        "mme/OCR/questions_answers_YN/b.txt": "One?\tNo\nTwo?\tYes"},
        [("One?", ("No",), "yes_no", PAIRS, ["OCR/images/b.jpg"]),
         ("Two?", ("Yes",), "yes_no", PAIRS, ["OCR/images/b.jpg"]),
         ("Is it red?", ("Yes",), "yes_no", PAIRS, ["color/a.png"]),
         ("Is it blue?", ("No",), "yes_no", PAIRS, ["color/a.png"])]),
    "a folder of pictures": ("photos", {"photos/1.PNG": RED, "photos/trip/2.jpeg": BLUE,
        "photos/._1.png": b"",
        "photos/questions.txt": "\ufeffWhat is it?\r\n\r\nWhich colour?\tred\n"},
        [("What is it?", (), "text", "all", ["1.PNG"]),
         ("Which colour?", ("red",), "text", "all", ["1.PNG"]),
         ("What is it?", (), "text", "trip", ["trip/2.jpeg"]),
         ("Which colour?", ("red",), "text", "trip", ["trip/2.jpeg"])]),
    "a yes and a no that all pictures share, which are no pair of MME": ("photos", {
        "photos/1.png": RED, "photos/questions.txt": "Is it red?\tYes\nIs it blue?\tNo\n"},
        [("Is it red?", ("Yes",), "yes_no", "all", ["1.png"]),
         ("Is it blue?", ("No",), "yes_no", "all", ["1.png"])]),
    "VLMEvalKit": ("q.tsv", {"q.tsv": "\n".join("\t".join(row) for row in TABLE)},
        [(OPTIONS, ("B", "41.20"), "choice", "number", [NAME]),
         ("Is it?", ("Yes",), "yes_no", "word", [NAME]),
         (f"Count.{SHORT}", tuple(TEN), "vqa", "all", [NAME, BLUE_NAME])]),
    "LLaVA": ("q.json", {"q.json": json.dumps([LLAVA], indent=2)},
        [("and\nWhich is red?", ("the first",), "text", "all", ["a.png", "b.jpg"])]),
    "chat requests": ("log.jsonl", {"log.jsonl": jsonl(
        CHAT, {"custom_id": "1", "body": CHAT}, {"request": json.dumps({"body": CHAT})},
        {"messages": [{"role": "user", "content": "no picture"}]})},
        [("2?", (), "text", "all", ["a.png", "a.png"])] * 3),
    "files beside pictures, of macOS too": ("photos", {"photos/1.png": RED,
        "photos/._1.txt": "\0", "photos/questions.txt": "?", "photos/__MACOSX/2.png": b""},
        [("?", (), "text", "all", ["1.png"])]),
    "lmms-eval": ("q.jsonl", {"q.jsonl": jsonl(SAMPLE)},
        [("How many?", ("4", "four"), "text", "all", ["a.png"])]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_recognised_by_its_content(tmp_path: Path, name: str) -> None:
    path, files, expected = FORMATS[name]
    assert list_asked(write(tmp_path, files) / path) == expected


def test_turns_of_a_conversation_are_kept_and_pictures_sent_as_they_are(
    tmp_path: Path,
) -> None:
    write(tmp_path, {"q.jsonl": jsonl(CHAT)})
    (question,) = read_questions(tmp_path / "q.jsonl", unlabelled=True)
    system, user, assistant, last = question.messages()
    sent = {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{INLINE}"},
    }
    assert (system, assistant) == (CHAT["messages"][0], CHAT["messages"][2])
    assert user["content"] == [sent, text_part("1?")]
    assert last["content"] == [text_part("2?"), sent]
    (tmp_path / "a.png").write_bytes(BLUE)
    with pytest.raises(
        EvaluationError, match=r"a\.png: has changed since it was read -> restore"
    ):
        question.messages()


def chat(*parts: object) -> str:
    return jsonl(
        {"messages": [{"role": "user", "content": [image_part("a.png"), *parts]}]}
    )


REFUSED: Mapping[str, tuple[str, dict[str, str | bytes], str]] = {
    "only annotations": (
        "q.json",
        {"q.json": json.dumps(ANNOTATIONS)},
        "q.json: has the answers to questions of another file -> name the file",
    ),
    "pictures elsewhere": (
        "q.json",
        {"q.json": json.dumps(VQA)},
        "record 1: image 'COCO_val2014_000000000042.jpg': cannot be read (No such file",
    ),
    "pictures and no question": (
        "photos",
        {"photos/1.png": RED, "photos/2.png": RED},
        "photos: has pictures without a question (2) -> write ",
    ),
    "no picture in a folder": (
        "photos",
        {"photos/1.jxl": RED, "photos/questions.txt": "?"},
        "photos: has no picture -> name a folder with PNG or JPEG files",
    ),
    "questions about no picture": (
        "photos",
        {"photos/1.png": RED, "photos/notes.txt": "?"},
        "notes.txt: has questions about no picture",
    ),
    "a folder with a file of questions": (
        "photos",
        {"photos/1.png": RED, "photos/q.jsonl": ""},
        "photos/q.jsonl",
    ),
    "a sample without its picture": (
        "q.jsonl",
        {"q.jsonl": jsonl({**SAMPLE, "input_media": None})},
        ":1: has no picture: lmms-eval keeps",
    ),
    "an image that is no row's": (
        "q.tsv",
        {"q.tsv": "index\timage\tquestion\n1\t9\t?\n"},
        ":2: image '9': cannot be read",
    ),
    "a sound": (
        "q.jsonl",
        {"q.jsonl": chat({"type": "audio_url", "audio_url": {"url": "x"}})},
        ":1: has a part of type 'audio_url' -> ",
    ),
    "no video": (
        "q.jsonl",
        {"v.mp4": RED, "q.jsonl": jsonl({"video": "v.mp4", "question": "?"})},
        ":1: image 'v.mp4': cannot be decoded as a video",
    ),
    "frames in a data URL": (
        "q.jsonl",
        {"q.jsonl": jsonl({"video": "data:video/jpeg;base64,AA,BB", "question": "?"})},
        ":1: image 'data:video/jpeg;base64,AA,BB': is frames in a data URL -> write them to",
    ),
    "a video where pictures are asked about": (
        "q.jsonl",
        {
            "v/1.png": RED,
            "v/2.png": RED,
            "q.jsonl": chat(
                text_part("?"), {"type": "video_url", "video_url": {"url": "v"}}
            ),
        },
        ":1: asks about a video -> add --frames 32, or leave it out",
    ),
    "no role": (
        "q.jsonl",
        {"q.jsonl": jsonl({"messages": [{"content": "?"}]})},
        "without a role",
    ),
    "no picture": (
        "q.jsonl",
        {"q.jsonl": jsonl({"messages": [{"role": "user", "content": "?"}]})},
        "contains no question about a picture",
    ),
    "more <image> than images": (
        "q.json",
        {"q.json": json.dumps([{**LLAVA, "image": "a.png"}])},
        "record 1: has 1 files for 2 <image> -> give one for each",
    ),
}


def test_what_is_passed_over_in_a_folder_is_named_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("1.png", "raw/2.dng", "3.svg", "trip/4.png", "trip/deep/5.png", "6.pdf")
    files = {f"photos/{name}": RED for name in names}
    write(tmp_path, {**files, "photos/questions.txt": "?"})
    questions = read_questions(tmp_path / "photos", unlabelled=True)
    assert len(questions) == 2
    note = capsys.readouterr().err
    assert "files that no question is about (4): 3.svg, 6.pdf, raw/2.dng" in note
    assert "trip/deep" in note
    write(tmp_path, {"photos/metadata.csv": "file_name,question\ntrip/4.png,?\n"})
    assert len(read_questions(tmp_path / "photos", unlabelled=True)) == 1
    note = capsys.readouterr().err
    assert "files that no question is about (2): 1.png, trip/deep/5.png\n" in note


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_asked_is_refused(tmp_path: Path, name: str) -> None:
    path, files, said = REFUSED[name]
    assert said in refuse_questions(write(tmp_path, files) / path, unlabelled=True)[0]


def test_images_are_searched_in_another_folder_and_a_search_takes_the_usual_answer(
    tmp_path: Path,
) -> None:
    files = {"q.json": json.dumps(VQA), "annotations.json": json.dumps(ANNOTATIONS)}
    path = write(tmp_path, {**files, "coco/000000000042.jpg": BLUE}) / "q.json"
    questions = read_questions(path, 1, images=tmp_path / "coco")
    assert [
        picture.path.parent.name for each in questions for picture in each.pictures
    ] == ["coco"]
    (tmp_path / "000000000042.jpg").write_bytes(BLUE)
    problems: list[Problem] = []
    assert [example.answer for example in read_examples(path, problems, "")[0]] == [
        "2",
        "2",
    ]
    write(tmp_path, {"chat.jsonl": chat(text_part("?"), image_part("b.jpg"))})
    assert not read_examples(tmp_path / "chat.jsonl", problems, "")[0]
    assert [problem.what for problem in problems] == ["has no answer"]


def test_a_picture_at_a_url_is_downloaded_once_and_without_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def picture() -> Answer:
        asked.append("a")
        return 200, RED, {"content-type": "image/png"}

    monkeypatch.setenv("VLLM_API_KEY", "secret")
    moved: Answer = (302, b"", {"location": "/a.png?key=k"})
    with fake_server(pages={"/a.png?key=k": picture, "/moved.png": moved}) as server:
        lines = [
            {"image": f"{server.url}/{name}", "question": f"{number}?", "answer": "x"}
            for number, name in enumerate((*["a.png?key=k"] * 2, "moved.png"))
        ]
        write(tmp_path, {"q.jsonl": jsonl(*lines)})
        questions = read_questions(tmp_path / "q.jsonl")
        assert {question.record.image for question in questions} == {
            f"{server.url}/a.png"
        }
        assert INLINE in json.dumps(questions[2].messages()) and len(asked) == 2
        assert "secret" not in str(server.headers)
        monkeypatch.setattr("vllm_autoprune.evaluation.pictures._MAX_BYTES", 100)
        server.pages["/large.png"] = (200, bytes(200), {})
        wrong = ("gone.png", "large.png")
        write(
            tmp_path,
            {
                "q.jsonl": jsonl(
                    *({**lines[0], "image": f"{server.url}/{name}"} for name in wrong)
                )
            },
        )
        gone, large_one = refuse_questions(tmp_path / "q.jsonl")
    assert ":1: image 'http" in gone and "cannot be read (status 404) -> " in gone
    assert ":2: image 'http" in large_one and "(more than 0 MiB)" in large_one


# ---- nothing that a record holds ends in another exception ----

KEYS = (
    "id choices options candidates choice_a hint pid questionId file_name system source query "
    "instructions response imgname label index image images question answer answers category pair "
    "text A image_id answer_type questions annotations data question_id data_subtype doc_id target "
    "input arguments input_media body request messages role content type image_url url "
    "conversations from value"
)
TEXTS = ("a.png", "user", "assistant", "<image>", "text", "image_url", "yes")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(json_values(KEYS, TEXTS), st.booleans())
def test_any_record_is_read_or_refused_in_words(
    tmp_path: Path, record: str, document: bool
) -> None:
    record = json.dumps(json.loads(record), indent=document or None)
    path = write(tmp_path, {"q.json": record}) / "q.json"
    try:
        questions = read_questions(path, unlabelled=True)
        assert all(isinstance(question, PreparedQuestion) for question in questions)
        json.dumps([(question.messages(), question.text) for question in questions])
    except ConfigError as error:
        assert_told(error)
