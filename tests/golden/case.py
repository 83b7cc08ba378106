"""Golden cases: recorded outputs of the published code of other methods, and their inputs.

``data/<method>/case_XX.npz`` holds a recipe for the inputs and the recorded outputs. Inputs
are not stored: they are made again, the same bits on every machine, and their digests are
checked. An array is a function of a seed, a name and a shape alone: a counter goes through the
SplitMix64 hash in 64-bit integers, and all that follows is elementwise arithmetic in float64 with
one rounding to float32 at the end. No sum, matrix product or transcendental function takes part,
because those differ in the last bit between machines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_autoprune.tpdsl.prefix import RecordedPrefix, attention_rows
from vllm_autoprune.tpdsl.tokens import (
    Grid,
    Instruction,
    NextLayer,
    TowerStates,
    VisualTokens,
    Words,
)

Doubles = npt.NDArray[np.float64]
Recipe = Mapping[str, Any]

_WITH_CLS = ("visionzip", "prumerge", "prunesid")
"""Kinds whose rows of the vision tower begin with that of [CLS]."""


def _uniform(seed: int, name: str, shape: tuple[int, ...]) -> Doubles:
    """Doubles in [0, 1) with 53 random bits."""
    digest = hashlib.sha256(f"{seed}|{name}".encode()).digest()
    start = np.uint64(int.from_bytes(digest[:8], "little"))
    counter = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):  # the hash is defined modulo 2^64
        z = counter * np.uint64(0x9E3779B97F4A7C15) + start
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    bits: Doubles = (z >> np.uint64(11)).astype(np.float64)
    return (bits * 2.0**-53).reshape(shape)


def _array(recipe: Recipe, name: str) -> Doubles:  # noqa: C901, PLR0915
    kind = recipe["gen"]
    seed = recipe["seed"]
    get = recipe.get
    batch = get("B", 1)
    count = recipe["N"]
    width = get("D", 32)
    heads = get("H", 4)
    start = get("sys", 0)
    length = start + count + get("txt", 0)
    bias = get("bias", 0.0)
    before = kind in _WITH_CLS

    def image_repeated(rows: Doubles) -> Doubles:
        """A sequence, along axis 1, whose visual tokens alone repeat."""
        image = _repeated(rows[:, start : start + count], get("dup", 1))
        return np.concatenate(
            [rows[:, :start], image, rows[:, start + count :]], axis=1
        )

    match name:
        case "features" | "image_features":
            rows = _clustered(recipe, "feat", (batch, count, width), bias)
            if get("dom"):  # one channel that dominates all others
                rows[..., 0] = rows[..., 0] * recipe["dom"]
                rows[..., 0] = rows[..., 0] + get("off", 0.0)
            rows = _alike(_repeated(rows, get("dup", 1)), get("const"))
            if kind == "autoprune_released":
                rows = rows * (0.5 + _uniform(seed, "gain", (batch, count, 1)))
            return rows[0] if kind == "divprune" else rows
        case "encoder":
            rows = _clustered(
                recipe, "enc", (batch, count, get("E", 32)), get("ebias", 0.0)
            )
            return _alike(_repeated(rows, get("dup", 1)), get("const"))
        case "image_embeds":
            rows = get("escale", 1.0) * _clustered(
                recipe, "emb", (batch, count, get("C", 16))
            )
            rows = _alike(rows, get("const_rel"))
            return _alike(_repeated(rows, get("dup", 1)), get("const"))
        case "hidden" | "key_metric" | "k":
            key, of_rows = {
                "hidden": ("hid", width),
                "key_metric": ("key", get("dk", 16)),
            }.get(name, ("k", width))
            rows = _clustered(recipe, key, (batch, count + before, of_rows), bias)
            times = get("dup", 1) if kind in ("trim", "visionzip") else 1
            return np.concatenate(
                [rows[:, :before], _repeated(rows[:, before:], times)], axis=1
            )
        case "q":
            return get("qscale", 1.0) * _clustered(
                recipe, "q", (batch, count + before, width)
            )
        case "cls_attn":
            attention = _mass(recipe, (batch, heads, count))
            if before:
                return attention
            rows = _repeated(attention.transpose(0, 2, 1), get("dup", 1))
            return _alike(rows, get("const")).transpose(0, 2, 1)
        case "text_embeds":
            return _bell(seed, "txt", (get("M", 1), get("C", 16)))
        case "text_tokens":
            count = recipe["W" if kind == "video" else "M"]
            return _bell(seed, "txt", (count, width)) if count else np.zeros((0, width))
        case "text_features":
            return _bell(seed, "pooled", (batch, width))
        case "normed_hidden":
            rows = _clustered(recipe, "hid", (1, length, width))
            return image_repeated(rows)
        case "keys" if kind == "dart":
            return _bell(seed, "keys", (1, get("H", 2), length, get("hd", 8)))
        case "keys":
            rows = _bell(seed, "k", (heads, length, get("hd", 16)))
            return image_repeated(rows)
        case "q_last":
            return _bell(seed, "q", (heads, 1, get("hd", 16)))
        case "attn_last_row":
            attention = _mass(recipe, (heads, length))
            return np.full_like(attention, 0.25) if get("const") else attention
        case "attn_text_rows":
            return _mass(recipe, (heads, recipe["txt"], length))
        case "embeds":
            return _clustered(recipe, "emb", (1, length, width)) * get("escale", 0.25)
        case "frames":
            return _clip(recipe)
        case "layer_out":
            return _clustered(recipe, "out", (1, length, width))
    raise ValueError(f"no array of the name {name!r} is known")


def _bell(seed: int, name: str, shape: tuple[int, ...]) -> Doubles:
    """Approximately normal with mean 0 and variance 1: the sum of four uniform numbers."""
    total = _uniform(seed, f"{name}/0", shape)
    for part in (1, 2, 3):
        total = total + _uniform(seed, f"{name}/{part}", shape)
    return (total - 2.0) * 1.7320508075688772


def _clustered(
    recipe: Recipe, name: str, shape: tuple[int, int, int], bias: float = 0.0
) -> Doubles:
    """Tokens ``(B, N, D)``, each a cluster's centre with noise."""
    seed = recipe["seed"]
    clusters = recipe.get("ncl", 24)
    centres = _bell(seed, f"{name}/cen", (clusters, shape[2]))
    owner = (_uniform(seed, f"{name}/asg", shape[:2]) * clusters).astype(np.int64)
    tokens = centres[np.minimum(owner, clusters - 1)]
    tokens = tokens + recipe.get("noise", 0.6) * _bell(seed, f"{name}/noi", shape)
    return tokens + bias


def _clip(recipe: Recipe) -> Doubles:
    """Frames ``(T, n, D)`` of which some tokens change from one to the next, and all at a cut."""
    seed = recipe["seed"]
    count = recipe["n"]
    width = recipe["D"]
    frames = []
    gain = 0.5 + _uniform(seed, "gain", (1, count, 1))[0]
    current = _clustered(recipe, "base", (1, count, width))[0]
    for frame in range(recipe["T"]):
        if frame in recipe["cuts"]:
            current = _clustered(recipe, f"base/{frame}", (1, count, width))[0]
        elif frame:
            moves = _uniform(seed, f"moves/{frame}", (count, 1)) < recipe["moving"]
            step = _bell(seed, f"step/{frame}", (count, width))
            current = current + recipe["drift"] * step * moves
        frames.append(current * gain)
    return np.stack(frames)


def _mass(recipe: Recipe, shape: tuple[int, ...]) -> Doubles:
    """Positive and heavy-tailed, like attention: an integer power of a uniform number."""
    drawn = _uniform(recipe["seed"], "attn", shape)
    power = np.ones(shape)
    for _ in range(
        recipe.get("p", 6)
    ):  # by multiplication alone: `pow` differs between machines
        power = power * drawn
    return 0.02 * power + 1e-4


def _repeated(tokens: Doubles, times: int) -> Doubles:
    """Tokens i, i + N / times, i + 2 N / times, ... made identical along axis 1."""
    count = tokens.shape[1]
    return tokens[:, np.arange(count) % (count // times)]


def _alike(rows: Doubles, constant: object) -> Doubles:
    """The rows, all replaced by the first one of their image if they are to be constant."""
    return np.broadcast_to(rows[:, :1], rows.shape) if constant else rows


_DATA = Path(__file__).parent / "data"


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
        dtype: torch.dtype = getattr(torch, self.recipe.get("dtype", "float32"))
        return dtype

    def rounded(self, name: str) -> Tensor:
        """An input, rounded to the case's dtype (to nearest, ties to even)."""
        return self.inputs[name].to(self.dtype)

    def recorded(self, name: str) -> Tensor:
        """A recorded output; whole numbers as int64."""
        array = torch.from_numpy(np.array(self.expected[name]))
        return array if array.is_floating_point() else array.long()


def names(method: str) -> list[str]:
    """Names of a method's cases, such as ``cdpruner/case_00``."""
    return [f"{method}/{path.stem}" for path in sorted((_DATA / method).glob("*.npz"))]


def load(name: str) -> Case:
    """Load a case by name, whose inputs must have the recorded digests."""
    with np.load(_DATA / f"{name}.npz", allow_pickle=False) as stored:
        recipe = json.loads(str(stored["spec"]))
        recorded = json.loads(str(stored["sha"]))
        expected = {
            key: stored[key] for key in stored.files if key not in ("spec", "sha")
        }
    arrays = {
        key: np.ascontiguousarray(_array(recipe, key), np.float32) for key in recorded
    }
    digests = {
        key: hashlib.sha256(array.tobytes()).hexdigest()
        for key, array in arrays.items()
    }
    assert digests == recorded, (
        f"{name}: the generator does not make the recorded inputs"
    )
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    return Case(name, recipe, tensors, expected)


_ONE_IMAGE = ("cdpruner", "trim", "cen_cdpruner", "fsr")
"""Kinds whose B rows are the tiles of one image: what they score is normalised over all of them."""

_MEAN_OF_HEADS = ("holov", "fsr")
"""Kinds that average attention over heads; of the others the sum is read, or only the order."""


def images(case: Case) -> VisualTokens:
    """The inputs of a case with all that its policy reads; nothing is projected."""
    kind = case.recipe["gen"]
    arrays = case.inputs
    if "sys" in case.recipe:
        return _sequence(case)
    if kind == "video":
        grid = Grid(1, case.recipe["n"], case.recipe["T"], video=True)
        text = arrays.get("text_tokens", torch.empty(0, case.recipe["D"]))[None]
        asked = Words(text, torch.ones(text.shape[:2], dtype=torch.bool))
        return VisualTokens(
            case.rounded("frames").flatten(0, 1)[None], grid, words=asked
        )
    (source,) = {"features", "image_features", "hidden"} & set(arrays)
    rows = case.rounded(source)[None] if kind == "divprune" else case.rounded(source)
    begin = int(kind in _WITH_CLS)
    cls = rows[:, :begin]
    rows = rows[:, begin:]
    key = next((name for name in ("key_metric", "k") if name in arrays), None)
    keys = rows if key is None else case.rounded(key)[:, begin:]
    tiles = len(rows) if kind in _ONE_IMAGE else 1
    count = rows.shape[1]

    def joined(values: Tensor) -> Tensor:
        return values.reshape(-1, tiles * count, *values.shape[2:])

    following = None
    if (
        "q" in arrays
    ):  # the [CLS] row of single-head attention, the mean over queries without it
        queries = case.rounded("q")
        known = case.rounded("k")
        attention = (queries @ known.transpose(1, 2) / known.shape[2] ** 0.5).softmax(
            dim=-1
        )
        row = attention[:, 0, 1:] if begin else attention.mean(dim=1)
        following = NextLayer(row, keys)
    attention = None
    if "cls_attn" in arrays:
        heads = case.rounded("cls_attn") if kind == "visionzip" else arrays["cls_attn"]
        attention = heads.mean(dim=1) if kind in _MEAN_OF_HEADS else heads.sum(dim=1)
    rows = joined(rows)
    keys = joined(keys)
    instruction = None
    if "text_embeds" in arrays:
        text = arrays["text_embeds"].expand(len(rows), -1, -1)
        used = torch.ones(text.shape[:2], dtype=torch.bool)
        sign = case.recipe.get("sign", -1)
        instruction = Instruction(joined(arrays["image_embeds"]), text, used, sign)
    words = None
    if "text_tokens" in arrays or "text_features" in arrays:
        if kind == "mmtok":
            embeddings = case.rounded("text_tokens").expand(len(rows), -1, -1)
        else:
            embeddings = case.rounded("text_features")[:, None]
        words = Words(embeddings, torch.ones(embeddings.shape[:2], dtype=torch.bool))
    side = isqrt(count)
    return VisualTokens(
        rows,
        Grid(side, side) if kind == "autoprune_released" else Grid(1, count, tiles),
        cls_attention=None if attention is None else joined(attention),
        instruction=instruction,
        tower=TowerStates(
            rows,
            keys,
            project=lambda merged: merged,
            cls=cls if begin else None,
            next_layer=following,
        ),
        encoder=case.rounded("encoder") if "encoder" in arrays else rows,
        words=words,
    )


def _sequence(case: Case) -> VisualTokens:
    """One image, and what is recorded of its sequence in the language model."""
    kind = case.recipe["gen"]
    recipe = case.recipe
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
        attention = last.new_full(
            (1, len(last), recipe["txt"], last.shape[1]), torch.nan
        )
        attention[0, :, -1] = last
        recorded = {"attention": attention}
    text = torch.ones(1, recipe["txt"], dtype=torch.bool)
    language = RecordedPrefix(recipe["sys"], text, recorded=recorded)
    visual = rows.narrow(1, recipe["sys"], recipe["N"])
    return VisualTokens(visual, Grid(1, recipe["N"]), language=language)
