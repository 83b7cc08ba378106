"""M-RoPE positions of kept tokens, compared with those of whole images."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.serving.unit.samples import served
from vllm_autoprune.serving.plan import FIELD, Choice, ItemPlan, Part
from vllm_autoprune.serving.served_state import PlanRules
from vllm_autoprune.serving.worker.mrope import (
    compute_input_positions,
    match_items,
    place_image_tokens,
    position_channels,
    unplaced_channels,
)
from vllm_autoprune.serving.worker.selection import FallbackReporter, PlanReader

IMAGE, TEXT = 9, 1


@dataclass(frozen=True)
class Place:
    offset: int
    length: int


@dataclass(frozen=True)
class Feature:
    """The part of vLLM's ``MultiModalFeatureSpec`` that is read."""

    mm_position: Place
    height: int
    width: int


def stock(ids: list[int], features: list[Any]) -> tuple[Tensor, int]:
    """Text one by one; an image's tokens by row and column; text goes on past the longer side."""
    positions, at, next_one = [], 0, 0
    for feature in sorted(features, key=lambda f: f.mm_position.offset):
        while at < feature.mm_position.offset:
            positions.append((next_one,) * 3)
            at, next_one = at + 1, next_one + 1
        assert feature.mm_position.length == feature.height * feature.width
        positions += [
            (next_one, next_one + y, next_one + x)
            for y in range(feature.height)
            for x in range(feature.width)
        ]
        at += feature.height * feature.width
        next_one += max(feature.height, feature.width)
    while at < len(ids):
        positions.append((next_one,) * 3)
        at, next_one = at + 1, next_one + 1
    return torch.tensor(positions).T, next_one - len(ids)


SHAPES = [[(4, 3)], [(3, 5)], [(6, 2), (2, 3)], [(2, 2), (5, 4), (1, 7)]]


def _prompt(shapes: list[tuple[int, int]], kept: int | None) -> tuple[list[int], list[Feature]]:
    """Text, then images of ``kept`` placeholders with two words between them, then text."""
    ids, features = [TEXT] * 3, []
    for height, width in shapes:
        length = height * width if kept is None else min(kept, height * width)
        features.append(Feature(Place(len(ids), length), height, width))
        ids += [IMAGE] * length + [TEXT] * 2
    return ids, features


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_a_pruned_prompt_has_a_gather_of_the_full_positions(
    shapes: list[tuple[int, int]], step: int
) -> None:
    source = torch.Generator().manual_seed(len(shapes))
    full_ids, full_features = _prompt(shapes, None)
    full, full_delta = stock(full_ids, full_features)
    ids, features = _prompt(shapes, 3)
    unpruned = {i: h * w for i, (h, w) in enumerate(shapes)}
    positions, delta = compute_input_positions(stock, ids, features, unpruned, {})
    assert delta + len(ids) == full_delta + len(full_ids), "decoding goes on at the same position"

    kept, channels = [], []
    for height, width in shapes:
        rows = torch.randperm(height * width, generator=source)[:3].sort().values
        kept.append(rows)
        channels.append(position_channels(height, width, torch.device("cpu"))[rows].bfloat16())
    survivors = []
    unread = iter(kept)
    starts = {f.mm_position.offset: f for f in full_features}
    inside = 0
    for at in range(len(full_ids)):
        if at in starts:
            survivors += (at + next(unread)).tolist()
            inside = starts[at].mm_position.length
        if inside:
            inside -= 1
        else:
            survivors.append(at)
    expected = full[:, survivors]
    # Chunked prefill; each chunk is computed twice, as after a preemption.
    for start in range(0, len(ids), step):
        now = [
            rows[max(0, start - f.mm_position.offset) : max(0, start + step - f.mm_position.offset)]
            for f, rows in zip(features, channels, strict=True)
        ]
        now = [rows for rows in now if len(rows)]
        for _ in range(2 if now else 0):
            positions = place_image_tokens(torch.tensor(ids), positions, now, IMAGE, start)
    assert torch.equal(positions, expected)


def test_deltas_belong_to_the_cores_of_their_image_in_order() -> None:
    def part(name: Part, key: int) -> ItemPlan:
        return ItemPlan(2, (key, key), part=name, core=2)

    plans = {
        0: part("core", 1),
        1: part("core", 2),
        2: part("core", 1),
        3: ItemPlan(4, (3, 3)),
        4: part("delta", 1),
        5: part("delta", 2),
        6: part("delta", 1),
    }
    assert match_items(plans) == {4: 0, 5: 1, 6: 2}


FORGED: list[list[tuple[Part, int]]] = [
    [("delta", 1)],
    [("delta", 1), ("core", 1)],
    [("core", 1), ("delta", 1), ("delta", 1)],
    [("core", 1), ("core", 1), ("delta", 2)],
    [("core", 1), ("whole", 1), ("delta", 1), ("delta", 2)],
]


def test_a_recall_stands_in_the_last_place_of_its_image() -> None:
    def recall(key: int) -> ItemPlan:
        return ItemPlan(2, (key, key), part="recall", earlier=(Choice(4),))

    def part(kind: Part, key: int) -> ItemPlan:
        return ItemPlan(2, (key, key), part=kind, core=2 if kind != "whole" else 0)

    plans = {
        0: part("core", 1),
        1: part("delta", 1),
        2: part("whole", 2),
        3: recall(1),
        4: recall(2),
        5: part("whole", 1),
        6: recall(1),
        7: recall(3),
    }
    assert match_items(plans) == {1: 0, 3: 0, 4: 2, 6: 5}


@pytest.mark.parametrize("parts", FORGED)
def test_forged_parts_have_a_position_for_every_token(parts: list[tuple[Part, int]]) -> None:
    """Without its core, or as the second of one core, a delta stands as an image of its own."""
    plans = {i: ItemPlan(2, (k, k), part=part, core=2) for i, (part, k) in enumerate(parts)}
    cores = match_items(plans)
    assert len(set(cores.values())) == len(cores)
    assert all(plans[core].part == "core" and core < delta for delta, core in cores.items())
    ids, features = _prompt([(4, 3)] * len(parts), 2)
    unpruned = dict.fromkeys(plans, 12)
    positions, delta = compute_input_positions(stock, ids, features, unpruned, cores)
    assert positions.shape == (3, len(ids))
    start, last = int(positions[0, 0]), int(positions[0, -1])
    assert 0 <= start < last
    own_images = len(parts) - len(cores)
    assert last + 1 - len(ids) == delta
    assert last + 1 == 3 + 2 * len(parts) + 4 * own_images
    rows = [position_channels(4, 3, torch.device("cpu"))[:2] for _ in parts]
    placed = place_image_tokens(torch.tensor(ids), positions, rows, IMAGE, 0)
    assert placed.shape == positions.shape
    assert torch.equal(
        placed[:, torch.tensor(ids) == TEXT], positions[:, torch.tensor(ids) == TEXT]
    )


def test_image_token_in_user_text_keeps_its_position() -> None:
    """vLLM takes the first ones for images, so what is typed comes after all kept tokens."""
    image = 9
    ids = torch.tensor([5, image, image, 7, image, image, 6])
    positions = torch.arange(7).expand(3, -1)
    kept = position_channels(4, 4, torch.device("cpu"))[[2, 13]]
    placed = place_image_tokens(ids, positions, [kept], image, 0)
    assert placed[:, 3:].tolist() == positions[:, 3:].tolist()
    assert placed[:, 1].tolist() == [1, 1, 3]


def test_frames_of_videos_with_the_images_token_stay_where_they_are() -> None:
    """GLM-4.xV: the rows of a video before an image take its tokens' turn, and move nothing."""
    ids = torch.tensor([5, 9, 9, 7, 9, 9, 6])
    positions = torch.arange(7).expand(3, -1)
    video = unplaced_channels(torch.zeros(2, 16, dtype=torch.bfloat16))
    kept = position_channels(4, 4, torch.device("cpu"))[[2, 13]].bfloat16()
    placed = place_image_tokens(ids, positions, [video, kept], 9, 0)
    assert placed[:, :4].tolist() == positions[:, :4].tolist()
    assert placed[:, 4:6].T.tolist() == [[4, 4, 6], [5, 8, 6]]
    assert placed[:, 6].tolist() == [6, 6, 6]


# ---- payloads that the worker drops (vLLM 0.33) ----

START, END = 7, 8
HEIGHT, WIDTH, KEPT, ROW = 4, 6, 5, 16


def _item() -> Any:
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem
    from vllm.multimodal.inputs import MultiModalKwargsItem as Item

    field = MultiModalBatchedField(keep_on_cpu=True)
    plan = ItemPlan(KEPT, (1, 2), tokens=HEIGHT * WIDTH)
    grid = torch.tensor([1, 2 * HEIGHT, 2 * WIDTH])
    parts = {FIELD: plan.encode(), "image_grid_thw": grid}
    return Item({name: MultiModalFieldElem(data=part, field=field) for name, part in parts.items()})


def _model() -> Any:
    """A Qwen3-VL without weights, as far as positions and plans go."""
    from vllm_autoprune.serving.models.qwen import AutopruneQwen3VLForConditionalGeneration as Model
    from vllm_autoprune.serving.models.qwen import QwenVision

    model = Model.__new__(Model)
    nn.Module.__init__(model)
    model.config = SimpleNamespace(
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        vision_start_token_id=START,
        vision_end_token_id=END,
        vision_config=SimpleNamespace(spatial_merge_size=2),
    )
    vision = QwenVision.__new__(QwenVision)
    vision.row_width = ROW
    model.autoprune = vision
    rules, reporter = PlanRules(served(), 100), FallbackReporter()
    model.autoprune_plan_reader = PlanReader(rules, reporter, torch.device("cpu"))
    return model


@pytest.mark.compat
def test_a_dropped_payload_is_asked_for_nothing() -> None:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

    if not hasattr(EncoderCache, "update_encoder_inputs"):
        pytest.skip("vLLM 0.32 keeps payloads: `make test-next` runs this against 0.33")
    model, item = _model(), _item()
    place = PlaceholderRange(offset=3, length=KEPT)
    feature = MultiModalFeatureSpec(item, "image", "identity", place)
    cache = EncoderCache()
    runner: Any = SimpleNamespace(encoder_cache=cache)
    ids = [TEXT, TEXT, START, *[IMAGE] * KEPT, END, TEXT]

    # As GPUModelRunner: a request is added, and its positions are computed, before any update.
    cache.add_request("request", [feature])
    positions, delta = model.get_mrope_input_positions(ids, cache.mm_features["request"])
    assert delta == 3 + max(HEIGHT, WIDTH) + 2 - len(ids)
    _, [(_, sent)] = EncoderRunner.prepare_mm_inputs(runner, {"request": [0]})
    (plan,) = model.autoprune_plan_reader.read([sent[FIELD].data])
    assert (plan.budget, plan.tokens) == (KEPT, HEIGHT * WIDTH)

    # Later steps place the rows of the image without its payload.
    cache.update_encoder_inputs("request", {0: None})
    assert cache.mm_features["request"][0].data is None
    assert EncoderRunner.prepare_mm_inputs(runner, {"request": [0]}) == ([], [])
    channels = position_channels(HEIGHT, WIDTH, torch.device("cpu"))[:KEPT]
    rows = [torch.cat([torch.zeros(KEPT, ROW), channels], dim=1)]
    _, placed, _ = model.recompute_mrope_positions(torch.tensor(ids), rows, positions, 0)
    of_image: Tensor = placed[:, 3 : 3 + KEPT]
    assert of_image.tolist() == [[3] * KEPT, [3] * KEPT, [3, 4, 5, 6, 7]]

    # A rollback restores it for encoding anew; the engine core's own copy was never changed.
    cache.update_encoder_inputs("request", {0: feature.data})
    _, [(_, again)] = EncoderRunner.prepare_mm_inputs(runner, {"request": [0]})
    assert again is sent
