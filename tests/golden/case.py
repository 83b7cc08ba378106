"""Reading golden cases.

Knows nothing about any method but the names of its arrays.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tests.golden.generator import inputs

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Case:
    """One golden case: the recipe, what goes in, what the published code returned."""

    name: str
    recipe: dict[str, Any]
    inputs: dict[str, Tensor]
    expected: dict[str, npt.NDArray[np.int64]]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the published code got its features."""
        return torch.float16 if self.recipe.get("dtype") == "float16" else torch.float32


def names(method: str) -> list[str]:
    """Names of a method's cases, such as ``cdpruner/case_00``."""
    return [f"{method}/{path.stem}" for path in sorted((DATA / method).glob("*.npz"))]


def load(name: str) -> Case:
    """The case of that name; inputs that are not the recorded ones are an error."""
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as stored:
        recipe = json.loads(str(stored["spec"]))
        recorded = json.loads(str(stored["sha"])) if "sha" in stored else {}
        expected = {key: stored[key] for key in stored.files if key not in ("spec", "sha")}
    made = inputs(recipe)
    assert {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in made.items()} == (
        recorded
    ), f"{name}: the generator no longer makes the inputs that were recorded"
    return Case(name, recipe, {k: torch.from_numpy(v) for k, v in made.items()}, expected)
