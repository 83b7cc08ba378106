"""Plans are read before the worker drops the payload of an image (vLLM 0.33, Model Runner V2)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.serving.unit.samples import served
from vllm_autoprune.serving.shared.plan import FIELD, ItemPlan
from vllm_autoprune.serving.shared.plan_rules import PlanRules
from vllm_autoprune.serving.worker.fallbacks import FallbackReporter
from vllm_autoprune.serving.worker.mrope import position_channels
from vllm_autoprune.serving.worker.plan_reader import PlanReader

IMAGE, START, END, TEXT = 9, 7, 8, 1
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
    from vllm_autoprune.serving.models.qwen_vision import QwenVision
    from vllm_autoprune.serving.models.qwen_vl import (
        AutopruneQwen3VLForConditionalGeneration as Model,
    )

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
    whole: Tensor = placed[:, 3 : 3 + KEPT]
    assert whole.tolist() == [[3] * KEPT, [3] * KEPT, [3, 4, 5, 6, 7]]

    # A rollback restores it for encoding anew; the engine core's own copy was never changed.
    cache.update_encoder_inputs("request", {0: feature.data})
    _, [(_, again)] = EncoderRunner.prepare_mm_inputs(runner, {"request": [0]})
    assert again is sent
