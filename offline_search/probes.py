"""Behaviour of candidates on probes: visual tokens of a few images, as a model computes them.

A candidate that keeps the same tokens with the same rows as another is a duplicate of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from offline_search.dataset import Dataset
from offline_search.ledger import Exchange
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import VisualTokens

Probes = Mapping[str, Sequence[VisualTokens]]
"""Probes by model, of a search with one model by the empty name; empty if there are none."""

_PROBE_IMAGES = 16
"""Number of images in the probe set; each has one question."""


def probes_from_checkpoint(
    checkpoint: Path, text_tower: Path | None, dataset: Dataset
) -> Probes:
    """Probes from a local checkpoint: the first search images with their first questions.

    Raises :class:`ConfigError` or :class:`UnsupportedModelError`.
    """
    # Imported here, because it loads transformers.
    from vllm_autoprune.checkpoint import LlavaVision

    vision = LlavaVision(checkpoint, text_tower)
    by_image = {
        example.image: example for example in reversed(dataset.splits["search"])
    }
    tokens = [
        vision.encode(dataset.images[example.image].image(), example.question)
        for example in islice(reversed(by_image.values()), _PROBE_IMAGES)
    ]
    return {"": tokens}


@torch.no_grad()
def fingerprint(policies: Sequence[PruningPolicy], probes: Probes) -> str:
    """SHA-256 of the selections of ``policies`` on all probes.

    It covers features as well as indices, because two states may keep the same tokens and merge the
    discarded ones differently.
    """
    behaviour = hashlib.sha256()
    for policy in policies:
        for images in probes.values():
            for tokens in images:
                size = (tokens.count, tokens.grid.tiles)
                refined = refine(policy.at(*size), tokens)
                behaviour.update(refined.indices.contiguous().numpy().tobytes())
                features = refined.features.float().contiguous()
                behaviour.update(features.numpy().tobytes())
    return behaviour.hexdigest()


@torch.no_grad()
def count_exchanges(
    state: PruningState, budget: BudgetCall, probes: Probes
) -> dict[str, Exchange]:
    """What ``state`` exchanges at one budget, by model."""
    policy = materialize(state, budget)
    base = materialize(state.without_exchange(), budget)
    return {
        model: _count_on_images(policy, base, images)
        for model, images in probes.items()
    }


def _count_on_images(
    policy: PruningPolicy, base: PruningPolicy, images: Sequence[VisualTokens]
) -> Exchange:
    """Mean exchange of ``policy``, of which ``base`` makes none, on the probes of one model."""
    counts: list[int] = []
    qualities: list[tuple[float, float]] = []
    for tokens in images:
        size = (tokens.count, tokens.grid.tiles)
        refined = refine(policy.at(*size), tokens)
        picks = refine(base.at(*size), tokens).indices
        rows = zip(refined.indices.tolist(), picks.tolist(), strict=True)
        counts += [len({*row} - {*base_row}) for row, base_row in rows]
        if refined.quality is not None:
            qualities.append(_bound_exchange(refined.quality, picks))
    quality: tuple[float, float] | None = None
    if qualities:
        lowest, highest = np.mean(qualities, axis=0).tolist()
        quality = (round(lowest, 3), round(highest, 3))
    return Exchange(tokens=round(float(np.mean(counts)), 2), quality=quality)


def _bound_exchange(quality: Tensor, picks: Tensor) -> tuple[float, float]:
    """Lowest quality of the picks ``(B, P)`` and highest of the other tokens, as image means.

    ``quality`` is ``(B, N)``. The difference of the two bounds what one exchange can gain.
    """
    picked = mask_from_indices(picks, quality.shape[1])
    lowest = quality.masked_fill(~picked, torch.inf).amin(dim=1)
    highest = quality.masked_fill(picked, -torch.inf).amax(dim=1)
    return float(lowest.mean()), float(highest.mean())
