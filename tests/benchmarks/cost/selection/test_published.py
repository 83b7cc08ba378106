"""The baseline reproduces golden cases of CDPruner, and our selection equals the baseline."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cost.selection import ours, published
from benchmarks.cost.selection.images import Images, Size, draw_images
from tests.golden.case import load, names

SOUND = [
    name
    for name in names("cdpruner")
    if load(name).recipe["stable_order"] and not load(name).recipe["note"]
]


@pytest.mark.parametrize("name", SOUND)
def test_the_baseline_reproduces_golden_cases(name: str) -> None:
    case = load(name)
    features = case.inputs["image_features"].to(case.dtype)
    patches, text = case.inputs["image_embeds"], case.inputs["text_embeds"]
    tiles, tokens, width = features.shape
    picks = published.select(
        features.view(1, tiles * tokens, width),
        patches.reshape(1, tiles * tokens, -1),
        text[None],
        tiles,
        case.recipe["K"],
    )
    expected = torch.from_numpy(case.expected["order"]).long()
    assert picks.tolist() == expected.sort(dim=1).values.tolist()


@pytest.mark.parametrize("size", [Size(64, 1, 3, 16), Size(36, 5, 2, 30), Size(144, 1, 1, 24)])
def test_our_selection_equals_the_baseline(size: Size) -> None:
    images = draw_images(size, dtype=torch.float32)
    count = size.kept // size.tiles
    theirs = published.select(images.features, images.patches, images.text, size.tiles, count)
    offset = torch.arange(size.tiles).repeat(size.batch)[:, None] * size.per_tile
    picks = ours.select(ours.build_policy(size.kept, exchange=False), size, images)
    expected = (theirs + offset).reshape(size.batch, -1)
    assert picks.sort(dim=1).values.tolist() == expected.tolist()


def test_drawn_images_have_the_requested_size() -> None:
    images: Images = draw_images(Size(16, 5, 2, 10))
    assert images.features.shape == (2, 80, 4096) and images.features.dtype == torch.bfloat16
    assert images.patches.shape == (2, 80, 768) and images.cls_attention.shape == (2, 80)
