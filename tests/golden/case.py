"""Golden cases as files, and as the images that base policies read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tests.golden.generator import WITH_CLS, inputs
from vllm_autoprune.tpdsl.prefix import RecordedPrefix, attention_rows
from vllm_autoprune.tpdsl.tokens import (
    Grid,
    Instruction,
    NextLayer,
    TowerStates,
    VisualTokens,
    Words,
)

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

    def rounded(self, name: str) -> Tensor:
        """An input, rounded to the case's dtype (to nearest, ties to even)."""
        return self.inputs[name].to(self.dtype)

    def recorded(self, name: str) -> Tensor:
        """A recorded output; whole numbers as int64."""
        array = torch.from_numpy(np.array(self.expected[name]))
        return array if array.is_floating_point() else array.long()


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
    arrays = inputs(recipe)
    digests = {key: hashlib.sha256(array.tobytes()).hexdigest() for key, array in arrays.items()}
    if digests != recorded:
        drifted = sorted(k for k in {*digests, *recorded} if digests.get(k) != recorded.get(k))
        raise ValueError(f"the generator does not make the recorded inputs: {', '.join(drifted)}")
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    return Case(f"{path.parent.name}/{path.stem}", recipe, tensors, expected)


_ONE_IMAGE = ("cdpruner", "trim", "cen_cdpruner", "fsr")
"""Kinds whose B rows are the tiles of one image: what they score is normalised over all of them."""

_MEAN_OF_HEADS = ("holov", "fsr")
"""Kinds that average attention over heads; of the others the sum is read, or only the order."""


def images(case: Case) -> VisualTokens:
    """The inputs of a case with all that its policy reads; nothing is projected."""
    kind, arrays = case.recipe["gen"], case.inputs
    if "sys" in case.recipe:
        return _sequence(case)
    (source,) = {"features", "image_features", "hidden"} & set(arrays)
    rows = case.rounded(source)[None] if kind == "divprune" else case.rounded(source)
    begin = int(kind in WITH_CLS)
    cls, rows = rows[:, :begin], rows[:, begin:]
    key = next((name for name in ("key_metric", "k") if name in arrays), None)
    keys = rows if key is None else case.rounded(key)[:, begin:]
    tiles, count = (len(rows) if kind in _ONE_IMAGE else 1), rows.shape[1]

    def joined(values: Tensor) -> Tensor:
        return values.reshape(-1, tiles * count, *values.shape[2:])

    following = None
    if "q" in arrays:  # the [CLS] row of single-head attention, the mean over queries without it
        queries, known = case.rounded("q"), case.rounded("k")
        attention = (queries @ known.transpose(1, 2) / known.shape[2] ** 0.5).softmax(dim=-1)
        row = attention[:, 0, 1:] if begin else attention.mean(dim=1)
        following = NextLayer(row, keys)
    attention = None
    if "cls_attn" in arrays:
        heads = case.rounded("cls_attn") if kind == "visionzip" else arrays["cls_attn"]
        attention = heads.mean(dim=1) if kind in _MEAN_OF_HEADS else heads.sum(dim=1)
    rows, keys = joined(rows), joined(keys)
    instruction = None
    if "text_embeds" in arrays:
        text = arrays["text_embeds"].expand(len(rows), -1, -1)
        used = torch.ones(text.shape[:2], dtype=torch.bool)
        sign = case.recipe.get("sign", -1)
        instruction = Instruction(joined(arrays["image_embeds"]), text, used, sign)
    words = None
    if "text_tokens" in arrays or "text_features" in arrays:
        said = (
            case.rounded("text_tokens").expand(len(rows), -1, -1)
            if kind == "mmtok"
            else case.rounded("text_features")[:, None]
        )
        words = Words(said, torch.ones(said.shape[:2], dtype=torch.bool))
    side = isqrt(count)
    return VisualTokens(
        rows,
        Grid(side, side) if kind == "autoprune_released" else Grid(1, count, tiles),
        cls_attention=None if attention is None else joined(attention),
        instruction=instruction,
        tower=TowerStates(
            rows, keys, project=lambda merged: merged, cls=cls if begin else None,
            next_layer=following,
        ),
        encoder=case.rounded("encoder") if "encoder" in arrays else rows,
        words=words,
    )  # fmt: skip


def _sequence(case: Case) -> VisualTokens:
    """One image, and what is recorded of its sequence in the language model."""
    kind, recipe = case.recipe["gen"], case.recipe
    if kind == "dart":
        rows = case.rounded("normed_hidden")
        recorded = {"normed": rows, "keys": case.rounded("keys")}
    elif kind == "sparsevlm":
        rows = case.rounded("embeds")
        recorded = {
            "embeddings": rows,
            "attention": case.rounded("attn_text_rows")[None],
            "states": case.rounded("layer_out"),
        }
    else:  # fastv and pdrop read the last row of attention; all others are NaN
        if kind == "fastv":
            last = case.rounded("attn_last_row")
            rows = last.mean(dim=0)[None, :, None]
        else:
            rows = case.rounded("keys").mean(dim=0)[None]
            last = attention_rows(case.rounded("q_last"), case.rounded("keys"))[:, 0]
        attention = last.new_full((1, len(last), recipe["txt"], last.shape[1]), torch.nan)
        attention[0, :, -1] = last
        recorded = {"attention": attention}
    text = torch.ones(1, recipe["txt"], dtype=torch.bool)
    language = RecordedPrefix(recipe["sys"], text, recorded=recorded)
    visual = rows.narrow(1, recipe["sys"], recipe["N"])
    return VisualTokens(visual, Grid(1, recipe["N"]), language=language)
