"""M-RoPE positions of kept tokens, compared with those of whole images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_autoprune.serving.models.qwen import (
    _compute_input_positions,
    _match_items,
    _place_image_tokens,
    _position_channels,
)
from vllm_autoprune.serving.plan import Choice, ItemPlan, Part

IMAGE, TEXT, CPU = 9, 1, torch.device("cpu")

Shapes = Sequence[tuple[int, int]]


def make_prompt(shapes: Shapes, budget: int = 1000) -> tuple[list[int], Any]:
    """Text, then images of at most K placeholders with two words between them, then text."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    ids, features = [TEXT] * 3, []
    for height, width in shapes:
        place = PlaceholderRange(len(ids), min(budget, height * width))
        features.append(MultiModalFeatureSpec(None, "image", f"{height} x {width}", place))
        ids += [IMAGE] * place.length + [TEXT] * 2
    return ids, features


def stock(ids: list[int], features: list[Any]) -> tuple[Tensor, int]:
    """Text one by one; an image's tokens by row and column; text goes on past the longer side."""
    positions, following = list[tuple[int, int, int]](), 0
    for feature in sorted(features, key=lambda f: f.mm_position.offset):
        height, width = map(int, feature.identifier.split(" x "))
        texts = feature.mm_position.offset - len(positions)
        positions += [(following + i,) * 3 for i in range(texts)]
        following += texts
        assert feature.mm_position.length == height * width
        for cell in range(height * width):
            row, column = divmod(cell, width)
            positions.append((following, following + row, following + column))
        following += max(height, width)
    texts = len(ids) - len(positions)
    positions += [(following + i,) * 3 for i in range(texts)]
    return torch.tensor(positions).T, following + texts - len(ids)


@pytest.mark.parametrize(
    "shapes", [[(4, 3)], [(3, 5)], [(6, 2), (2, 3)], [(2, 2), (5, 4), (1, 7)]], ids=str
)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_a_pruned_prompt_has_a_gather_of_the_full_positions(shapes: Shapes, step: int) -> None:
    source = torch.Generator().manual_seed(len(shapes))
    full_ids, full_features = make_prompt(shapes)
    full, full_delta = stock(full_ids, full_features)
    ids, features = make_prompt(shapes, 3)
    unpruned = {i: h * w for i, (h, w) in enumerate(shapes)}
    positions, delta = _compute_input_positions(stock, ids, features, unpruned, {})
    assert delta + len(ids) == full_delta + len(full_ids), "decoding goes on at the same position"

    dropped, channels = set[int](), []
    for (height, width), feature in zip(shapes, full_features, strict=True):
        cells = torch.randperm(height * width, generator=source)[:3].sort().values
        channels.append(_position_channels(height, width, CPU)[cells].bfloat16())
        missing = {*range(height * width)} - {*cells.tolist()}
        dropped |= {feature.mm_position.offset + token for token in missing}
    # Chunked prefill; each chunk is computed twice, as after a preemption.
    for start in range(0, len(ids), step):
        rows = []
        for feature, of_image in zip(features, channels, strict=True):
            begin = start - feature.mm_position.offset
            rows.append(of_image[max(0, begin) : max(0, begin + step)])
        rows = [part for part in rows if len(part)]
        for _ in range(2 if rows else 0):
            positions = _place_image_tokens(torch.tensor(ids), positions, rows, IMAGE, start)
    assert torch.equal(positions, full[:, [i for i in range(len(full_ids)) if i not in dropped]])


def plans_of(items: Sequence[tuple[Part, int]]) -> dict[int, ItemPlan]:
    return {
        i: ItemPlan(
            2,
            (key, key),
            part=part,
            core=2 if part in ("core", "delta") else 0,
            earlier=(Choice(4),) if part == "recall" else (),
        )
        for i, (part, key) in enumerate(items)
    }


def test_deltas_and_recalls_stand_where_their_image_does() -> None:
    """Deltas in the order of the cores of their image; a recall in the last place of its image."""
    pairs: list[tuple[Part, int]] = [("core", 1), ("core", 2), ("core", 1), ("whole", 3)]
    pairs += [("delta", 1), ("delta", 2), ("delta", 1)]
    assert _match_items(plans_of(pairs)) == {4: 0, 5: 1, 6: 2}
    turns: list[tuple[Part, int]] = [("core", 1), ("delta", 1), ("whole", 2), ("recall", 1)]
    turns += [("recall", 2), ("whole", 1), ("recall", 1), ("recall", 3)]
    assert _match_items(plans_of(turns)) == {1: 0, 3: 0, 4: 2, 6: 5}


FORGED: dict[str, list[tuple[Part, int]]] = {
    "no core": [("delta", 1)],
    "before its core": [("delta", 1), ("core", 1)],
    "second of one core": [("core", 1), ("delta", 1), ("delta", 1)],
    "of another image": [("core", 1), ("core", 1), ("delta", 2)],
    "mixed": [("core", 1), ("whole", 1), ("delta", 1), ("delta", 2)],
}


@pytest.mark.parametrize("parts", FORGED.values(), ids=FORGED)
def test_forged_parts_have_a_position_for_every_token(parts: Sequence[tuple[Part, int]]) -> None:
    """Without its core, or as the second of one core, a delta stands as an image of its own."""
    plans = plans_of(parts)
    cores = _match_items(plans)
    assert len(set(cores.values())) == len(cores)
    assert all(plans[core].part == "core" and core < delta for delta, core in cores.items())
    ids, features = make_prompt([(4, 3)] * len(parts), 2)
    unpruned = dict.fromkeys(plans, 12)
    positions, delta = _compute_input_positions(stock, ids, features, unpruned, cores)
    assert positions.shape == (3, len(ids))
    last = int(positions[0, -1])
    assert last + 1 - len(ids) == delta
    assert last + 1 == 3 + 2 * len(parts) + 4 * (len(parts) - len(cores))
    rows = [_position_channels(4, 3, CPU)[:2] for _ in parts]
    placed = _place_image_tokens(torch.tensor(ids), positions, rows, IMAGE, 0)
    text = torch.tensor(ids) == TEXT
    assert torch.equal(placed[:, text], positions[:, text])


@pytest.mark.parametrize("video", [0, 2])
def test_tokens_without_a_row_of_an_image_stay_where_they_are(video: int) -> None:
    """Image tokens in user text, which come after all kept ones; frames of GLM's videos before."""
    ids = torch.tensor([5, IMAGE, IMAGE, 7, IMAGE, IMAGE, 6])
    positions = torch.arange(7).expand(3, -1)
    frames = torch.full((video, 4), -1.0)
    rows = _position_channels(4, 4, CPU)[[2, 13]].bfloat16()
    placed = _place_image_tokens(ids, positions, [frames, rows], IMAGE, 0).T.tolist()
    start = 4 if video else 1
    moved = [[start, start, start + 2], [start + 1, start + 1 + 3, start + 1 + 1]]
    expected = [[at] * 3 for at in range(7)]
    expected[start : start + 2] = moved
    assert placed == expected
