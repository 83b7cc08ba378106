"""Reading golden cases."""

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

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One golden case: the recipe, the inputs and the output of the published code."""

    name: str
    recipe: dict[str, Any]
    inputs: dict[str, Tensor]
    expected: dict[str, npt.NDArray[Any]]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the features given to the published code."""
        return _DTYPES[self.recipe.get("dtype", "float32")]

    @property
    def note(self) -> str:
        """What is degenerate in this case and what can still be compared; mostly empty."""
        return str(self.recipe.get("note", ""))

    def given(self, name: str, *, cast: bool = True) -> Tensor:
        """An input, rounded to the case's dtype (to nearest, ties to even)."""
        return self.inputs[name].to(self.dtype) if cast else self.inputs[name]

    def recorded(self, name: str) -> Tensor:
        """A recorded output; whole numbers as int64."""
        actual = torch.from_numpy(np.array(self.expected[name]))
        return actual if actual.is_floating_point() else actual.long()


def names(method: str) -> list[str]:
    """Names of a method's cases, such as ``cdpruner/case_00``."""
    return [f"{method}/{path.stem}" for path in sorted((DATA / method).glob("*.npz"))]


def load(name: str) -> Case:
    """Load a stored case by name."""
    return read(DATA / f"{name}.npz")


def read(path: Path) -> Case:
    """Read a case from a file; raises ValueError if its inputs differ from the recorded digests."""
    with np.load(path, allow_pickle=False) as stored:
        recipe = json.loads(str(stored["spec"]))
        recorded = json.loads(str(stored["sha"])) if "sha" in stored else {}
        expected = {key: stored[key] for key in stored.files if key not in ("spec", "sha")}
    result = inputs(recipe)
    digests = {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in result.items()}
    if digests != recorded:
        drifted = sorted(k for k in {*digests, *recorded} if digests.get(k) != recorded.get(k))
        raise ValueError(f"the generator does not make the recorded inputs: {', '.join(drifted)}")
    tensors = {key: torch.from_numpy(array) for key, array in result.items()}
    return Case(f"{path.parent.name}/{path.stem}", recipe, tensors, expected)
