from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accuracy.minillava.model import NAMED, digest, find, held_out
from benchmarks.accuracy.records import MME
from vllm_autoprune.errors import ConfigError


def test_the_embedded_model_and_its_questions() -> None:
    model = find("embedded")
    asked = held_out(model, 2)
    assert model.tokens == 144 and len(model.digest) == 12
    assert {one.record.image for one in asked} == {"0", "1"}
    assert all(one.image.startswith("data:image/png;base64,") for one in asked)
    paired = [one.record for one in asked if one.record.benchmark == MME]
    assert paired and all(one.category and one.pair for one in paired)
    answers = {one.answer for one in asked if one.record.benchmark == MME}
    assert answers == {"yes", "no"}
    assert {"count", "position"}.isdisjoint(one.record.benchmark for one in asked)


def test_more_scenes_are_the_same_ones_and_more() -> None:
    model = find("embedded")
    few, more = held_out(model, 1), held_out(model, 2)
    assert list(more[: len(few)]) == list(few)
    assert digest(few) != digest(more)


def test_the_default_is_what_forty_minutes_allow() -> None:
    model = find("embedded")
    per_scene = len(held_out(model, 1))
    assert 50_000 < model.scenes(126) * 126 * per_scene <= 60_000
    assert model.scenes(1_000_000) == 8


def test_a_folder_is_asked_the_harder_questions(tmp_path: Path) -> None:
    for part in ("llava", "clip"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text("{}")
    assert find(str(tmp_path)).hard and not find(str(tmp_path), simple=True).hard
    assert not find("embedded").hard


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no llava/config.json.*embedded, yardstick"):
        find(str(tmp_path))
    assert set(NAMED) == {"embedded", "yardstick"}
