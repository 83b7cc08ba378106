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
from vllm_autoprune.tpdsl.prefix import RecordedPrefix
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.tokens import MergerInput, NextLayer, TowerStates, Words

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


_ACTIVE: dict[str, Json] = {
    "reassembly": {"strength": 0.5, "margin": 0.0},
    "selection_constraints": {"q_e": 3},
    "token_source_base_policy": {"floor": 0.5},
}


def active(name: str) -> Json:
    """The atom as JSON, with parameters at which it is not idle."""
    atom, chosen = ATOMS[name], _ACTIVE.get(ATOMS[name].group, {})
    taken = {key: value for key, value in chosen.items() if key in atom.call.parameters()}
    return {"atom": name, **taken}


TOWER_WIDTH, TEXT, START = 12, 6, 3


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
    """Images of clustered tokens with every input; of odd ones two text tokens are padding."""
    grid = grid or Grid(6, 6)
    count, length = grid.tokens, START + grid.tokens + TEXT
    source, further = (torch.Generator().manual_seed(seed + more) for more in (0, 1))

    def bell(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    def more(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=further).to(dtype)

    owner = torch.randint(clusters, (batch, count), generator=source)
    features = (bell(clusters, width)[owner] + noise * bell(batch, count, width)).to(dtype)
    attention = bell(batch, count).softmax(dim=1)
    instruction = Instruction(
        patches=bell(clusters, 8)[owner] + noise * bell(batch, count, 8),
        text=bell(batch, 2, 8),
        segments=torch.ones(batch, 2, dtype=torch.bool),
        sign=-1,
    )
    patches, keys, projector = (
        more(batch, count, TOWER_WIDTH), more(batch, count, 4), more(TOWER_WIDTH, width)
    )  # fmt: skip
    layer = NextLayer(more(batch, count).float().softmax(dim=1), more(batch, count, TOWER_WIDTH))
    before, after = more(batch, START, width), more(batch, TEXT, width)
    text = torch.arange(TEXT) < TEXT - 2 * (torch.arange(batch)[:, None] % 2)
    return VisualTokens(
        features,
        grid,
        cls_attention=attention,
        instruction=instruction,
        tower=TowerStates(
            patches,
            keys,
            project=lambda rows: rows @ projector.to(rows.device, non_blocking=True),
            cls=more(batch, grid.tiles, TOWER_WIDTH),
            next_layer=layer,
        ),
        encoder=patches,
        words=Words(after, text),
        language=RecordedPrefix(
            START,
            text,
            recorded={
                "embeddings": torch.cat([before, features, after], dim=1),
                "states": more(batch, length, width),
                "normed": more(batch, length, width),
                "keys": more(batch, 2, length, 4),
                "attention": more(batch, 3, TEXT, length).float().softmax(dim=3),
            },
        ),
        # Norms of patches, which are not those of their means.
        merger_input=MergerInput(more(batch, count, 2).float().abs() + 1),
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
    return replace(part, **{name: mapped(value, change) for name, value in values.items()})


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


def with_relevance(tokens: VisualTokens, relevance: Tensor, sign: int = 1) -> VisualTokens:
    """The same images with an instruction whose cosine to each token is the one given."""
    angle = relevance.float().clamp(-1, 1).arccos()
    patches = torch.stack([angle.cos(), angle.sin()], dim=-1)
    text = torch.tensor([1.0, 0.0]).expand(tokens.batch, 1, 2)
    used = torch.ones(tokens.batch, 1, dtype=torch.bool)
    instruction = Instruction(patches, text, used, sign)
    return VisualTokens(tokens.features, tokens.grid, tokens.cls_attention, instruction)
