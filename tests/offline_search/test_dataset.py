from __future__ import annotations

import json
from pathlib import Path

import pytest

from offline_search.dataset import Dataset, read_dataset
from vllm_autoprune.errors import ConfigError


def test_splits_are_shuffled_by_image_and_cut_by_image(data: Dataset) -> None:
    read = read_dataset(data.folder, seed=1)
    assert read.examples("search") != data.examples("search")
    assert sorted(map(repr, read.examples("search"))) == sorted(map(repr, data.examples("search")))
    images = [example.image for example in read.examples("search")]
    assert images[::2] == images[1::2], "questions of an image stay together"
    few = read_dataset(data.folder, seed=1, limit=2)
    assert list(few.examples("search")) == list(read.examples("search"))[:4]
    assert few.digest != read.digest == read_dataset(data.folder, seed=1).digest


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


def test_an_empty_split_and_a_missing_folder_are_errors(data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_dataset(tmp_path / "nowhere")
    (data.folder / "test.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="contains no example"):
        read_dataset(data.folder)
