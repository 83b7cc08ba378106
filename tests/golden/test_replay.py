"""Every golden case, and that a difference is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.golden.case import DATA, load, names, read
from tests.golden.replay import METHODS, replay


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
