"""``autoprune`` where its authors' code does not go: tiles, grids that are not square, cores."""

from __future__ import annotations

import pytest
import torch

from tests.tpdsl.samples import edited, images, shipped, take
from vllm_autoprune import Grid, load_state, materialize, refine
from vllm_autoprune.ops.similarity import distance_to_neighbours, plain_cosines

GRIDS = [Grid(6, 6), Grid(4, 9), Grid(4, 4, tiles=3), Grid(1, 30)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("core", [0.0, 0.5])
def test_without_the_question_in_its_base_it_reads_none(grid: Grid, core: float) -> None:
    data = edited(shipped("autoprune"), {"/base_policy": {"name": "divprune", "params": {}}})
    state = load_state({**data, **({"core": {"share": core}} if core else {})})
    policy = materialize(state, 12)
    assert not policy.reads_instruction and policy.needs == frozenset()
    refined = refine(policy, images(3, grid=grid))
    assert refined.exchanged.tolist() == [2, 2] and not refined.fallback.any()
    assert all(len(set(kept.tolist())) == 12 for kept in refined.indices)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_an_image_alone_and_in_a_batch_is_the_same(grid: Grid) -> None:
    policy, tokens = materialize(load_state("autoprune"), 9), images(5, grid=grid, batch=3)
    together = refine(policy, tokens)
    for image in range(3):
        alone = refine(policy, take(tokens, [image]))
        assert torch.equal(alone.features[0], together.features[image])
        assert torch.equal(alone.indices[0], together.indices[image])


def test_contrast_is_the_distance_from_the_mean_of_the_neighbours() -> None:
    unit = torch.nn.functional.normalize(images(1, grid=Grid(5, 5)).features, dim=-1)
    square = unit.view(2, 5, 5, -1)
    mean = sum(square.roll(step, axis) for axis in (1, 2) for step in (1, -1)) / 4
    expected = (square - mean).norm(dim=-1).flatten(1)
    assert torch.allclose(distance_to_neighbours(plain_cosines(unit), 5, 5), expected, atol=1e-5)
    nearest = plain_cosines(unit).topk(8, dim=-1).indices
    mean = torch.stack([rows[at].mean(dim=1) for rows, at in zip(unit, nearest, strict=True)])
    expected = (unit - mean).norm(dim=-1)
    assert torch.allclose(distance_to_neighbours(plain_cosines(unit), 1, 25), expected, atol=1e-5)


def test_equal_tokens_have_no_contrast() -> None:
    cosines = plain_cosines(torch.randn(1, 1, 64).expand(1, 16, 64))
    assert distance_to_neighbours(cosines, 4, 4).tolist() == [[0.0] * 16]


def test_an_exhausted_pool_leaves_the_best_reference_tokens() -> None:
    changes = {"/constraints/pool": [{"atom": "quality_pool_builder", "pool_ratio": 0.25}]}
    data = edited(shipped("autoprune"), {**changes, "/constraints/selector/q_e": 8})
    refined = refine(materialize(load_state(data), 8), images(2))
    assert refined.exchanged.tolist() == [2, 2]
    assert refined.quality is not None
    for quality, picks, kept in zip(
        refined.quality, refined.reference, refined.indices, strict=True
    ):
        stay = picks[torch.isin(picks, kept)]
        leave = picks[~torch.isin(picks, kept)]
        assert quality[stay].min() >= quality[leave].max()
