"""Policies that run an atom, and images with every input, for the tests of all atoms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tests.tpdsl.samples import images, state, take
from vllm_autoprune import Grid, PruningPolicy, VisualTokens, materialize
from vllm_autoprune.tpdsl.atoms.pools import PartitionCall
from vllm_autoprune.tpdsl.atoms.reassembly import BlendCall, ExchangeCall
from vllm_autoprune.tpdsl.atoms.selectors import BoundedSelector
from vllm_autoprune.tpdsl.atoms.source import ReferencePrior, ViewCall
from vllm_autoprune.tpdsl.registry import ATOMS, Group
from vllm_autoprune.tpdsl.tokens import Need, TowerStates

GRIDS = [Grid(6, 6), Grid(3, 4, tiles=3)]

MEANINGS: set[str] = set()
"""Atoms whose values a test compares with a manual computation or a scalar loop."""

T = TypeVar("T", bound=Callable[..., object])


def means(*names: str) -> Callable[[T], T]:
    """Mark a test, or a class of tests, as a test of these atoms' values."""
    MEANINGS.update(names)
    return lambda test: test


def active_parameters(name: str) -> dict[str, object]:
    """The atom as JSON, with parameters at which it is not idle."""
    actual = ATOMS[name].call
    call: dict[str, object] = {"atom": name}
    if issubclass(actual, BlendCall):
        call["strength"] = 0.5
    if issubclass(actual, ExchangeCall):
        call["margin"] = 0.0
    if issubclass(actual, BoundedSelector):
        call["q_e"] = 3
    if issubclass(actual, ReferencePrior):
        call["floor"] = 0.5
    return call


def active(name: str) -> Any:
    """A call of the atom at which it is not idle."""
    return ATOMS[name].call.model_validate(active_parameters(name))


WITHOUT_NEEDS: dict[str, object] = {
    "/base_policy": {"name": "divprune"},
    "/scoring/signals": [{"atom": "visual_token_norm_saliency"}],
    "/constraints/selector/q_e": 3,
}
"""Changes after which the shipped state reads only features."""


def using(name: str) -> dict[str, object]:
    """Changes to the shipped state after which the atom affects the result."""
    call, kind = active_parameters(name), ATOMS[name].call
    dpp = {"/constraints/selector": active_parameters("constrained_pool_dpp_selector")}
    places: dict[Group, dict[str, object]] = {
        "budget_control": {"/budget": call},
        "scoring": {"/scoring/signals": [call]},
        "similarity_kernel": {**dpp, "/scoring/kernel": call},
        "score_fusion": {"/scoring/fusion": call},
        "candidate_pool": {"/constraints/pool": [call]},
        "selection_constraints": {"/constraints/selector": call},
        "reassembly": {"/reassembly": call},
        "safety_checks": {"/safety": [call]},
    }
    if issubclass(kind, PartitionCall):
        return {**WITHOUT_NEEDS, **dpp, "/constraints/partition": call}
    if ATOMS[name].group == "token_source_base_policy":
        source = {"tokens": call} if issubclass(kind, ViewCall) else {"priors": [call]}
        return {**WITHOUT_NEEDS, "/source": source}
    changes = {**WITHOUT_NEEDS, **places[ATOMS[name].group]}
    if "/constraints/selector" in changes:
        del changes["/constraints/selector/q_e"]
    return changes


def policy_using(name: str, budget: int = 8) -> PruningPolicy:
    """The policy that runs the atom, for K tokens."""
    return materialize(state(using(name)), budget)


def whole_images(
    seed: int = 0, *, batch: int = 2, grid: Grid | None = None, dtype: torch.dtype = torch.float32
) -> VisualTokens:
    """Images with every input that an atom may read."""
    tokens = images(seed, batch=batch, grid=grid, dtype=dtype)
    source = torch.Generator().manual_seed(seed + 1)
    count = tokens.count
    patches = torch.randn(batch, count, 12, generator=source).to(dtype)
    keys = torch.randn(batch, count, 4, generator=source).to(dtype)
    tower = TowerStates(patches, keys, project=lambda rows: rows)
    return dataclasses.replace(tokens, tower=tower)


def take_with_towers(tokens: VisualTokens, rows: list[int]) -> VisualTokens:
    """Some images of a batch, with their tower states."""
    tower = tokens.tower
    assert tower is not None
    part = dataclasses.replace(tower, patches=tower.patches[rows], keys=tower.keys[rows])
    return dataclasses.replace(take(tokens, rows), tower=part)


def with_only(tokens: VisualTokens, needs: frozenset[Need]) -> VisualTokens:
    """The images with only the needed optional inputs."""
    return dataclasses.replace(
        tokens,
        cls_attention=tokens.cls_attention if "cls_attention" in needs else None,
        instruction=tokens.instruction if "instruction" in needs else None,
        tower=tokens.tower if "tower" in needs else None,
    )
