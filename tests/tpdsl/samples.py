"""Small states, images and policies for the tests, and what every selection has to be."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from vllm_autoprune import (
    Grid,
    Instruction,
    PruningPolicy,
    PruningState,
    RefinedTokens,
    StateError,
    VisualTokens,
    load_state,
    materialize,
    refine,
)
from vllm_autoprune.ops.rowwise import evenly_spaced, mask_from_indices
from vllm_autoprune.tpdsl.atoms.pools import PartitionCall
from vllm_autoprune.tpdsl.atoms.reassembly import BlendCall, ExchangeCall
from vllm_autoprune.tpdsl.atoms.selectors import BoundedSelector
from vllm_autoprune.tpdsl.atoms.source import ReferencePrior, ViewCall
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, ReferenceSelection, TokenSelection
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.materialize import core_policy
from vllm_autoprune.tpdsl.prefix import RecordedPrefix
from vllm_autoprune.tpdsl.registry import ATOMS, Group
from vllm_autoprune.tpdsl.tokens import Need, NextLayer, TowerStates, Words

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


Part = TypeVar("Part")


def mapped(part: Part, change: Callable[[Tensor], Tensor]) -> Part:
    """A record of tensors, such as images, with each tensor in it changed."""
    if isinstance(part, Tensor):
        return change(part)  # type: ignore[return-value]  # a tensor for a tensor
    if not dataclasses.is_dataclass(part) or isinstance(part, type | Grid):
        return part
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return dataclasses.replace(part, **{n: mapped(v, change) for n, v in values.items()})


def take(tokens: VisualTokens, rows: list[int]) -> VisualTokens:
    """Some images of a batch, in a given order."""
    return mapped(tokens, lambda tensor: tensor[rows])


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


VARIANTS: dict[str, dict[str, object]] = {
    "shipped": {},
    "divprune": {"/base_policy": {"name": "divprune"}},
    "global": {"/base_policy": {"name": "divprune", "params": {"tile_scope": "global"}}},
    "dpp": {"/constraints/selector": {"atom": "anchor_controlled_pool_dpp_selector", "q_e": 4}},
    "conditional": {
        "/constraints/selector": {"atom": "anchor_controlled_pool_dpp_selector", "q_e": 4},
        "/scoring/kernel": {"atom": "runtime_conditional_similarity_kernel", "theta": 0.5},
    },
    "residual": {"/reassembly/strength": 0.5},
    "base alone": {"/constraints/selector/q_e": 0},
    "anything goes": {"/constraints/selector/q_e": 640},
    "r_min": {"/constraints/selector": {**sample()["constraints"]["selector"], "r_min": 1}},
}
"""Changes to the shipped state; between them they run every atom but the safety checks."""

GRIDS = [Grid(6, 6), Grid(3, 4, tiles=3), Grid(1, 40), Grid(4, 4, tiles=5)]

EVENLY: list[int] = evenly_spaced(1, 36, 8, torch.device("cpu"))[0].tolist()


def policy_of(variant: str = "shipped", budget: int = 8) -> PruningPolicy:
    return materialize(state(VARIANTS[variant]), budget)


def same(
    one: RefinedTokens, other: RefinedTokens, rows: tuple[slice | list[int], slice | list[int]]
) -> bool:
    """Whether the given rows of two results are bit-identical."""
    mine, yours = rows
    for field in dataclasses.fields(RefinedTokens):
        a, b = vars_of(one)[field.name], vars_of(other)[field.name]
        if (a is None) != (b is None):
            return False
        if a is not None and b is not None and not torch.equal(a[mine], b[yours]):
            return False
    return True


def vars_of(outcome: RefinedTokens) -> dict[str, Tensor | None]:
    return {
        "features": outcome.features,
        "indices": outcome.indices,
        "reference": outcome.reference,
        "exchanged": outcome.exchanged,
        "fallback": outcome.fallback,
        "quality": outcome.quality,
    }


def assert_sound(policy: PruningPolicy, tokens: VisualTokens, outcome: RefinedTokens) -> None:
    """Assert the guarantees for every policy, image and budget below N."""
    k = policy.budget
    assert outcome.features.shape == (tokens.batch, k, tokens.features.shape[2])
    assert outcome.features.dtype == tokens.features.dtype
    assert bool(outcome.features.isfinite().all())
    assert outcome.indices.shape == outcome.reference.shape == (tokens.batch, k)
    assert bool((outcome.indices.diff(dim=1) > 0).all())
    assert int(outcome.indices.min()) >= 0 and int(outcome.indices.max()) < tokens.count
    base = mask_from_indices(outcome.reference, tokens.count)
    assert base.sum(dim=1).tolist() == [k] * tokens.batch
    shared = (mask_from_indices(outcome.indices, tokens.count) & base).sum(dim=1)
    assert torch.equal(outcome.exchanged, k - shared)
    assert int(shared.min()) >= policy.r_min
    assert int(outcome.exchanged.max()) <= policy.quota


ATOM_GRIDS = [Grid(6, 6), Grid(3, 4, tiles=3)]

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


TOWER_WIDTH, TEXT, START = 12, 6, 3


def whole_images(
    seed: int = 0,
    *,
    batch: int = 2,
    grid: Grid | None = None,
    dtype: torch.dtype = torch.float32,
    noise: float = 0.5,
) -> VisualTokens:
    """Images with every input that a policy may read; of odd ones two text tokens are padding."""
    tokens = images(seed, batch=batch, grid=grid, dtype=dtype, noise=noise)
    source, count = torch.Generator().manual_seed(seed + 1), tokens.count

    def bell(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source).to(dtype)

    patches, keys = bell(batch, count, TOWER_WIDTH), bell(batch, count, 4)
    width, length = tokens.features.shape[2], START + count + TEXT
    projector = bell(TOWER_WIDTH, width)
    layer = NextLayer(bell(batch, count).float().softmax(dim=1), bell(batch, count, TOWER_WIDTH))
    before, after = bell(batch, START, width), bell(batch, TEXT, width)
    text = torch.arange(TEXT) < TEXT - 2 * (torch.arange(batch)[:, None] % 2)
    return dataclasses.replace(
        tokens,
        tower=TowerStates(
            patches,
            keys,
            project=lambda rows: rows @ projector.to(rows.device, non_blocking=True),
            cls=bell(batch, tokens.grid.tiles, TOWER_WIDTH),
            next_layer=layer,
        ),
        encoder=patches,
        words=Words(after, text),
        language=RecordedPrefix(
            START,
            text,
            recorded_embeddings=torch.cat([before, tokens.features, after], dim=1),
            recorded_states=bell(batch, length, width),
            recorded_normed=bell(batch, length, width),
            recorded_keys=bell(batch, 2, length, 4),
            recorded_attention=bell(batch, 3, TEXT, length).float().softmax(dim=3),
        ),
    )


def with_only(tokens: VisualTokens, needs: frozenset[Need]) -> VisualTokens:
    """The images with only the needed optional inputs."""
    nothing: dict[str, Any] = dict.fromkeys({*get_args(Need)} - needs - {"next_layer"})
    return dataclasses.replace(tokens, **nothing)


QUESTION_FREE = [name for name, policy in BASE_POLICIES.items() if policy.core is not None]
CORES: dict[str, dict[str, object]] = {
    "divprune": {"share": 0.5},
    "global": {
        "share": 0.5,
        "policy": {"name": "divprune", "params": {"tile_scope": "global"}},
    },
    "merging": {"share": 0.5, "policy": {"name": "visionzip"}},
    "extra rows": {"share": 0.5, "policy": {"name": "prumerge_plus"}},
    "cover": {"share": 0.5, "cover": 0.5, "strength": 0.25},
    "almost all": {"share": 0.9, "cover": 0.9, "strength": 0.5},
}
UNCHANGED: dict[str, object] = {"/constraints/selector/q_e": 0}
BLEND: dict[str, object] = {"/reassembly": {"atom": "mean_residual", "strength": 0.5}}


def with_core(core: dict[str, object], changes: dict[str, object] | None = None) -> PruningState:
    return state({**(changes or {}), "/core": core})


def asked_otherwise(tokens: VisualTokens) -> VisualTokens:
    """The same images with the opposite question."""
    instruction = tokens.require_instruction()
    opposite = dataclasses.replace(instruction, text=-instruction.text)
    return dataclasses.replace(tokens, instruction=opposite)


def assert_split(policy: PruningPolicy, tokens: VisualTokens) -> RefinedTokens:
    """K unique tokens, core first, no fallback, and a core that no question changes."""
    actual = refine(policy, tokens)
    assert actual.features.shape[1] == actual.indices.shape[1] == policy.budget
    assert actual.fallback.tolist() == [0] * tokens.batch
    assert all(row.unique().numel() == policy.budget for row in actual.indices)
    if policy.core == 0:
        return actual
    own = slice(policy.core)
    unasked = dataclasses.replace(tokens, instruction=None, language=None)
    for other in (
        refine(core_policy(policy.state, policy.core), unasked),
        refine(policy, asked_otherwise(tokens)),
    ):
        assert torch.equal(actual.indices[:, own], other.indices[:, own])
        assert torch.equal(actual.features[:, own], other.features[:, own])
    return actual


def accepts(core: dict[str, object]) -> bool:
    schema = PruningState.model_json_schema()
    return bool(jsonschema.Draft202012Validator(schema).is_valid(edited(sample(), {"/core": core})))
