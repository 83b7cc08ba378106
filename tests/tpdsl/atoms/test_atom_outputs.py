"""Return values of the atoms of each group: shapes, dtypes and ranges."""

from __future__ import annotations

import pytest
import torch

from tests.tpdsl.atom_policies import (
    GRIDS,
    active,
    active_parameters,
    policy_using,
    using,
    whole_images,
)
from tests.tpdsl.samples import call, state
from vllm_autoprune import Grid, materialize, refine
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.atoms.pools import PartitionCall, PoolCall, build_pool, run_partition
from vllm_autoprune.tpdsl.atoms.reassembly import RECIPES
from vllm_autoprune.tpdsl.atoms.scoring import run_fusion, run_kernel, run_signal
from vllm_autoprune.tpdsl.atoms.source import (
    PriorCall,
    PriorInputs,
    ViewCall,
    apply_view,
    run_prior,
)
from vllm_autoprune.tpdsl.registry import ATOMS

RANGES: dict[str, tuple[float, float]] = {
    "instruction_guided_visual_relevance": (-1, 1),
    "attention_proxy_saliency": (0, 1),
    "spatial_centrality_prior": (0, 1),
    "redundancy_density_penalty": (-1, 1),
    "local_contrast_saliency": (0, 2),
    "visual_token_norm_saliency": (0, torch.inf),
    "cluster_centroid_representativeness": (-1, 1),
    "global_mean_representativeness": (-1, 1),
    "channel_entropy_informativeness": (0, 1),
    "reference_selection_confidence": (0, 1),
    "local_detail_energy": (0, 2),
    "mean_dissimilarity_saliency": (0, 1),
}
"""Range of each signal, to rounding."""

TOKENS = whole_images(4, grid=Grid(3, 4, tiles=3))
PICKS = torch.stack([torch.randperm(36)[:7] for _ in range(2)])
G = torch.rand(2, 36)


@pytest.mark.parametrize("name", ATOMS.names("scoring"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_signals_are_float32_and_keep_their_range(name: str, dtype: torch.dtype) -> None:
    for grid in (*GRIDS, Grid(1, 1), Grid(1, 7)):
        tokens = whole_images(4, grid=grid, dtype=dtype)
        picks = torch.zeros(2, 1, dtype=torch.int64)
        actual = run_signal(call(name), tokens, picks)
        assert actual.shape == (2, grid.tokens) and actual.dtype == torch.float32
        least, most = RANGES[name]
        assert bool(actual.isfinite().all())
        assert least - 0.01 <= float(actual.min()) and float(actual.max()) <= most + 0.01


@pytest.mark.parametrize("name", ATOMS.names("similarity_kernel"))
def test_kernels_are_symmetric_with_qualities_above_zero(name: str) -> None:
    kernel = run_kernel(call(name), TOKENS, G)
    assert kernel.similarity.shape == (2, 36, 36) and kernel.quality.shape == (2, 36)
    assert torch.allclose(kernel.similarity, kernel.similarity.transpose(1, 2))
    assert bool((kernel.quality > 0).all())


@pytest.mark.parametrize("name", ATOMS.names("score_fusion"))
def test_fused_quality_is_finite_and_not_negative(name: str) -> None:
    signals = [torch.randn(2, 36), torch.zeros(2, 36), G]
    g = run_fusion(call(name), signals, [4.0, 1.0, 0.5], PICKS)
    assert g.shape == (2, 36) and bool(g.isfinite().all()) and float(g.min()) >= 0


@pytest.mark.parametrize("name", ATOMS.of_kind("candidate_pool", PoolCall))
def test_pools_lie_outside_the_reference(name: str) -> None:
    pool = build_pool([call(name)], TOKENS, G, PICKS)
    assert pool.shape == (2, 36) and pool.dtype == torch.bool
    assert not bool((pool & mask_from_indices(PICKS, 36)).any())


@pytest.mark.parametrize("name", ATOMS.of_kind("candidate_pool", PartitionCall))
def test_labels_count_from_zero_and_are_fewer_than_tokens(name: str) -> None:
    for grid in (*GRIDS, Grid(1, 1), Grid(1, 3)):
        tokens = whole_images(4, grid=grid)
        labels = run_partition(call(name), tokens)
        assert labels.shape == (2, grid.tokens) and labels.dtype == torch.int64
        assert int(labels.min()) >= 0 and int(labels.max()) < grid.tokens


@pytest.mark.parametrize("name", ATOMS.of_kind("token_source_base_policy", PriorCall))
def test_priors_lie_between_zero_and_one(name: str) -> None:
    policy = policy_using(name, 7)
    known = PriorInputs(TOKENS, policy.state.base_policy, 7, PICKS)
    prior = run_prior(active(name), known)
    assert prior.shape == (2, 36) and prior.dtype == torch.float32
    assert float(prior.min()) >= 0 and float(prior.max()) == 1


@pytest.mark.parametrize("name", ATOMS.of_kind("token_source_base_policy", ViewCall))
def test_views_show_the_same_tokens(name: str) -> None:
    seen = apply_view(call(name), TOKENS)
    assert (seen.batch, seen.count, seen.grid) == (2, 36, TOKENS.grid)
    assert seen.cls_attention is TOKENS.cls_attention


@pytest.mark.parametrize("name", RECIPES)
def test_another_order_moves_rows_together_with_their_indices(name: str) -> None:
    tokens = whole_images(4)
    here, there = (
        refine(materialize(state({**using(name), "/reassembly": changed}), 8), tokens)
        for changed in (
            active_parameters(name),
            active_parameters(_in_raster(name)),
        )
    )
    back = here.indices.argsort(dim=1)
    assert torch.equal(here.indices.gather(1, back), there.indices)
    moved = here.features.gather(1, back[:, :, None].expand_as(here.features))
    assert torch.equal(moved, there.features)
    assert torch.equal(here.indices, there.indices) == (RECIPES[name].order.name == "raster")


def _in_raster(name: str) -> str:
    cell = RECIPES[name].cell.rpartition(".")[0] + ".raster"
    return next(other for other, recipe in RECIPES.items() if recipe.cell == cell)
