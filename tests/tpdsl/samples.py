"""Small states and images that the tests are made from."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_autoprune import Grid, Instruction, PruningState, StateError, VisualTokens, load_state
from vllm_autoprune.tpdsl.base_policy import ReferenceSelection, TokenSelection
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.registry import ATOMS

Json = dict[str, Any]

DELETE = object()
"""As a new value in :func:`edited`: the field goes away."""


def sample() -> Json:
    """A state that refines CDPruner by signals that read the question and attention."""
    data: Json = json.loads(Path(__file__).with_name("sample_state.json").read_text())
    return data


def shipped(name: str) -> Json:
    """A shipped state as the JSON object in its file."""
    data: Json = json.loads(shipped_states()[name].read_text(encoding="utf-8"))
    return data


def edited(data: Json, changes: dict[str, object]) -> Json:
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


def state(changes: dict[str, object] | None = None) -> PruningState:
    """The sample state with some fields changed."""
    return load_state(json.dumps(edited(sample(), changes or {})))


def images(
    seed: int = 0,
    *,
    batch: int = 2,
    grid: Grid | None = None,
    width: int = 16,
    clusters: int = 6,
    noise: float = 0.5,
    segments: int = 2,
    sign: int = -1,
    dtype: torch.dtype = torch.float32,
) -> VisualTokens:
    """Images of clustered tokens with every input filled."""
    grid = grid or Grid(6, 6)
    count = grid.tokens
    source = torch.Generator().manual_seed(seed)

    def bell(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    owner = torch.randint(clusters, (batch, count), generator=source)
    return VisualTokens(
        features=(bell(clusters, width)[owner] + noise * bell(batch, count, width)).to(dtype),
        grid=grid,
        cls_attention=bell(batch, count).softmax(dim=1),
        instruction=Instruction(
            patches=bell(clusters, 8)[owner] + noise * bell(batch, count, 8),
            text=bell(batch, segments, 8),
            segments=torch.ones(batch, segments, dtype=torch.bool),
            sign=sign,
        ),
    )


def take(tokens: VisualTokens, rows: list[int]) -> VisualTokens:
    """Some images of a batch, in a given order."""
    attention, instruction = tokens.cls_attention, tokens.instruction
    return VisualTokens(
        tokens.features[rows],
        tokens.grid,
        None if attention is None else attention[rows],
        None
        if instruction is None
        else Instruction(
            instruction.patches[rows],
            instruction.text[rows],
            instruction.segments[rows],
            instruction.sign,
        ),
    )


def plain(features: Tensor, grid: Grid | None = None) -> VisualTokens:
    """Features ``(N, D)`` or ``(B, N, D)`` alone, by default as one row of tokens."""
    features = features if features.dim() == 3 else features[None]
    return VisualTokens(features, grid or Grid(1, features.shape[1]))


def with_relevance(tokens: VisualTokens, relevance: Tensor, sign: int = 1) -> VisualTokens:
    """The same images with an instruction whose cosine to each token is the one given."""
    angle = relevance.float().clamp(-1, 1).arccos()
    patches = torch.stack([angle.cos(), angle.sin()], dim=-1)
    text = torch.tensor([1.0, 0.0]).expand(tokens.batch, 1, 2)
    used = torch.ones(tokens.batch, 1, dtype=torch.bool)
    instruction = Instruction(patches, text, used, sign)
    return VisualTokens(tokens.features, tokens.grid, tokens.cls_attention, instruction)


def call(name: str, **parameters: object) -> Any:
    """An atom with these parameters and the defaults of the others."""
    return ATOMS[name].call.model_validate({"atom": name, **parameters})


def token_selection(
    indices: Tensor, picks: Tensor | None = None, g: Tensor | None = None
) -> TokenSelection:
    """Kept tokens ``(B, K)`` without fallback; the reference selection is the same by default."""
    no_fallback = torch.zeros(indices.shape[0], dtype=torch.uint8)
    reference = ReferenceSelection(indices if picks is None else picks)
    return TokenSelection(indices, reference, no_fallback, g)


def refused(source: str | Path) -> list[tuple[str, str]]:
    """Load a state that must be refused; (where, what) of each of its problems."""
    with pytest.raises(StateError) as raised:
        load_state(source)
    assert raised.value.problems and all(p.fix for p in raised.value.problems)
    return [(problem.where, problem.what) for problem in raised.value.problems]


def refused_with(changes: dict[str, object]) -> list[tuple[str, str]]:
    """As :func:`refused`, of the shipped state with some fields changed."""
    return refused(json.dumps(edited(sample(), changes)))


def fixed(changes: dict[str, object]) -> str:
    """The fix proposed for the only problem of a changed state."""
    with pytest.raises(StateError) as raised:
        load_state(json.dumps(edited(sample(), changes)))
    (problem,) = raised.value.problems
    return problem.fix
