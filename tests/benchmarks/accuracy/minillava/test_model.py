from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accuracy.minillava.model import digest, find, held_out
from benchmarks.accuracy.records import MME
from vllm_autoprune.errors import ConfigError


def test_the_embedded_model_and_its_questions() -> None:
    model = find("embedded")
    asked = held_out(2)
    assert model.tokens == 144 and len(model.digest) == 12
    assert {one.record.image for one in asked} == {"0", "1"}
    assert all(one.image.startswith("data:image/png;base64,") for one in asked)
    paired = [one.record for one in asked if one.record.benchmark == MME]
    assert paired and all(one.category and one.pair for one in paired)
    answers = {one.answer for one in asked if one.record.benchmark == MME}
    assert answers == {"yes", "no"}
    open_kinds = {"digit", "colour", "shape", "text", "count", "quarter", "relation"}
    assert {one.record.benchmark for one in asked} == {MME, *open_kinds}


def test_more_scenes_are_the_same_ones_and_more() -> None:
    few, more = held_out(1), held_out(2)
    assert list(more[: len(few)]) == list(few)
    assert digest(few) != digest(more)


def test_the_default_is_what_forty_minutes_allow() -> None:
    model = find("embedded")
    scenes = model.scenes(126)
    assert 50_000 < 126 * len(held_out(scenes)) < 70_000
    assert model.scenes(1_000_000) == 8


def test_a_folder_is_another_model(tmp_path: Path) -> None:
    for part in ("llava", "clip"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text('{"image_seq_length": 576}')
    found = find(str(tmp_path))
    assert (found.name, found.tokens) == (tmp_path.name, 576)


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no llava/config.json.*give embedded, or"):
        find(str(tmp_path))
