from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accuracy.minillava.model import (
    default_scenes,
    find_model,
    prepare_questions,
)
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.journal import MME
from vllm_autoprune.evaluation.questions import questions_digest


def test_the_embedded_model_and_its_questions() -> None:
    model = find_model("embedded")
    questions = prepare_questions(2)
    assert model.tokens == 144 and len(model.digest) == 12
    assert {one.record.image for one in questions} == {"0", "1"}
    assert all(one.image.startswith("data:image/png;base64,") for one in questions)
    paired = [one.record for one in questions if one.record.benchmark == MME]
    assert paired and all(one.category and one.pair for one in paired)
    answers = {one.answer for one in questions if one.record.benchmark == MME}
    assert answers == {"yes", "no"}
    open_kinds = {"digit", "colour", "shape", "text", "count", "quarter", "relation"}
    assert {one.record.benchmark for one in questions} == {MME, *open_kinds}


def test_fewer_scenes_are_a_prefix_of_more() -> None:
    few, more = prepare_questions(1), prepare_questions(2)
    assert list(more[: len(few)]) == list(few)
    assert questions_digest(few) != questions_digest(more)


def test_the_default_number_of_scenes_takes_half_an_hour() -> None:
    scenes = default_scenes(126)
    assert 50_000 < 126 * len(prepare_questions(scenes)) < 70_000
    assert default_scenes(1_000_000) == 8


def test_a_folder_is_another_model(tmp_path: Path) -> None:
    for part in ("llava", "clip"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text('{"image_seq_length": 576}')
    model = find_model(str(tmp_path))
    assert (model.name, model.tokens) == (tmp_path.name, 576)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no llava/config.json.*use embedded, or"):
        find_model(str(tmp_path))
