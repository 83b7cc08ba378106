"""The baseline does what the published code does: golden cases of CDPruner, and ours beside it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ops import ours, published
from benchmarks.ops.images import Images, Size, make
from tests.golden.case import load, names

SOUND = [
    name
    for name in names("cdpruner")
    if load(name).recipe["stable_order"] and not load(name).recipe["note"]
]


@pytest.mark.parametrize("name", SOUND)
def test_it_picks_what_the_published_code_picked(name: str) -> None:
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


@pytest.mark.parametrize("of", [Size(64, 1, 3, 16), Size(36, 5, 2, 30), Size(144, 1, 1, 24)])
def test_ours_picks_the_same_tokens_of_the_images_that_are_measured(of: Size) -> None:
    images = make(of, dtype=torch.float32)
    count = of.kept // of.tiles
    theirs = published.select(images.features, images.patches, images.text, of.tiles, count)
    offset = torch.arange(of.tiles).repeat(of.batch)[:, None] * of.per_tile
    found = ours.select(ours.policy(of.kept, exchange=False), of, images)
    wanted = (theirs + offset).reshape(of.batch, -1)
    assert found.sort(dim=1).values.tolist() == wanted.tolist()


def test_images_are_of_the_size_asked_for() -> None:
    images: Images = make(Size(16, 5, 2, 10))
    assert images.features.shape == (2, 80, 4096) and images.features.dtype == torch.bfloat16
    assert images.patches.shape == (2, 80, 768) and images.cls_attention.shape == (2, 80)
