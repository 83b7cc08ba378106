"""No host synchronisation: waiting for a GPU would stall the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.stand_in_device import forbid_waiting
from tests.tpdsl.executor.cores import CORES, with_core
from tests.tpdsl.selection_assertions import VARIANTS, policy_of
from vllm_autoprune import Grid, Instruction, VisualTokens, load_state, materialize, refine
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import shipped_states
from vllm_autoprune.tpdsl.prefix import RecordedPrefix
from vllm_autoprune.tpdsl.refine import keep_evenly, keep_reference
from vllm_autoprune.tpdsl.tokens import NextLayer, TowerStates, Words


def shapes_alone(device: str, grid: Grid, dtype: torch.dtype) -> VisualTokens:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, device=device, dtype=dtype)

    count = grid.tokens
    length, text = 2 + count + 6, 6
    tower = TowerStates(
        patches=empty(3, count, 24, dtype=dtype),
        keys=empty(3, count, 8, dtype=dtype),
        project=lambda rows: rows @ empty(24, 32, dtype=dtype),
        cls=empty(3, grid.tiles, 24, dtype=dtype),
        next_layer=NextLayer(empty(3, count), empty(3, count, 24, dtype=dtype)),
    )
    language = RecordedPrefix(
        start=2,
        text=empty(3, text, dtype=torch.bool),
        recorded_embeddings=empty(3, length, 32, dtype=dtype),
        recorded_states=empty(3, length, 32, dtype=dtype),
        recorded_normed=empty(3, length, 32, dtype=dtype),
        recorded_keys=empty(3, 2, length, 8, dtype=dtype),
        recorded_attention=empty(3, 2, text, length),
    )
    return VisualTokens(
        empty(3, count, 32, dtype=dtype),
        grid,
        empty(3, count),
        Instruction(empty(3, count, 16), empty(3, 2, 16), empty(3, 2, dtype=torch.bool), sign=-1),
        tower=tower,
        language=language,
        encoder=tower.patches,
        words=Words(empty(3, text, 32, dtype=dtype), empty(3, text, dtype=torch.bool)),
    )


@pytest.mark.parametrize("name", shipped_states())
@pytest.mark.parametrize("grid", [Grid(12, 12), Grid(6, 6, tiles=5)])
def test_shipped_states_do_not_synchronise(name: str, grid: Grid) -> None:
    tokens = shapes_alone("meta", grid, torch.float16)
    policy = materialize(load_state(name)).at(grid.tokens)
    with forbid_waiting():
        actual = refine(policy, tokens)
    assert actual.features.shape == (3, min(policy.budget, grid.tokens), 32)
    assert actual.features.dtype == torch.float16
    assert actual.features.is_meta and actual.indices.is_meta and actual.fallback.is_meta


@pytest.mark.parametrize("variant", VARIANTS)
def test_atoms_do_not_synchronise(variant: str) -> None:
    tokens = shapes_alone("meta", Grid(4, 4, tiles=3), torch.bfloat16)
    with forbid_waiting():
        assert refine(policy_of(variant), tokens).features.shape == (3, 8, 32)
        assert keep_reference(policy_of(variant), tokens).features.shape == (3, 8, 32)
        assert keep_evenly(8, tokens).indices.shape == (3, 8)


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_do_not_depend_on_values(variant: str) -> None:
    with FakeTensorMode():
        tokens = shapes_alone("cpu", Grid(4, 4, tiles=3), torch.float16)
        assert refine(policy_of(variant), tokens).features.shape == (3, 8, 32)


@pytest.mark.parametrize(
    ("base", "core"),
    [
        *((base, "cover") for base in BASE_POLICIES),
        *(("cdpruner", core) for core in CORES if core != "cover"),
    ],
)
def test_core_and_delta_do_not_synchronise(base: str, core: str) -> None:
    tokens = shapes_alone("meta", Grid(4, 4, tiles=3), torch.bfloat16)
    selector = {"atom": "constrained_pool_dpp_selector", "q_e": 2}
    changes: dict[str, object] = {
        "/base_policy": {"name": base},
        "/constraints/selector": selector,
        "/reassembly": {"atom": "mean_residual", "strength": 0.5},
    }
    policy = materialize(with_core(CORES[core], changes), 8)
    with forbid_waiting():
        actual = refine(policy, tokens)
    assert actual.features.shape == (3, 8, 32) and actual.indices.shape == (3, 8)
    assert actual.features.is_meta and actual.indices.is_meta and actual.fallback.is_meta
