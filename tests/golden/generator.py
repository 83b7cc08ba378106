"""Inputs of the golden cases, the same bits on every machine.

An array is a function of a seed, a name and a shape alone: a counter goes through the SplitMix64
hash in 64-bit integers, and all that follows is elementwise arithmetic in float64 with one
rounding to float32 at the end. No sum, matrix product or transcendental function takes part,
because those differ in the last bit between machines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Recipe = Mapping[str, Any]

_RELEVANCE = ("image_embeds", "text_embeds")
_ARRAYS: dict[str, tuple[str, ...]] = {
    "autoprune_released": ("image_features", *_RELEVANCE, "text_features"),
    "cdpruner": ("image_features", *_RELEVANCE),
    "divprune": ("features",),
    "visionzip": ("cls_attn", "hidden", "key_metric"),
    "prumerge": ("hidden", "k", "q"),
    "prumerge_nocls": ("hidden", "k", "q"),
    "trim": ("hidden", *_RELEVANCE),
    "dart": ("normed_hidden", "keys"),
    "fastv": ("attn_last_row",),
    "pdrop": ("q_last", "keys"),
    "sparsevlm": ("embeds", "attn_text_rows", "layer_out"),
    "prunesid": ("hidden", "cls_attn"),
    "cen_divprune": ("features",),
    "cen_cdpruner": ("features", *_RELEVANCE),
    "scope": ("features", "cls_attn"),
    "mmtok": ("features", "encoder", "text_tokens"),
    "holov": ("features", "cls_attn"),
    "fsr": ("features", *_RELEVANCE, "cls_attn"),
    "idpruner": ("features", "cls_attn"),
}
"""Arrays of each kind of recipe."""

WITH_CLS = ("visionzip", "prumerge", "prunesid")
"""Kinds whose rows of the vision tower begin with that of [CLS]."""


def uniform(seed: int, name: str, shape: tuple[int, ...]) -> Doubles:
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


def inputs(recipe: Recipe) -> dict[str, npt.NDArray[np.float32]]:
    """Every input array of a case by name, none for a case that stores its own."""
    names = _ARRAYS.get(recipe["gen"], ())
    if recipe.get("relevance") == "negative_mean":
        names = names[:-1]
    arrays = {name: _array(recipe, name) for name in names}
    return {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}


def _array(recipe: Recipe, name: str) -> Doubles:
    kind, seed, get = recipe["gen"], recipe["seed"], recipe.get
    batch, count, width, heads = get("B", 1), recipe["N"], get("D", 32), get("H", 4)
    start = get("sys", 0)
    length = start + count + get("txt", 0)
    bias = get("bias", 0.0)
    before = kind in WITH_CLS
    match name:
        case "features" | "image_features":
            rows = _clustered(recipe, "feat", (batch, count, width), bias)
            if get("dom"):  # one channel that dominates all others
                rows[..., 0] = rows[..., 0] * recipe["dom"]
                rows[..., 0] = rows[..., 0] + get("off", 0.0)
            rows = _alike(_repeated(rows, get("dup", 1)), get("const"))
            if kind == "autoprune_released":
                rows = rows * (0.5 + uniform(seed, "gain", (batch, count, 1)))
            return rows[0] if kind == "divprune" else rows
        case "encoder":
            rows = _clustered(recipe, "enc", (batch, count, get("E", 32)), get("ebias", 0.0))
            return _alike(_repeated(rows, get("dup", 1)), get("const"))
        case "image_embeds":
            rows = get("escale", 1.0) * _clustered(recipe, "emb", (batch, count, get("C", 16)))
            rows = _alike(rows, get("const_rel"))
            return _alike(_repeated(rows, get("dup", 1)), get("const"))
        case "hidden" | "key_metric" | "k":
            key, of_rows = {"hidden": ("hid", width), "key_metric": ("key", get("dk", 16))}.get(
                name, ("k", width)
            )
            rows = _clustered(recipe, key, (batch, count + before, of_rows), bias)
            times = get("dup", 1) if kind in ("trim", "visionzip") else 1
            return np.concatenate([rows[:, :before], _repeated(rows[:, before:], times)], axis=1)
        case "q":
            return get("qscale", 1.0) * _clustered(recipe, "q", (batch, count + before, width))
        case "cls_attn":
            attention = _mass(recipe, (batch, heads, count))
            if before:
                return attention
            rows = _repeated(attention.transpose(0, 2, 1), get("dup", 1))
            return _alike(rows, get("const")).transpose(0, 2, 1)
        case "text_embeds":
            return _bell(seed, "txt", (get("M", 1), get("C", 16)))
        case "text_tokens":
            return _bell(seed, "txt", (recipe["M"], width)) if recipe["M"] else np.zeros((0, width))
        case "text_features":
            return _bell(seed, "pooled", (batch, width))
        case "normed_hidden":
            rows = _clustered(recipe, "hid", (1, length, width))
            return _with_image_repeated(rows, start, count, get("dup", 1))
        case "keys" if kind == "dart":
            return _bell(seed, "keys", (1, get("H", 2), length, get("hd", 8)))
        case "keys":
            rows = _bell(seed, "k", (heads, length, get("hd", 16)))
            return _with_image_repeated(rows, start, count, get("dup", 1))
        case "q_last":
            return _bell(seed, "q", (heads, 1, get("hd", 16)))
        case "attn_last_row":
            attention = _mass(recipe, (heads, length))
            return np.full_like(attention, 0.25) if get("const") else attention
        case "attn_text_rows":
            return _mass(recipe, (heads, recipe["txt"], length))
        case "embeds":
            return _clustered(recipe, "emb", (1, length, width)) * get("escale", 0.25)
        case "layer_out":
            return _clustered(recipe, "out", (1, length, width))
    raise ValueError(f"no array of the name {name!r} is known")


def _bell(seed: int, name: str, shape: tuple[int, ...]) -> Doubles:
    """Approximately normal with mean 0 and variance 1: the sum of four uniform numbers."""
    total = uniform(seed, f"{name}/0", shape)
    for part in (1, 2, 3):
        total = total + uniform(seed, f"{name}/{part}", shape)
    return (total - 2.0) * 1.7320508075688772


def _clustered(
    recipe: Recipe, name: str, shape: tuple[int, int, int], bias: float = 0.0
) -> Doubles:
    """Tokens ``(B, N, D)``, each a cluster's centre with noise."""
    seed, clusters = recipe["seed"], recipe.get("ncl", 24)
    centres = _bell(seed, f"{name}/cen", (clusters, shape[2]))
    owner = (uniform(seed, f"{name}/asg", shape[:2]) * clusters).astype(np.int64)
    tokens = centres[np.minimum(owner, clusters - 1)]
    tokens = tokens + recipe.get("noise", 0.6) * _bell(seed, f"{name}/noi", shape)
    return tokens + bias


def _mass(recipe: Recipe, shape: tuple[int, ...]) -> Doubles:
    """Positive and heavy-tailed, like attention: an integer power of a uniform number."""
    drawn = uniform(recipe["seed"], "attn", shape)
    power = np.ones(shape)
    for _ in range(recipe.get("p", 6)):  # by multiplication alone: `pow` differs between machines
        power = power * drawn
    return 0.02 * power + 1e-4


def _repeated(tokens: Doubles, times: int) -> Doubles:
    """Tokens i, i + N / times, i + 2 N / times, ... made identical along axis 1."""
    count = tokens.shape[1]
    return tokens[:, np.arange(count) % (count // times)]


def _with_image_repeated(rows: Doubles, start: int, count: int, times: int) -> Doubles:
    """A sequence, along axis 1, whose visual tokens alone repeat."""
    image = _repeated(rows[:, start : start + count], times)
    return np.concatenate([rows[:, :start], image, rows[:, start + count :]], axis=1)


def _alike(rows: Doubles, constant: object) -> Doubles:
    """The rows, all replaced by the first one of their image if they are to be constant."""
    return np.broadcast_to(rows[:, :1], rows.shape) if constant else rows
