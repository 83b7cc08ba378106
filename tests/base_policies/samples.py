"""Images with every input that a base policy may read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from vllm_autoprune import Grid, Instruction, VisualTokens
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, PublishedSelection, ReferenceSelection
from vllm_autoprune.tpdsl.prefix import RecordedPrefix
from vllm_autoprune.tpdsl.tokens import NextLayer, TowerStates, Words

WIDTH, TOWER_WIDTH, TEXT, START = 16, 12, 6, 3


def images(
    seed: int = 0,
    *,
    batch: int = 2,
    grid: Grid | None = None,
    dtype: torch.dtype = torch.float32,
    noise: float = 0.5,
    clusters: int = 6,
) -> VisualTokens:
    """Images of clustered tokens; of the odd ones the last two text tokens are padding."""
    grid = grid or Grid(6, 6)
    source = torch.Generator().manual_seed(seed)

    def bell(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source).to(dtype)

    owner = torch.randint(clusters, (batch, grid.tokens), generator=source)

    def clustered(width: int) -> Tensor:
        return bell(clusters, width)[owner] + noise * bell(batch, grid.tokens, width)

    projector = bell(TOWER_WIDTH, WIDTH)
    features = clustered(WIDTH)
    length = START + grid.tokens + TEXT
    entering = torch.cat([bell(batch, START, WIDTH), features, bell(batch, TEXT, WIDTH)], dim=1)
    odd = torch.arange(batch)[:, None] % 2
    text = torch.arange(TEXT) < TEXT - 2 * odd
    tower = TowerStates(
        patches=clustered(TOWER_WIDTH),
        keys=clustered(8),
        project=lambda rows: rows @ projector.to(rows.device, non_blocking=True),
        cls=bell(batch, grid.tiles, TOWER_WIDTH),
        next_layer=NextLayer(
            bell(batch, grid.tokens).float().softmax(dim=1), clustered(TOWER_WIDTH)
        ),
    )
    return VisualTokens(
        features,
        grid,
        cls_attention=bell(batch, grid.tokens).softmax(dim=1),
        instruction=Instruction(
            clustered(8).float(),
            bell(batch, 2, 8).float(),
            torch.ones(batch, 2, dtype=torch.bool),
            sign=-1,
        ),
        tower=tower,
        encoder=tower.patches,
        words=Words(entering[:, -TEXT:], text),
        language=RecordedPrefix(
            START,
            text,
            recorded_embeddings=entering,
            recorded_states=bell(batch, length, WIDTH),
            recorded_normed=bell(batch, length, WIDTH),
            recorded_keys=bell(batch, 2, length, 4),
            recorded_attention=bell(batch, 3, TEXT, length).float().softmax(dim=3),
        ),
    )


def tower_of(tokens: VisualTokens) -> TowerStates:
    """Tower states of these images; fails if there are none."""
    assert tokens.tower is not None
    return tokens.tower


def language_of(tokens: VisualTokens) -> RecordedPrefix:
    """Recorded language-model tensors of these images."""
    assert isinstance(tokens.language, RecordedPrefix)
    return tokens.language


def mapped(tokens: VisualTokens, change: Callable[[Tensor], Tensor]) -> VisualTokens:
    """The same images with every input changed."""
    instruction, tower, language = tokens.instruction, tower_of(tokens), language_of(tokens)
    following = tokens.require_next_layer()
    words = tokens.require_words()
    assert instruction is not None and tokens.cls_attention is not None

    def recorded(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else change(tensor)

    return replace(
        tokens,
        features=change(tokens.features),
        cls_attention=change(tokens.cls_attention),
        encoder=change(tokens.require_encoder()),
        words=Words(change(words.embeddings), change(words.used)),
        instruction=replace(
            instruction,
            patches=change(instruction.patches),
            text=change(instruction.text),
            segments=change(instruction.segments),
        ),
        tower=replace(
            tower,
            patches=change(tower.patches),
            keys=change(tower.keys),
            cls=None if tower.cls is None else change(tower.cls),
            next_layer=NextLayer(change(following.attention), change(following.keys)),
        ),
        language=replace(
            language,
            text=change(language.text),
            recorded_embeddings=recorded(language.recorded_embeddings),
            recorded_states=recorded(language.recorded_states),
            recorded_normed=recorded(language.recorded_normed),
            recorded_keys=recorded(language.recorded_keys),
            recorded_attention=recorded(language.recorded_attention),
        ),
    )


def take(tokens: VisualTokens, rows: list[int]) -> VisualTokens:
    """Some images of a batch."""
    return mapped(tokens, lambda tensor: tensor[rows])


def select(name: str, tokens: VisualTokens, budget: int, **params: object) -> ReferenceSelection:
    """A policy's reference selection with these parameters and the defaults of the others."""
    policy = BASE_POLICIES[name]
    call = policy.call.model_validate({"name": name, "params": params})
    return policy.select(call.params, tokens, budget)


def native(
    name: str, tokens: VisualTokens, budget: int | None = None, **params: object
) -> PublishedSelection:
    """Output of the published code on these inputs."""
    policy = BASE_POLICIES[name]
    call = policy.call.model_validate({"name": name, "params": params})
    return policy.native(call.params, tokens, budget)


def prefix(
    count: int,
    text: list[bool],
    *,
    start: int = 1,
    embeddings: Tensor | None = None,
    states: Tensor | None = None,
    normed: Tensor | None = None,
    keys: Tensor | None = None,
    attention: Tensor | None = None,
    layers: int = 32,
) -> VisualTokens:
    """One image of ``count`` tokens with what is recorded of its sequence, no batch axis given."""

    def one(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[None]

    return VisualTokens(
        torch.eye(count)[None],
        Grid(1, count),
        language=RecordedPrefix(
            start,
            torch.tensor([text]),
            layers,
            one(embeddings),
            one(states),
            one(normed),
            one(keys),
            one(attention),
        ),
    )
