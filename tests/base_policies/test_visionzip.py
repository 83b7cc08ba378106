from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.base_policies.samples import images, native, select, tower_of
from vllm_autoprune import Grid, SelectionError, VisualTokens
from vllm_autoprune.base_policies.visionzip import VisionZipParams
from vllm_autoprune.tpdsl.tokens import TowerStates

# Eight patches: attention falls from 3 on, keys point in two directions, patches count in
# powers of two so that a sum says what is in it.
ATTENTION = torch.tensor([[0.1, 0.2, 0.3, 0.9, 0.8, 0.0, 0.05, 0.15]])
KEYS = torch.tensor([[1.0, 0], [0, 2.0], [1, 0], [1, 0], [1, 0], [0, 1], [3, 0.1], [0.1, 3]])[None]
PATCHES = (2.0 ** torch.arange(8))[None, :, None]


def small() -> VisualTokens:
    tower = TowerStates(
        PATCHES, KEYS, project=lambda rows: -rows, cls=torch.full((1, 1, 1), 1000.0)
    )
    return VisualTokens(-PATCHES, Grid(2, 4), cls_attention=ATTENTION, tower=tower)


def test_dominant_patches_come_by_attention_then_evenly_spaced_targets() -> None:
    # Left after 3 and 4: 0 1 2 5 6 7; every third of them is a target.
    actual = select("visionzip", small(), 4, contextual=2)
    assert actual.picks.tolist() == [[3, 4, 0, 5]]
    assert actual.extra is None


def test_each_other_token_goes_to_its_most_similar_target_as_part_of_a_mean() -> None:
    actual = select("visionzip", small(), 4, contextual=2)
    assert actual.merged is not None
    # To 0: tokens 2 and 6; to 5: tokens 1 and 7. The projector here is a minus sign.
    expected = [8, 16, 1 + (4 + 64) / 2, 32 + (2 + 128) / 2]
    assert actual.merged[0, :, 0].tolist() == [-value for value in expected]


def test_only_merged_rows_are_projected_again() -> None:
    tokens = small()
    other = replace(tokens, features=tokens.features + 0.5)
    actual = select("visionzip", other, 4, contextual=2)
    assert actual.merged is not None
    assert actual.merged[0, :2, 0].tolist() == [-7.5, -15.5]


def test_target_without_members_is_unchanged() -> None:
    tokens = small()
    keys = KEYS.clone()
    keys[0, 5] = torch.tensor([-1.0, -1.0])  # of the two targets, 0 is nearer to every other token
    lonely = replace(tokens, tower=replace(tower_of(tokens), keys=keys))
    actual = select("visionzip", lonely, 4, contextual=2)
    assert actual.merged is not None
    assert actual.merged[0, 3, 0] == -32
    assert actual.merged[0, 2, 0] == -(1 + (2 + 4 + 64 + 128) / 4)


def test_the_published_rows_keep_cls_in_place_of_a_patch() -> None:
    tokens = small()
    actual = native("visionzip", tokens, 4, contextual=1)
    # Dominant: [CLS] and the two strongest patches, in raster order. Then one target: 0.
    assert actual.indices[0].tolist() == [-1, 3, 4, 0]
    assert actual.features is not None
    others = (2 + 4 + 32 + 64 + 128) / 5
    assert actual.features[0][:, 0].tolist() == [1000, 8, 16, pytest.approx(1 + others)]
    served = select("visionzip", tokens, 4, contextual=1, patch_only=False)
    assert served.picks.tolist() == [[3, 4, 0]]
    assert served.extra is not None and served.extra.tolist() == [[[-1000.0]]]


@pytest.mark.parametrize("grid", [Grid(6, 6), Grid(3, 4, tiles=3)])
def test_with_cls_the_rows_are_the_published_ones(grid: Grid) -> None:
    tokens = images(1, grid=grid)
    actual = select("visionzip", tokens, 12, patch_only=False)
    published = native("visionzip", tokens, 12)
    assert published.features is not None and actual.merged is not None and actual.extra is not None
    project = tower_of(tokens).project
    for image in range(2):
        indices, rows = published.indices[image], project(published.features[image])
        mine = dict(zip(actual.picks[image].tolist(), actual.merged[image], strict=True))
        for index, row in zip(indices.tolist(), rows, strict=True):
            if index in mine and bool((row - mine[index]).abs().max() < 1e-4):
                del mine[index]
        # What is left are dominant rows: those stay the features that they were.
        features = tokens.features[image]
        assert all(torch.equal(row, features[index]) for index, row in mine.items())
        assert set(indices[indices >= 0].tolist()) == set(actual.picks[image].tolist())
        torch.testing.assert_close(actual.extra[image], rows[indices < 0])


@pytest.mark.parametrize(
    ("budget", "split"),
    [(192, (162, 30)), (128, (108, 20)), (64, (54, 10)), (32, (27, 5)), (16, (14, 2)), (1, (1, 0))],
)
def test_the_published_splits(budget: int, split: tuple[int, int]) -> None:
    assert VisionZipParams(contextual=None, patch_only=True).split(budget) == split


@pytest.mark.parametrize("share", [4, 5])
def test_tiles_are_zipped_each_on_its_own(share: int) -> None:
    tokens = images(2, grid=Grid(3, 4, tiles=3))
    budget = 3 * share - 1  # the last tile has one less

    def tile(number: int) -> VisualTokens:
        def cut(values: Tensor) -> Tensor:
            return values[:, 12 * number : 12 * number + 12]

        tower = tower_of(tokens)
        assert tokens.cls_attention is not None
        own = TowerStates(cut(tower.patches), cut(tower.keys), tower.project)
        features, attention = cut(tokens.features), cut(tokens.cls_attention)
        return VisualTokens(features, Grid(3, 4), cls_attention=attention, tower=own)

    actual = select("visionzip", tokens, budget)
    assert actual.merged is not None
    for number in range(3):
        alone = select("visionzip", tile(number), share - (number == 2))
        assert alone.merged is not None
        for image in range(2):
            own = actual.picks[image] // 12 == number
            assert (actual.picks[image, own] - 12 * number).tolist() == alone.picks[image].tolist()
            torch.testing.assert_close(actual.merged[image, own], alone.merged[image])


def test_a_tower_without_cls_has_patches_alone() -> None:
    tokens = small()
    without = replace(tokens, tower=replace(tower_of(tokens), cls=None))
    assert select("visionzip", without, 4).picks.shape == (1, 4)
    with pytest.raises(SelectionError, match="patch_only"):
        select("visionzip", without, 4, patch_only=False)
    with pytest.raises(SelectionError, match="no count of its own"):
        native("visionzip", tokens)
