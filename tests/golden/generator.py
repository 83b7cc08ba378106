"""Inputs of the golden cases, the same bits on every machine.

An array is a function of a seed, a name and a shape alone: a counter goes through the SplitMix64
hash in 64-bit integers, and all that follows is elementwise arithmetic in float64 with one
rounding to float32 at the end. No sum, matrix product or transcendental function takes part,
because those differ in the last bit between machines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]
Recipe = Mapping[str, Any]

_SQRT_3 = 1.7320508075688772


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


def bell(seed: int, name: str, shape: tuple[int, ...]) -> Doubles:
    """Approximately normal with mean 0 and variance 1: the sum of four uniform numbers."""
    total = uniform(seed, f"{name}/0", shape)
    for part in (1, 2, 3):
        total = total + uniform(seed, f"{name}/{part}", shape)
    return (total - 2.0) * _SQRT_3


def clustered(
    recipe: Recipe, name: str, batch: int, count: int, width: int, bias: float = 0.0
) -> Doubles:
    """``(batch, count, width)`` tokens, each a cluster's centre with noise."""
    seed, clusters = recipe["seed"], recipe.get("ncl", 24)
    centres = bell(seed, f"{name}/cen", (clusters, width))
    owner = (uniform(seed, f"{name}/asg", (batch, count)) * clusters).astype(np.int64)
    tokens = centres[np.minimum(owner, clusters - 1)]
    tokens = tokens + recipe.get("noise", 0.6) * bell(seed, f"{name}/noi", (batch, count, width))
    return tokens + bias


def mass(recipe: Recipe, name: str, shape: tuple[int, ...]) -> Doubles:
    """Positive and heavy-tailed, like attention: an integer power of a uniform number."""
    drawn = uniform(recipe["seed"], name, shape)
    power = np.ones(shape)
    for _ in range(recipe.get("p", 6)):  # by multiplication alone: `pow` differs between machines
        power = power * drawn
    return 0.02 * power + 1e-4


def repeated(tokens: Doubles, times: int) -> Doubles:
    """Tokens i, i + N / times, i + 2 N / times, ... made identical along axis 1."""
    count = tokens.shape[1]
    return tokens[:, np.arange(count) % (count // times)]


def inputs(recipe: Recipe) -> dict[str, Floats]:
    """Every input array of a case by name, none for a case that stores its own."""
    make = _MAKERS.get(recipe["gen"])
    actual = {} if make is None else make(recipe)
    return {name: np.ascontiguousarray(array, np.float32) for name, array in actual.items()}


def _cdpruner(recipe: Recipe) -> dict[str, Doubles]:
    batch, count, times = recipe.get("B", 1), recipe["N"], recipe.get("dup", 1)
    space = recipe.get("C", 16)
    features = clustered(recipe, "feat", batch, count, recipe.get("D", 32), recipe.get("bias", 0.0))
    patches = _alike(recipe, clustered(recipe, "emb", batch, count, space))
    return {
        "image_features": repeated(features, times),
        "image_embeds": repeated(patches, times),
        "text_embeds": bell(recipe["seed"], "txt", (recipe.get("M", 1), space)),
    }


def _autoprune_released(recipe: Recipe) -> dict[str, Doubles]:
    seed, batch, width = recipe["seed"], recipe.get("B", 1), recipe["D"]
    actual = _cdpruner(recipe)
    gain = 0.5 + uniform(seed, "gain", (batch, recipe["N"], 1))
    actual["image_features"] = actual["image_features"] * gain
    if recipe["relevance"] == "cosine":
        actual["text_features"] = bell(seed, "pooled", (batch, width))
    return actual


def _divprune(recipe: Recipe) -> dict[str, Doubles]:
    features = clustered(
        recipe, "feat", 1, recipe["N"], recipe.get("D", 32), recipe.get("bias", 0.0)
    )
    features = repeated(features, recipe.get("dup", 1))
    if recipe.get("const"):
        features = np.broadcast_to(features[:, :1], features.shape)
    return {"features": features[0]}


def _visionzip(recipe: Recipe) -> dict[str, Doubles]:
    batch, count, times = recipe.get("B", 1), recipe["N"], recipe.get("dup", 1)
    actual = {"cls_attn": mass(recipe, "attn", (batch, recipe.get("H", 4), count))}
    for name, short, width in (
        ("hidden", "hid", recipe.get("D", 32)),
        ("key_metric", "key", recipe.get("dk", 16)),
    ):
        rows = clustered(recipe, short, batch, count + 1, width)
        actual[name] = np.concatenate([rows[:, :1], repeated(rows[:, 1:], times)], axis=1)
    return actual


def _prumerge(recipe: Recipe) -> dict[str, Doubles]:
    batch, width = recipe.get("B", 1), recipe.get("D", 32)
    count = recipe["N"] + (recipe["gen"] == "prumerge")  # one more row for [CLS]
    return {
        "hidden": clustered(recipe, "hid", batch, count, width),
        "k": clustered(recipe, "k", batch, count, width),
        "q": recipe.get("qscale", 1.0) * clustered(recipe, "q", batch, count, width),
    }


def _trim(recipe: Recipe) -> dict[str, Doubles]:
    batch, count, times = recipe.get("B", 1), recipe["N"], recipe.get("dup", 1)
    space = recipe.get("C", 16)
    hidden = clustered(recipe, "hid", batch, count, recipe.get("D", 32))
    patches = recipe.get("escale", 1.0) * clustered(recipe, "emb", batch, count, space)
    return {
        "hidden": repeated(hidden, times),
        "image_embeds": repeated(_alike(recipe, patches), times),
        "text_embeds": bell(recipe["seed"], "txt", (1, space)),
    }


def _dart(recipe: Recipe) -> dict[str, Doubles]:
    length = _sequence(recipe)
    states = clustered(recipe, "hid", 1, length, recipe.get("D", 32))
    shape = (1, recipe.get("H", 2), length, recipe.get("hd", 8))
    return {
        "normed_hidden": _image_repeated(recipe, states),
        "keys": bell(recipe["seed"], "keys", shape),
    }


def _fastv(recipe: Recipe) -> dict[str, Doubles]:
    attention = mass(recipe, "attn", (recipe.get("H", 4), _sequence(recipe)))
    if recipe.get("const"):
        attention = np.full_like(attention, 0.25)
    return {"attn_last_row": attention}


def _pdrop(recipe: Recipe) -> dict[str, Doubles]:
    heads, width = recipe.get("H", 4), recipe.get("hd", 16)
    keys = bell(recipe["seed"], "k", (heads, _sequence(recipe), width))
    return {
        "q_last": bell(recipe["seed"], "q", (heads, 1, width)),
        "keys": _image_repeated(recipe, keys),
    }


def _sparsevlm(recipe: Recipe) -> dict[str, Doubles]:
    length, width = _sequence(recipe), recipe.get("D", 32)
    return {
        "embeds": clustered(recipe, "emb", 1, length, width) * recipe.get("escale", 0.25),
        "attn_text_rows": mass(recipe, "attn", (recipe.get("H", 4), recipe["txt"], length)),
        "layer_out": clustered(recipe, "out", 1, length, width),
    }


def _before_the_model(recipe: Recipe) -> dict[str, Doubles]:
    """Inputs of the policies that select before the language model, from MMTok to IDPruner."""
    kind, seed = recipe["gen"], recipe["seed"]
    batch, count, width = recipe.get("B", 1), recipe["N"], recipe.get("D", 32)
    features = clustered(recipe, "feat", batch, count, width, recipe.get("bias", 0.0))
    if recipe.get("dom"):  # one channel that dominates all others
        features[..., 0] = features[..., 0] * recipe["dom"]
        features[..., 0] = features[..., 0] + recipe.get("off", 0.0)
    actual, texts = {"features": features}, {}
    if kind in ("cen_cdpruner", "fsr"):
        space = recipe.get("C", 16)
        actual["image_embeds"] = clustered(recipe, "emb", batch, count, space)
        texts["text_embeds"] = bell(seed, "txt", (recipe.get("M", 1), space))
    if kind in ("scope", "holov", "fsr", "idpruner"):
        heads = mass(recipe, "attn", (batch, recipe.get("H", 4), count))
        actual["cls_attn"] = heads.transpose(0, 2, 1)
    if kind == "mmtok":
        inner = recipe.get("E", 32)
        actual["encoder"] = clustered(recipe, "enc", batch, count, inner, recipe.get("ebias", 0.0))
        words = recipe["M"]
        texts["text_tokens"] = bell(seed, "txt", (words, width)) if words else np.zeros((0, width))
    for name, rows in actual.items():
        rows = repeated(rows, recipe.get("dup", 1))
        if recipe.get("const"):
            rows = np.broadcast_to(rows[:, :1], rows.shape)
        actual[name] = rows.transpose(0, 2, 1) if name == "cls_attn" else rows
    return actual | texts


def _prunesid(recipe: Recipe) -> dict[str, Doubles]:
    batch, count = recipe.get("B", 1), recipe["N"]
    width, bias = recipe.get("D", 32), recipe.get("bias", 0.0)
    return {
        "hidden": clustered(recipe, "hid", batch, count + 1, width, bias),
        "cls_attn": mass(recipe, "attn", (batch, recipe.get("H", 4), count)),
    }


def _alike(recipe: Recipe, patches: Doubles) -> Doubles:
    """Patches, all replaced by the first one if relevance is to be constant."""
    return np.broadcast_to(patches[:, :1], patches.shape) if recipe.get("const_rel") else patches


def _sequence(recipe: Recipe) -> int:
    return int(recipe["sys"] + recipe["N"] + recipe["txt"])


def _image_repeated(recipe: Recipe, rows: Doubles) -> Doubles:
    """A sequence, along axis 1, whose visual tokens alone repeat."""
    start, end = recipe["sys"], recipe["sys"] + recipe["N"]
    image = repeated(rows[:, start:end], recipe.get("dup", 1))
    return np.concatenate([rows[:, :start], image, rows[:, end:]], axis=1)


_MAKERS: Mapping[str, Callable[[Recipe], dict[str, Doubles]]] = {
    "autoprune_released": _autoprune_released,
    "cdpruner": _cdpruner,
    "divprune": _divprune,
    "visionzip": _visionzip,
    "prumerge": _prumerge,
    "prumerge_nocls": _prumerge,
    "trim": _trim,
    "dart": _dart,
    "fastv": _fastv,
    "pdrop": _pdrop,
    "sparsevlm": _sparsevlm,
    "prunesid": _prunesid,
    **dict.fromkeys(
        ("cen_divprune", "cen_cdpruner", "scope", "mmtok", "holov", "fsr", "idpruner"),
        _before_the_model,
    ),
}
