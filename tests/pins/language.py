"""Pins of the language: what states and atoms keep, and digests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from tests.pins.table import Table, digest, table
from tests.tpdsl.samples import state_using
from vllm_autoprune import (
    Grid,
    PruningPolicy,
    PruningState,
    VisualTokens,
    load_state,
    materialize,
    refine,
)
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.safety import synthetic_probes

K = 16
PROBE = 63
"""Tokens that are kept, and the K that probes are made for: they have N = 64."""


@cache
def probe(device: str = "cpu") -> VisualTokens:
    """The probe without equal tokens, between which the processor's rounding would decide."""
    return synthetic_probes(PROBE, torch.device(device))[0]


def kept(policy: PruningPolicy) -> Table:
    """Tokens kept of an image, and of one in four tiles; the shape of rows without values.

    Tokens are a count, a digest of their indices, and a weighted sum of their rows, so far rounded
    that processors agree.
    """
    tower = probe().tower
    assert tower is not None and tower.cls is not None
    tiles = replace(tower, cls=tower.cls.expand(-1, 4, -1))
    row: Table = {"policy": [policy.budget, policy.quota, policy.r_min, policy.core]}
    tiled = replace(probe(), grid=Grid(4, 4, tiles=4), tower=tiles)
    for name, tokens in (("image", probe()), ("tiles", tiled)):
        outcome = refine(policy, tokens)
        rows = outcome.features.flatten().double()
        total = (rows * torch.arange(len(rows)).cos()).sum().item()
        row[name] = [
            outcome.indices.shape[1],
            digest(outcome.indices.tolist()),
            round(total, 1),
        ]
    return {**row, "meta": [*refine(policy, probe("meta")).features.shape]}


@table
def states() -> Table:
    """What each shipped state keeps at K = 16, and the K that it ships with."""
    loaded = {name: load_state(name) for name in shipped_states()}
    return {
        name: {"shipped K": materialize(state).budget, **kept(materialize(state, K))}
        for name, state in loaded.items()
    }


@table
def atoms() -> Table:
    """What a state keeps that uses the atom: 16 tokens, or what the atom of a budget says."""
    budgets = ATOMS.names("budget_control")
    return {
        name: kept(materialize(state_using(name), None if name in budgets else K))
        for name in ATOMS.names()
    }


@table
def digests() -> Table:
    """The schema, states and cores; origin and inputs of every atom."""
    rows: Table = {"schema": digest(PruningState.model_json_schema())}
    for name in shipped_states():
        state = load_state(name)
        rows[f"state {name}"] = [state.digest[:16], state.core_digest[:16]]
    for atom in map(ATOMS.__getitem__, ATOMS.names()):
        rows[f"{atom.group} {atom.name}"] = [atom.origin, *sorted(atom.needs)]
    return rows
