"""Workloads: cache states, mixes, bodies on disk, images and questions of one's own."""

from __future__ import annotations

import base64
import io
import json
import sys
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.common import BenchmarkError
from benchmarks.load.__main__ import main
from benchmarks.load.settings import Workload
from benchmarks.load.workload import (
    BODIES,
    Picture,
    Request,
    as_data_url,
    draw_requests,
    load_prepared,
    prepare,
)
from tests.benchmarks.load.samples import WORKLOAD, write_images

PREPARE = ["prepare", "--model", "m", "--requests", "3", "--warm-up", "1"]


def draw(cache: str, **changes: object) -> tuple[list[Request], list[Request]]:
    """The measured requests, and those of the warm-up."""
    values = {"model": "m", "requests": 200, "warm_up": 5, "cache": cache, **changes}
    workload = Workload.model_validate(values)
    requests = draw_requests(workload)
    return requests[: workload.requests], requests[workload.requests :]


def pictures_of(requests: Sequence[Request]) -> list[Picture]:
    return [p for request in requests for p in request.pictures if isinstance(p, Picture)]


@pytest.mark.parametrize(
    ("cache", "images", "questions"),
    [("unique", 205, 205), ("repeat", 15, 15), ("off", 15, 15), ("same-image", 15, 205)],
)
def test_what_repeats_is_the_declared_state_of_the_caches(
    cache: str, images: int, questions: int
) -> None:
    measured, warm_up = draw(cache, pool=10)
    every = [*measured, *warm_up]
    assert len(set(pictures_of(every))) == len({p.seed for p in pictures_of(every)}) == images
    assert len({request.question for request in every}) == questions
    # The warm-up shares no image.
    assert len(warm_up) == 5 and not set(pictures_of(measured)) & set(pictures_of(warm_up))


def test_repeated_requests_follow_zipfs_law() -> None:
    measured, _ = draw("repeat", requests=2000, pool=10, zipf=1.0)
    counts = Counter(measured)
    assert len(counts) == 10
    most, second = (number for _, number in counts.most_common(2))
    assert most / 2000 == pytest.approx(1 / sum(1 / k for k in range(1, 11)), rel=0.15)
    assert most / second == pytest.approx(2, rel=0.25)


def test_sizes_counts_formats_and_lengths_follow_their_mixes() -> None:
    measured, _ = draw(
        "unique", requests=400, sides="400,800=3", aspects="2/1,1/2", images="1,3", formats="png",
        words="5,9",
    )  # fmt: skip
    pictures = pictures_of(measured)
    sizes = Counter((picture.width, picture.height) for picture in pictures)
    assert set(sizes) == {(400, 200), (200, 400), (800, 400), (400, 800)}
    large = sum(number for size, number in sizes.items() if max(size) == 800)
    assert large / len(pictures) == pytest.approx(0.75, abs=0.06)
    assert {picture.format for picture in pictures} == {"png"}
    assert {len(request.pictures) for request in measured} == {1, 3}
    # The number of the question is one word more.
    assert {len(request.question.split()) for request in measured} == {6, 10}


def test_the_seed_determines_all_requests() -> None:
    assert draw("repeat") == draw("repeat") != draw("repeat", seed=1)


def test_numbered_questions_have_as_many_words_and_differ() -> None:
    measured, _ = draw("unique", vocabulary="numbered", words="4")
    words = [request.question.split() for request in measured]
    assert len({request.question for request in measured}) == 200
    assert all(len(line) == 4 for line in words)
    assert all(word[0] == "w" and word[1:].isdecimal() for word in words[0])


def test_bodies_are_streamed_chat_requests(tmp_path: Path) -> None:
    prepared = prepare(WORKLOAD, tmp_path / "w")
    assert (len(prepared.measured), len(prepared.warm_up), prepared.images[0]) == (8, 2, 1)
    body = json.loads(prepared.measured[3])
    picture, question = body["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/")
    assert question == {"type": "text", "text": draw_requests(WORKLOAD)[3].question}
    assert (body["model"], body["max_tokens"]) == ("mock", 4)
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True
    plain = prepare(WORKLOAD.model_copy(update={"dialect": "openai"}), tmp_path)
    assert not {"ignore_eos", "skip_special_tokens"} & json.loads(plain.measured[0]).keys()


def test_equal_settings_give_equal_bytes(tmp_path: Path) -> None:
    digest = prepare(WORKLOAD, tmp_path / "a").digest
    assert prepare(WORKLOAD, tmp_path / "b").digest == digest
    seeded = prepare(WORKLOAD.model_copy(update={"seed": 1}), tmp_path / "a")
    assert seeded.digest != digest


def test_an_incomplete_or_missing_folder_is_refused_with_the_fix(tmp_path: Path) -> None:
    prepare(WORKLOAD, tmp_path)
    (tmp_path / BODIES).write_bytes((tmp_path / BODIES).read_bytes()[:-10])
    with pytest.raises(BenchmarkError, match="incomplete"):
        load_prepared(tmp_path)
    with pytest.raises(BenchmarkError, match=r"python -m benchmarks\.load prepare"):
        load_prepared(tmp_path / "nowhere")


def send(tmp_path: Path, data: Path) -> list[tuple[str, list[str]]]:
    """Question and images of the requests that would be sent, in order."""
    out = tmp_path / "w"
    assert main([*PREPARE, "--data", str(data), "--out", str(out)]) == 0
    contents = [json.loads(body)["messages"][-1]["content"] for body in load_prepared(out).bodies]
    return [
        (content[-1]["text"], [part["image_url"]["url"] for part in content[:-1]])
        for content in contents
    ]


def data_url(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def test_a_folder_gives_its_images_in_order_and_its_prompts(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_images(data, 4)
    (data / "prompts.txt").write_text("What is this?\n\nWhere is it?\n")
    (data / "notes.md").write_text("no image")
    asked = ["What is this?", "Where is it?"] * 2
    urls = [[data_url(data / f"00{n}.png")] for n in range(4)]
    assert send(tmp_path, data) == list(zip(asked, urls, strict=True))


def test_questions_are_drawn_where_the_data_has_none(tmp_path: Path) -> None:
    write_images(tmp_path / "data", 4)
    assert len({question for question, _ in send(tmp_path, tmp_path / "data")}) == 4


def test_a_jsonl_file_gives_questions_and_several_images(tmp_path: Path) -> None:
    write_images(tmp_path, 4)
    path = tmp_path / "data.jsonl"
    lines = [
        {"image": "000.png", "question": "One?"},
        {"images": ["001.png", "002.png"], "prompt": "Two?"},
        {"image": "003.png", "question": "Three?"},
        {"image": "000.png", "question": "Four?"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sent = send(tmp_path, path)
    assert [question for question, _ in sent] == ["One?", "Two?", "Three?", "Four?"]
    assert sent[1][1] == [data_url(tmp_path / f"00{n}.png") for n in (1, 2)]


class FakeRows:
    """Rows as ``datasets.Dataset.with_format("arrow")`` gives them."""

    def __init__(self, rows: list[dict[str, object]]) -> None:
        self.rows = rows

    def with_format(self, name: str) -> FakeRows:
        assert name == "arrow"
        return self

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> FakeRows:
        return FakeRows(self.rows[rows])

    def to_pylist(self) -> list[dict[str, object]]:
        return self.rows


def test_a_data_set_on_disk_gives_images_and_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    cell = {"bytes": buffer.getvalue(), "path": None}
    rows: list[dict[str, object]] = [{"image": cell, "question": f"{n}?"} for n in range(3)]
    rows.append({"image": [cell, cell], "question": "3?"})
    library = types.ModuleType("datasets")
    library.load_from_disk = lambda path: FakeRows(rows)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    data = tmp_path / "set"
    data.mkdir()
    (data / "state.json").write_text("{}")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    assert send(tmp_path, data) == [(f"{n}?", [url] * (1 + (n == 3))) for n in range(4)]


def test_mistakes_in_the_data_are_answered_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "few", 3)
    (tmp_path / "empty").mkdir()
    for name, line in (("a", "{"), ("b", '{"question": "?"}'), ("c", '{"image": "none.png"}')):
        (tmp_path / f"{name}.jsonl").write_text(line + "\n")
    for folder, file, text in (
        ("set", "state.json", "{}"),
        ("splits", "dataset_dict.json", '{"splits": ["test"]}'),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(text)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name, message in {
        "few": "has 3 items, but --cache unique needs 4 (with the warm-up)",
        "none": "is no folder and no .jsonl file",
        "empty": "contains no images",
        "a.jsonl": "line 1: Expecting property name",
        "b.jsonl": 'line 1: no "image" -> give a path',
        "c.jsonl": "none.png does not exist",
        "set": "pip install datasets",
        "splits": f"has splits -> name one: {tmp_path / 'splits' / 'test'}",
    }.items():
        out = tmp_path / "w"
        assert main([*PREPARE, "--data", str(tmp_path / name), "--out", str(out)]) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, name
        assert not out.exists()
    with pytest.raises(BenchmarkError, match="is no JPEG, PNG, GIF or WebP"):
        as_data_url(b"%PDF-1.7")
