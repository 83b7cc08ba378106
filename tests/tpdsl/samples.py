"""Small states and images for the tests."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from vllm_autoprune import Grid, Instruction, PruningState, VisualTokens, load_state
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.reference import PLACES
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.safety import _make_probe
from vllm_autoprune.tpdsl.tokens import MergerInput

Json = dict[str, Any]
Changes = Mapping[str, object]

DELETE = ...
"""As a new value in :func:`edited`: the field goes away."""

UNCHANGED: Changes = {"/constraints/selector/q_e": 0}
"""The base policy alone."""

IN: Changes = {"/rank_at": "merger_in"}

BLEND: Changes = {"/reassembly": {"atom": "mean_residual", "strength": 0.5}}


def sample() -> Json:
    """A state that refines CDPruner by signals that read the question and attention."""
    data: Json = json.loads(Path(__file__).with_name("sample_state.json").read_text())
    return data


def shipped(name: str) -> Json:
    """A shipped state as the JSON object in its file."""
    data: Json = json.loads(shipped_states()[name].read_text(encoding="utf-8"))
    return data


def edited(data: Json, changes: Changes) -> Json:
    """A copy in which each JSON pointer holds its new value."""
    data = copy.deepcopy(data)
    for pointer, value in changes.items():
        *path, last = pointer.removeprefix("/").split("/")
        place: Any = data
        for step in path:
            place = place[int(step) if isinstance(place, list) else step]
        key = int(last) if isinstance(place, list) else last
        if value is DELETE:
            del place[key]
        else:
            place[key] = value
    return data


def state(changes: Changes | None = None) -> PruningState:
    """The sample state with some fields changed."""
    return load_state(json.dumps(edited(sample(), changes or {})))


def call(name: str, **parameters: object) -> Any:
    """An atom with these parameters and the defaults of the others."""
    return ATOMS[name].call.model_validate({"atom": name, **parameters})


_ACTIVE: Changes = {
    "strength": 0.5,
    "margin": 0.0,
    "q_e": 6,
    "floor": 0.5,
    "pool_ratio": 0.75,
    "cell_cap": 1,
    "scale_variance": True,
}
"""Parameters of atoms that are idle, or not told from others, at their default."""


def active(name: str) -> Json:
    """The atom as JSON, with parameters at which it is not idle."""
    taken = (
        () if ATOMS[name].group == "budget_control" else ATOMS[name].call.parameters()
    )
    return {
        "atom": name,
        **{key: value for key, value in _ACTIVE.items() if key in taken},
    }


def state_using(name: str) -> PruningState:
    """The shipped divprune with an exchange by two signals, and the atom in its place."""
    (place,) = (place for place in PLACES if name in place.names)
    signals = ("redundancy_density_penalty", "visual_token_norm_saliency")
    changes: Json = {
        "/scoring/signals": [*map(active, signals)],
        "/constraints/selector": active("constrained_pool_dpp_selector"),
        "/source/priors": [active("reference_mask_prior")],
        "/safety": [active("preserve_budget")],
    }
    pointer = f"{place.pointer}/0" if place.many else place.pointer
    return load_state(edited(shipped("divprune"), {**changes, pointer: active(name)}))


def images(
    seed: int = 0,
    *,
    batch: int = 2,
    grid: Grid | None = None,
    width: int = 16,
    clusters: int = 6,
    noise: float = 0.5,
    dtype: torch.dtype = torch.float32,
) -> VisualTokens:
    """Images of clustered tokens with every input, whose patches have norms of their own."""
    grid = grid or Grid(6, 6)
    options = {"clusters": clusters, "noise": noise}
    tokens = _make_probe(grid, seed, **options, batch=batch, width=width)  # type: ignore[arg-type]
    norms = (
        torch.rand(batch, grid.tokens, 2, generator=torch.Generator().manual_seed(seed))
        + 1
    )
    tokens = replace(tokens, merger_input=MergerInput(norms))
    return mapped(
        tokens, lambda part: part.to(dtype) if part.is_floating_point() else part
    )


Part = TypeVar("Part")


def mapped(part: Part, change: Callable[[Tensor], Tensor]) -> Part:
    """A record of tensors, such as images, with each tensor in it changed."""
    if isinstance(part, Tensor):
        return change(part)  # type: ignore[return-value]  # a tensor for a tensor
    if isinstance(part, dict):
        return {name: mapped(value, change) for name, value in part.items()}  # type: ignore[return-value]
    if not is_dataclass(part) or isinstance(part, type | Grid):
        return part
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    return replace(
        part, **{name: mapped(value, change) for name, value in values.items()}
    )


def take(tokens: VisualTokens, rows: list[int]) -> VisualTokens:
    """Some images of a batch, in a given order."""
    return mapped(tokens, lambda tensor: tensor[rows])


def plain(features: Tensor, grid: Grid | None = None) -> VisualTokens:
    """Features ``(N, D)`` or ``(B, N, D)`` alone, by default as one row of tokens."""
    features = features if features.dim() == 3 else features[None]
    return VisualTokens(features, grid or Grid(1, features.shape[1]))


def around(degrees: list[float], grid: Grid | None = None) -> VisualTokens:
    """One image of tokens in these directions of a plane."""
    angles = torch.tensor(degrees).deg2rad()
    return plain(torch.stack([angles.cos(), angles.sin()], dim=1), grid)


def with_relevance(
    tokens: VisualTokens, relevance: Tensor, sign: int = 1
) -> VisualTokens:
    """The same images with an instruction whose cosine to each token is the one given."""
    angle = relevance.float().clamp(-1, 1).arccos()
    patches = torch.stack([angle.cos(), angle.sin()], dim=-1)
    text = torch.tensor([1.0, 0.0]).expand(tokens.batch, 1, 2)
    used = torch.ones(tokens.batch, 1, dtype=torch.bool)
    instruction = Instruction(patches, text, used, sign)
    return VisualTokens(tokens.features, tokens.grid, tokens.cls_attention, instruction)
