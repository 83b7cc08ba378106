"""Inputs of the golden cases, the same bits on every machine.

Knows nothing about what the inputs are used for.

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
Floats = npt.NDArray[np.float32]
Recipe = Mapping[str, Any]

_SQRT_3 = 1.7320508075688772


def uniform(seed: int, name: str, shape: tuple[int, ...]) -> Doubles:
    """Doubles in [0, 1) with 53 random bits."""
    digest = hashlib.sha256(f"{seed}|{name}".encode()).digest()
    start = np.uint64(int.from_bytes(digest[:8], "little"))
    counter = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):  # wrapping around at 2^64 is what the hash wants
        z = counter * np.uint64(0x9E3779B97F4A7C15) + start
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    bits: Doubles = (z >> np.uint64(11)).astype(np.float64)
    return (bits * 2.0**-53).reshape(shape)


def bell(seed: int, name: str, shape: tuple[int, ...]) -> Doubles:
    """Mean 0, variance 1: four uniforms added up, one after the other."""
    total = uniform(seed, f"{name}/0", shape)
    for part in (1, 2, 3):
        total = total + uniform(seed, f"{name}/{part}", shape)
    return (total - 2.0) * _SQRT_3


def clustered(recipe: Recipe, name: str, batch: int, width: int, bias: float = 0.0) -> Doubles:
    """``(batch, N, width)`` tokens, each a cluster's centre with noise."""
    seed, count = recipe["seed"], recipe["N"]
    clusters, noise = recipe.get("ncl", 24), recipe.get("noise", 0.6)
    centres = bell(seed, f"{name}/cen", (clusters, width))
    owner = (uniform(seed, f"{name}/asg", (batch, count)) * clusters).astype(np.int64)
    tokens = centres[np.minimum(owner, clusters - 1)]
    tokens = tokens + noise * bell(seed, f"{name}/noi", (batch, count, width))
    return tokens + bias


def repeated(tokens: Doubles, times: int) -> Doubles:
    """Tokens i, i + N / times, i + 2 N / times, ... made identical."""
    count = tokens.shape[1]
    return tokens[:, np.arange(count) % (count // times)]


def inputs(recipe: Recipe) -> dict[str, Floats]:
    """Every input array of a case by name, none for a case that stores its own."""
    found: dict[str, Doubles] = {}
    width, times = recipe.get("D", 32), recipe.get("dup", 1)
    if recipe["gen"] == "cdpruner":
        batch, space = recipe.get("B", 1), recipe.get("C", 16)
        features = clustered(recipe, "feat", batch, width, recipe.get("bias", 0.0))
        patches = clustered(recipe, "emb", batch, space)
        found["image_features"] = repeated(features, times)
        found["image_embeds"] = repeated(patches, times)
        found["text_embeds"] = bell(recipe["seed"], "txt", (recipe.get("M", 1), space))
    elif recipe["gen"] == "divprune":
        features = clustered(recipe, "feat", 1, width, recipe.get("bias", 0.0))
        found["features"] = repeated(features, times)[0]
    return {name: np.ascontiguousarray(array, np.float32) for name, array in found.items()}
