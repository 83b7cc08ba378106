"""Arrays from files: valid ones are read, every problem of others is reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.tpdsl.samples import state
from vllm_autoprune import Grid, PruningState, materialize
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.report.arrays import read_tokens

Arrays = dict[str, npt.NDArray[np.generic]]

ALONE = {"/constraints/selector/q_e": 0, "/base_policy": {"name": "divprune"}}


def arrays(**changes: npt.NDArray[np.generic] | None) -> Arrays:
    random = np.random.default_rng(0)
    contents: dict[str, npt.NDArray[np.generic] | None] = {
        "features": random.normal(size=(36, 8)).astype(np.float32),
        "cls_attention": random.random(36).astype(np.float32),
        "patches": random.normal(size=(36, 4)).astype(np.float32),
        "text": random.normal(size=(2, 4)).astype(np.float32),
        "sign": np.array(-1),
    }
    return {key: value for key, value in (contents | changes).items() if value is not None}


def problems(path: Path, of: PruningState | None = None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        read_tokens(path, materialize(of or state(), 8))
    return {problem.where: problem.what for problem in caught.value.problems}


def save(folder: Path, contents: Arrays) -> Path:
    path = folder / "arrays.npz"
    np.savez(path, allow_pickle=True, **contents)
    return path


def test_one_image(tmp_path: Path) -> None:
    contents = arrays()
    tokens = read_tokens(save(tmp_path, contents), materialize(state(), 8))
    assert (tokens.batch, tokens.count, tokens.grid) == (1, 36, Grid(6, 6))
    assert torch.equal(tokens.features[0], torch.from_numpy(contents["features"]))
    assert tokens.instruction is not None
    assert tokens.instruction.sign == -1 and tokens.instruction.segments.tolist() == [[True, True]]


def test_several_images_of_several_tiles(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    contents: Arrays = {
        "features": random.normal(size=(3, 36, 8)).astype(np.float16),
        "grid": np.array([3, 4, 3]),
    }
    tokens = read_tokens(save(tmp_path, contents), materialize(state(ALONE), 8))
    assert tokens.grid == Grid(3, 4, tiles=3) and tokens.batch == 3
    assert tokens.features.dtype == torch.float16
    assert tokens.instruction is None and tokens.cls_attention is None


def test_double_precision_is_read_as_single(tmp_path: Path) -> None:
    contents = arrays(features=np.ones((36, 8)))
    tokens = read_tokens(save(tmp_path, contents), materialize(state(), 8))
    assert tokens.features.dtype == torch.float32


def test_all_problems_of_the_arrays_are_reported_together(tmp_path: Path) -> None:
    contents = arrays(
        features=np.ones((35, 8)),
        feature=np.ones(3),
        text=np.ones((1, 5)),
        sign=np.array(0),
        segments=np.ones((1, 7)),
    )
    assert set(problems(save(tmp_path, contents))) == {
        "feature",
        "grid",
        "cls_attention",
        "patches",
        "text",
        "segments",
        "sign",
    }


@pytest.mark.parametrize("lacking", ["features", "patches", "text", "sign"])
def test_inputs_that_the_policy_reads_are_required(tmp_path: Path, lacking: str) -> None:
    path = save(tmp_path, arrays(**{lacking: None}))
    assert problems(path)[lacking] == "required but missing"


def test_attention_may_be_left_out_where_only_a_signal_reads_it(tmp_path: Path) -> None:
    path = save(tmp_path, arrays(cls_attention=None))
    assert read_tokens(path, materialize(state(), 8)).cls_attention is None


def test_an_instruction_may_be_left_out_where_nothing_reads_it(tmp_path: Path) -> None:
    path = save(tmp_path, arrays(patches=None, text=None, sign=None))
    assert read_tokens(path, materialize(state(ALONE), 8)).instruction is None


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("features", np.ones(36)),
        ("features", np.ones((0, 36, 8))),
        ("features", np.array([["a"]])),
        ("features", np.ones((36, 8), dtype=np.complex64)),
        ("grid", np.array([6, 5])),
        ("grid", np.array([6.0, 6.0])),
        ("grid", np.array([0, 6])),
        ("sign", np.array([1, 1])),
        ("sign", np.array("+")),
    ],
)
def test_arrays_of_another_kind_are_refused(
    tmp_path: Path, name: str, array: npt.NDArray[np.generic]
) -> None:
    assert name in problems(save(tmp_path, arrays(**{name: array})))


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    contents = arrays(features=np.array([print, 1], dtype=object))
    assert "pickle" in problems(save(tmp_path, contents)).popitem()[1].lower()


def test_files_that_are_no_archives(tmp_path: Path) -> None:
    text = tmp_path / "text.npz"
    text.write_text("not an archive")
    assert problems(text) == {str(text): "is not a .npz file"}
    lost = tmp_path / "lost.npz"
    assert problems(lost) == {str(lost): "no such file"}
    assert problems(tmp_path) == {str(tmp_path): "no such file"}
    cut = save(tmp_path, arrays())
    cut.write_bytes(cut.read_bytes()[:200])
    assert problems(cut) == {str(cut): "is not a .npz file"}
