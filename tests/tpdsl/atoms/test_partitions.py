from __future__ import annotations

import pytest
import torch

from tests.tpdsl.atom_policies import means
from tests.tpdsl.samples import call, images, plain
from vllm_autoprune import Grid
from vllm_autoprune.ops.similarity import spherical_kmeans
from vllm_autoprune.tpdsl.atoms.pools import run_partition


@means("spatial_grid_partition")
def test_cells_by_hand() -> None:
    labels = run_partition(
        call("spatial_grid_partition", cells=2), plain(torch.eye(12), Grid(3, 4))
    )
    assert labels.tolist() == [[0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3]]


def test_tiles_have_cells_of_their_own_and_small_tiles_fewer() -> None:
    tokens = plain(torch.eye(8), Grid(2, 2, tiles=2))
    labels = run_partition(call("spatial_grid_partition", cells=12), tokens)
    assert labels.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


@means("feature_cluster_partition")
def test_well_separated_clusters() -> None:
    angles = torch.tensor([0.0, 180.0, 5.0, 90.0, 185.0, 95.0, 355.0]).deg2rad()
    tokens = plain(torch.stack([angles.cos(), angles.sin()], dim=1) * torch.rand(7, 1).add(0.5))
    labels = run_partition(call("feature_cluster_partition", clusters=3), tokens)[0].tolist()
    groups = {frozenset(i for i in range(7) if labels[i] == label) for label in set(labels)}
    assert groups == {frozenset({0, 2, 6}), frozenset({1, 4}), frozenset({3, 5})}


@pytest.mark.parametrize("iters", [2, 5])
def test_cosines_to_centroids_are_those_of_the_mean_directions(iters: int) -> None:
    tokens = images(3, batch=1)
    before, _ = spherical_kmeans(tokens.cosine, 4, iters - 1)
    _, near = spherical_kmeans(tokens.cosine, 4, iters)
    unit = tokens.unit[0]
    for cluster in range(4):
        centroid = unit[before[0] == cluster].sum(dim=0)
        expected = unit @ (centroid / centroid.norm())
        assert torch.allclose(near[0, :, cluster], expected, atol=1e-5)


def test_more_clusters_than_tokens_are_as_many_as_tokens() -> None:
    tokens = plain(torch.eye(3))
    labels = run_partition(call("feature_cluster_partition", clusters=64), tokens)
    assert sorted(labels[0].tolist()) == [0, 1, 2]


def test_an_image_gets_the_same_labels_alone_and_in_a_batch() -> None:
    tokens = images(4, batch=5, grid=Grid(7, 9))
    together = spherical_kmeans(tokens.cosine, 8, 5)
    for image in range(5):
        alone = spherical_kmeans(tokens.cosine[image : image + 1], 8, 5)
        assert torch.equal(alone[0][0], together[0][image])
        assert torch.equal(alone[1][0], together[1][image])


def test_tokens_that_cancel_out_leave_their_centroid_where_it_was() -> None:
    tokens = plain(torch.tensor([[1.0, 0.0], [-1.0, 0.0]] * 2))
    labels = run_partition(call("feature_cluster_partition", clusters=2), tokens)
    assert labels[0, 0] == labels[0, 2] != labels[0, 1] == labels[0, 3]
