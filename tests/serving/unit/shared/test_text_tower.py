from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.unit.conftest import TinyClip
from tests.serving.unit.samples import SEGMENT, VISION_WIDTH, WIDTH, add_tokenizer, describe
from vllm_autoprune import ConfigError
from vllm_autoprune.errors import Problem
from vllm_autoprune.serving.shared.text_tower import SIGN_KEY, read_text_tower


def refused(path: Path | str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        read_text_tower(str(path))
    (problem,) = caught.value.problems
    assert problem.where == f"--autoprune-text-tower {path}"
    assert problem.fix
    return problem


def test_a_checkpoint_is_described(tiny_clip: TinyClip) -> None:
    tower = read_text_tower(str(tiny_clip.folder))
    assert (tower.path, tower.segment) == (str(tiny_clip.folder), SEGMENT)
    assert (tower.width, tower.vision_width) == (WIDTH, VISION_WIDTH)


@pytest.mark.parametrize(
    ("stated", "sign", "because"),
    [
        ({}, -1, "states no direction"),
        ({SIGN_KEY: None}, -1, "states no direction"),
        ({SIGN_KEY: 1}, 1, SIGN_KEY),
        ({SIGN_KEY: -1}, -1, SIGN_KEY),
        ({SIGN_KEY: 1.0}, 1, SIGN_KEY),
    ],
)
def test_the_sign_comes_with_its_reason(
    tmp_path: Path, stated: dict[str, object], sign: int, because: str
) -> None:
    tower = read_text_tower(str(describe(tmp_path, stated)))
    assert tower.sign == sign
    assert type(tower.sign) is int
    assert because in tower.reason


@pytest.mark.parametrize("sign", [0, 2, "1", "-1", [1], True, 0.5], ids=repr)
def test_invalid_sign_is_refused(tmp_path: Path, sign: object) -> None:
    problem = refused(describe(tmp_path, {SIGN_KEY: sign}))
    assert f"{SIGN_KEY} = {sign!r}" in problem.what


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    assert refused(tmp_path).what == "holds no config.json"


def test_missing_folder(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / "nowhere").what


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "nope"}'])
def test_invalid_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert "cannot be read" in refused(tmp_path).what


@pytest.mark.parametrize("kind", ["clip_text_model", "clip_vision_model", "siglip", "llava"])
def test_a_model_that_is_not_both_towers_of_clip(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    assert refused(tmp_path).what == f"is a {kind!r} model"


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    """Transformers then creates one that has only start and end tokens."""
    assert "has no tokenizer" in refused(describe(tmp_path, tokenizer=False)).what


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    """Its ids would reach beyond the text tower's embeddings, which ends a CUDA process."""
    folder = describe(tmp_path, tokenizer=False)
    add_tokenizer(folder, words=65)
    assert "token 64" in refused(folder).what
