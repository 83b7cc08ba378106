from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.golden.case import DATA, load, names, read
from tests.golden.generator import uniform

METHODS = {
    "autoprune_released": 8,
    "cdpruner": 9,
    "cen_cdpruner": 9,
    "cen_divprune": 9,
    "clip_chunk": 4,
    "dart": 6,
    "divprune": 8,
    "fastv": 6,
    "fsr": 9,
    "holov": 8,
    "idpruner": 8,
    "mmtok": 10,
    "next_order": 3,
    "pdrop": 5,
    "prumerge": 5,
    "prumerge_budget": 5,
    "prunesid": 9,
    "scope": 8,
    "sparsevlm": 5,
    "trim": 7,
    "visionzip": 6,
}
GENERATOR = {"prumerge_budget": "prumerge_nocls"}


def test_every_method_has_cases() -> None:
    assert {folder.name for folder in DATA.iterdir()} == set(METHODS)


@pytest.mark.parametrize(("method", "count"), METHODS.items())
def test_every_case_loads_with_its_recorded_inputs(method: str, count: int) -> None:
    actual = [load(name) for name in names(method)]  # load checks the digests
    assert len(actual) == count
    made_by = GENERATOR.get(method, method)
    assert all(case.recipe["gen"] == made_by and case.expected for case in actual)


def test_input_hash_is_portable() -> None:
    assert uniform(11, "feat", (3,)).tolist() == uniform(11, "feat", (5,)).tolist()[:3]
    assert uniform(11, "feat", (1,)).item() != uniform(12, "feat", (1,)).item()


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


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_case_in_half_precision_is_rounded_to_nearest_even(tmp_path: Path, name: str) -> None:
    case = read(changed("divprune/case_01", tmp_path, dtype=name))
    rounded = case.given("features")
    assert (
        rounded.dtype == case.dtype == {"float16": torch.float16, "bfloat16": torch.bfloat16}[name]
    )
    assert torch.equal(rounded, case.inputs["features"].to(rounded.dtype))
    assert case.given("features", cast=False).dtype == torch.float32
