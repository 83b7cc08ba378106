"""Images and questions of one's own: folder, JSONL, data set on disk; mistakes in one line."""

from __future__ import annotations

import base64
import io
import json
import sys
import types
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.common import BenchmarkError
from benchmarks.load.__main__ import main
from benchmarks.load.own_data import as_data_url, open_data
from benchmarks.load.prepared_requests import load_prepared
from tests.benchmarks.load.samples import write_images

PREPARE = ["prepare", "--model", "m", "--requests", "3", "--warm-up", "1"]


def prepare(tmp_path: Path, data: Path, *more: str) -> list[dict[str, object]]:
    """Contents of the user's messages that would be sent, in order."""
    out = tmp_path / "w"
    assert main([*PREPARE, "--data", str(data), "--out", str(out), *more]) == 0
    prepared = load_prepared(out)
    bodies = [json.loads(prepared.body(line)) for line in prepared.lines]
    contents = [body["messages"][-1]["content"] for body in bodies]
    return [
        {
            "text": next(part["text"] for part in content if part["type"] == "text"),
            "images": [part["image_url"]["url"] for part in content if part["type"] != "text"],
        }
        for content in contents
    ]


def data_url(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def test_a_folder_gives_its_images_in_order_and_its_prompts(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_images(data, 4)
    (data / "prompts.txt").write_text("What is this?\n\nWhere is it?\n")
    (data / "notes.md").write_text("no image")
    sent = prepare(tmp_path, data)
    assert [one["images"] for one in sent] == [[data_url(data / f"00{n}.png")] for n in range(4)]
    assert [one["text"] for one in sent] == ["What is this?", "Where is it?"] * 2


def test_questions_are_drawn_where_the_data_has_none(tmp_path: Path) -> None:
    write_images(tmp_path / "data", 4)
    assert len({str(one["text"]) for one in prepare(tmp_path, tmp_path / "data")}) == 4


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
    sent = prepare(tmp_path, path)
    assert [one["text"] for one in sent] == ["One?", "Two?", "Three?", "Four?"]
    assert sent[1]["images"] == [data_url(tmp_path / f"00{n}.png") for n in (1, 2)]


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
    rows = [{"id": n, "image": cell, "question": f"{n}?"} for n in range(3)]
    rows.append({"id": 3, "image": [cell, cell], "question": "3?"})
    library = types.ModuleType("datasets")
    library.load_from_disk = lambda path: FakeRows(rows)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    data = tmp_path / "set"
    data.mkdir()
    (data / "state.json").write_text("{}")
    sent = prepare(tmp_path, data)
    assert [one["text"] for one in sent] == ["0?", "1?", "2?", "3?"]
    assert sent[0]["images"] == [as_data_url(buffer.getvalue())]
    assert sent[3]["images"] == [as_data_url(buffer.getvalue())] * 2


def test_a_change_of_the_data_prepares_the_workload_again(tmp_path: Path) -> None:
    write_images(tmp_path / "data", 4)
    prepare(tmp_path, tmp_path / "data")
    before = load_prepared(tmp_path / "w").digest
    (tmp_path / "data" / "prompts.txt").write_text("Another?\n")
    open_data.cache_clear()
    prepare(tmp_path, tmp_path / "data")
    assert load_prepared(tmp_path / "w").digest != before


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
        given = [*PREPARE, "--data", str(tmp_path / name), "--out", str(tmp_path / "w")]
        assert main(given) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, name
        assert not (tmp_path / "w").exists()


def test_a_file_that_is_no_image_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="is no JPEG, PNG, GIF or WebP"):
        as_data_url(b"%PDF-1.7")
