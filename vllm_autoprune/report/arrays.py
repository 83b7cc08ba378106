"""Visual tokens from a ``.npz`` file of arrays; one error lists every problem of the file."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.tpdsl.executor.materialize import PruningPolicy
from vllm_autoprune.tpdsl.optional_inputs import Instruction
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens

Array = npt.NDArray[np.generic]

NAMES = {
    "features": "(N, D) or (B, N, D): projected visual tokens",
    "grid": "(2,) or (3,): height, width and tiles; without it N must be a square",
    "cls_attention": "(N,) or (B, N): attention that [CLS] pays to each token",
    "patches": "(N, C) or (B, N, C): tokens in the space where relevance is measured",
    "text": "(M, C) or (B, M, C): the instruction's segments in that space",
    "segments": "(M,) or (B, M) bool: false where a row of text is padding; default: all true",
    "sign": "+1 or -1: direction of the cosine that means relevance (-1 for OpenAI's CLIP)",
}
"""Names and shapes of arrays in a file; the dimension B may be left out for one image."""

_RANK = {"features": 3, "cls_attention": 2, "patches": 3, "text": 3, "segments": 2}


def read_tokens(path: Path, policy: PruningPolicy) -> VisualTokens:
    """Read the images of a file; raises :class:`ConfigError` with every problem."""
    arrays = _load(path)
    problems = [*_unknown_arrays(arrays), *_missing_arrays(arrays, policy)]
    tensors: dict[str, Tensor] = {}
    for name in _RANK:
        if name in arrays:
            tensor = _tensor(name, arrays[name])
            if isinstance(tensor, Problem):
                problems.append(tensor)
            else:
                tensors[name] = tensor
    grid = _grid(arrays.get("grid"), tensors.get("features"))
    if isinstance(grid, Problem):
        problems.append(grid)
    problems += _mismatches(tensors, arrays.get("sign"))
    if problems:
        raise ConfigError(f"arrays {path}", problems)
    assert isinstance(grid, Grid)
    return VisualTokens(
        tensors["features"], grid, tensors.get("cls_attention"), _instruction(tensors, arrays)
    )


def _load(path: Path) -> dict[str, Array]:
    fix = "give a .npz file as numpy.savez writes it"
    # Checked first: for any other file numpy's error suggests loading it as a pickle, unsafely.
    if not path.is_file() or not zipfile.is_zipfile(path):
        what = "is not a .npz file" if path.is_file() else "no such file"
        raise ConfigError("arrays", [Problem(str(path), what, fix)])
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = f"cannot be read ({reason})"
        raise ConfigError("arrays", [Problem(str(path), what, fix)]) from None


def _unknown_arrays(arrays: Mapping[str, Array]) -> list[Problem]:
    fix = f"use {', '.join(NAMES)}"
    return [Problem(name, "not a known array", fix) for name in arrays if name not in NAMES]


def _missing_arrays(arrays: Mapping[str, Array], policy: PruningPolicy) -> list[Problem]:
    required = ["features"]
    if "cls_attention" in policy.base.needs_of(policy.state.base_policy.params):
        required.append("cls_attention")
    present = {"patches", "text", "sign"} & arrays.keys()
    if "instruction" in policy.needs or present:
        required += ["patches", "text", "sign"]
    problems = [
        Problem(name, "required but missing", f"add {NAMES[name]}")
        for name in required
        if name not in arrays
    ]
    unavailable = sorted(policy.needs - {"cls_attention", "instruction"})
    if unavailable:
        inputs = ", ".join(unavailable)
        what = f"{policy.state.name} reads {inputs}, which a file of arrays cannot contain"
        problems.append(Problem("state", what, "choose a state that reads projected tokens"))
    return problems


def _tensor(name: str, array: Array) -> Tensor | Problem:
    rank = _RANK[name]
    if array.dtype.kind not in "fiub":
        return Problem(name, f"holds {array.dtype}, not numbers", "store floating-point numbers")
    if array.ndim not in (rank - 1, rank) or 0 in array.shape:
        return Problem(name, f"has shape {array.shape}", f"should be {NAMES[name]}")
    if array.ndim < rank:
        array = array[None]
    if name == "segments":
        return torch.from_numpy(array.astype(np.bool_))
    half = array.dtype == np.float16
    return torch.from_numpy(array.astype(np.float16 if half else np.float32))


def _grid(array: Array | None, features: Tensor | None) -> Grid | Problem:
    if array is None:
        count = 1 if features is None else features.shape[1]
        side = math.isqrt(count)
        if side * side != count:
            return Problem("grid", f"missing, and N = {count} is not a square", NAMES["grid"])
        return Grid(side, side)
    whole = array.dtype.kind in "iu" and array.shape in ((2,), (3,))
    if not whole or any(int(n) < 1 for n in array.tolist()):
        return Problem("grid", f"{array.tolist()} is not a grid", f"should be {NAMES['grid']}")
    grid = Grid(*(int(n) for n in array.tolist()))
    if features is not None and grid.tokens != features.shape[1]:
        what = f"{array.tolist()} has {grid.tokens} tokens, but features hold {features.shape[1]}"
        return Problem("grid", what, "give height, width and tiles of these tokens")
    return grid


def _mismatches(tensors: Mapping[str, Tensor], sign: Array | None) -> list[Problem]:
    """Problems of arrays whose shapes or values do not match."""
    problems = []
    features, patches, text = (tensors.get(name) for name in ("features", "patches", "text"))
    if features is not None:
        for name in ("cls_attention", "patches"):
            other = tensors.get(name)
            if other is not None and other.shape[:2] != features.shape[:2]:
                shapes = f"{tuple(other.shape[:2])}, features {tuple(features.shape[:2])}"
                problems.append(
                    Problem(name, f"starts with {shapes}", "give one row for each token")
                )
        if text is not None and text.shape[0] != features.shape[0]:
            what = f"is of {text.shape[0]} images, features of {features.shape[0]}"
            problems.append(Problem("text", what, "give one instruction for each image"))
    if patches is not None and text is not None and patches.shape[2] != text.shape[2]:
        what = f"is {text.shape[2]} wide, patches {patches.shape[2]}"
        problems.append(Problem("text", what, "use one embedding space for both"))
    segments = tensors.get("segments")
    if text is not None and segments is not None and segments.shape != text.shape[:2]:
        what = f"has shape {tuple(segments.shape)}, text starts with {tuple(text.shape[:2])}"
        problems.append(Problem("segments", what, "give one value for each row of text"))
    if sign is not None and (sign.size != 1 or sign.reshape(-1).tolist()[0] not in (1, -1)):
        problems.append(Problem("sign", f"{sign.tolist()} is neither 1 nor -1", "write 1 or -1"))
    return problems


def _instruction(tensors: Mapping[str, Tensor], arrays: Mapping[str, Array]) -> Instruction | None:
    if "text" not in tensors:
        return None
    text = tensors["text"]
    everything = torch.ones(text.shape[:2], dtype=torch.bool)
    segments = tensors.get("segments", everything)
    sign = int(arrays["sign"].reshape(-1).tolist()[0])
    return Instruction(tensors["patches"], text, segments, sign)
