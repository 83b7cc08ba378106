"""Every golden case, and that a difference is found."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.golden.__main__ import main
from tests.golden.case import DATA, load, names, read
from tests.golden.replay import METHODS, Demand, demand, replay


@pytest.mark.parametrize("name", [name for method in METHODS for name in names(method)])
def test_output_equals_the_published_one(name: str) -> None:
    assert replay(load(name)) == []


COMPARED = {
    "autoprune_released": ("reference", "keep", "features", "quality"),
    "clip_chunk": ("segments", "pooled_pos"),
    "dart": ("keep", "n_out"),
    "fastv": ("order", "keep_seq"),
    "fsr": ("order", "features"),
    "next_order": ("sequence",),
    "pdrop": ("keep",),
    "prumerge": ("idx", "features"),
    "prumerge_budget": ("idx", "features"),
    "sparsevlm": ("keep", "merged"),
    "trim": ("keep", "features_fp16", "n_out"),
    "visionzip": ("dominant_idx", "features"),
}


@pytest.mark.parametrize("method", METHODS)
def test_any_difference_is_reported(method: str) -> None:
    case = load(names(method)[0])
    for array in COMPARED.get(method, ("order",)):
        wrong = case.expected[array].copy()
        wrong.flat[3 if wrong.size > 3 else 0] += 1
        assert replay(replace(case, expected={**case.expected, array: wrong})), array


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [
        ({"note": "", "stable_order": True, "stable_set": True}, Demand.ORDER),
        ({"note": "", "stable_order": False, "stable_set": True}, Demand.SET),
        ({"note": "K=N", "stable_order": True, "stable_set": True}, Demand.SET),
        ({"note": "constant", "stable_order": False, "stable_set": False}, Demand.SOUND),
    ],
)
def test_notes_and_flags_relax_the_comparison(recipe: dict[str, object], wanted: Demand) -> None:
    assert demand(replace(load("fastv/case_00"), recipe=recipe)) is wanted


@pytest.mark.parametrize("name", ["cdpruner/case_08", "divprune/case_07"])
def test_a_degenerate_case_still_demands_its_first_picks(name: str) -> None:
    case = load(name)
    wrong = case.expected["order"].copy()
    # A token that is not among the first picks, nor a duplicate of one of those.
    wrong.flat[2] = wrong.flat[9]
    (problem,) = replay(replace(case, expected={**case.expected, "order": wrong}))
    assert "the first" in problem


def changed(name: str, folder: Path, **recipe: object) -> Path:
    """A copy of a case with another recipe, the recorded digests as they were."""
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as stored:
        arrays = {key: stored[key] for key in stored.files}
    arrays["spec"] = np.array(json.dumps({**json.loads(str(arrays["spec"])), **recipe}))
    path = folder / f"{name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez(file, **arrays)
    return path


def test_inputs_with_other_digests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not make the recorded inputs: attn_last_row"):
        read(changed("fastv/case_01", tmp_path, seed=999))


def test_the_command_prints_each_failure_and_runs_all_cases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 1
    for folder in ("fastv", "telepathy", "dart"):
        (tmp_path / folder).mkdir()
    shutil.copy(DATA / "fastv" / "case_00.npz", tmp_path / "fastv")
    (tmp_path / "fastv" / "broken.npz").write_bytes(b"not an archive")
    np.savez(tmp_path / "dart" / "empty.npz", nothing=np.zeros(1))
    changed("fastv/case_01", tmp_path, seed=3)
    assert main([str(tmp_path)]) == 1
    none, *lines, last = capsys.readouterr().out.splitlines()
    assert (none, last) == ("0 passed, 0 failed", "1 passed, 4 failed")
    failed = ["dart/empty.npz", "fastv/broken.npz", "fastv/case_01.npz", "telepathy"]
    assert [line.split(":")[0] for line in lines] == failed
    assert all(line.split(": ", 1)[1] for line in lines)
