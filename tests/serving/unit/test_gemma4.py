"""Gemma 4 without an engine: its tower's pooler and attention, counts and identities."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.gemma4 import Gemma4VisionConfig, Gemma4VisionModel
from vllm.model_executor.models.gemma4_mm import Gemma4ForConditionalGeneration as Stock
from vllm.multimodal.processing import ProcessorInputs
from vllm.multimodal.processing.context import TimingContext

from tests.serving.engine import built
from tests.serving.unit.samples import served
from tests.serving.unit.sender import Sender, picture
from vllm_autoprune.selftest.backbones import TINY_MODELS
from vllm_autoprune.serving.models.gemma4 import _Gemma4Vision
from vllm_autoprune.serving.plan import FIELD, REQUEST_FIELD, ItemPlan

pytestmark = pytest.mark.compat

SIDE = 3
"""Patches on each side of a token."""


@pytest.fixture
def vision(monkeypatch: pytest.MonkeyPatch) -> _Gemma4Vision:
    """The vision side over transformers' own tower, under a state that reads all of it."""
    monkeypatch.setattr(
        torch.accelerator, "get_memory_info", lambda *_: (1 << 30, 1 << 30)
    )
    torch.manual_seed(0)
    config = Gemma4VisionConfig(
        **TINY_MODELS["gemma4"]["vision"], attn_implementation="eager"
    )
    model: Any = SimpleNamespace(
        vision_tower=Gemma4VisionModel(config).eval(),
        config=SimpleNamespace(vision_config=config),
        model_dtype=torch.float32,
        embed_vision=lambda inputs_embeds: inputs_embeds,
        _enable_mm_lora=False,
        _encoder_chunk=lambda *_: 2,
    )
    model._parse_and_validate_image_input = partial(
        Stock._parse_and_validate_image_input, model
    )
    model._process_image_input = partial(Stock._process_image_input, model)
    return _Gemma4Vision(model, served({"/rank_at": "merger_in"}))


@torch.no_grad()
def test_what_policies_read_is_what_transformers_computes(
    vision: _Gemma4Vision,
) -> None:
    """Of images of any aspect and of several numbers of patches, whatever is beside them."""

    def make_image(height: int, width: int, padded: int) -> dict[str, torch.Tensor]:
        """Patches of an image of so many tokens, padded as the processor pads them."""
        rows, columns = torch.meshgrid(
            *map(torch.arange, (height * SIDE, width * SIDE)), indexing="ij"
        )
        places = torch.stack([columns, rows], dim=2).flatten(0, 1)
        pixels = torch.rand(
            len(places), 48, generator=torch.Generator().manual_seed(width)
        )
        missing = padded * SIDE**2 - len(places)
        pad = torch.nn.functional.pad
        return {
            "pixel_values": pad(pixels, (0, 0, 0, missing)),
            "pixel_position_ids": pad(places, (0, 0, 0, missing), value=-1),
        }

    sizes = [(5, 7, 40), (2, 3, 20), (7, 4, 40), (1, 40, 40)]
    inputs = [make_image(*size) for size in sizes]
    images = vision.images(
        {name: [image[name] for image in inputs] for name in inputs[0]}
    )
    assert [image.tokens for image in images] == [
        height * width for height, width, _ in sizes
    ]
    tower = vision._model.vision_tower
    side = SIDE
    together = vision.encode([image.inputs for image in images])
    for (height, width, _), image, features in zip(
        sizes, images, together, strict=True
    ):
        (region,) = features.regions
        (alone,) = vision.encode([image.inputs])[0].regions
        assert (region.grid.height, region.grid.width, region.grid.tiles) == (
            height,
            width,
            1,
        )
        count = height * side * width * side
        pixels, places = (
            part[None] for name, part in image.inputs.items() if name != "grid"
        )
        entering: dict[str, torch.Tensor] = {}
        handle = tower.pooler.register_forward_pre_hook(
            lambda _, args, named, seen=entering: seen.update(named), with_kwargs=True
        )
        output = tower(pixels, places, output_attentions=True)
        handle.remove()
        cells = entering["hidden_states"][0, :count].view(height, side, width, side, -1)
        cells = cells.transpose(1, 2).reshape(height * width, side**2, -1)
        attention = output.attentions[-1][0, :, :count, :count].mean(dim=(0, 1))
        attention = attention.view(height, side, width, side).mean(dim=(1, 3)).flatten()
        norms = torch.stack([cells.abs().sum(dim=2), cells.norm(dim=2)], dim=2).mean(
            dim=1
        )
        for expected, part in (
            (output.last_hidden_state, region.projected),
            (cells.mean(dim=1), region.signals["encoder"]),
            (norms, region.signals["merger_norms"]),
            (attention, region.signals["cls_attention"]),
            *((alone.signals[name], part) for name, part in region.signals.items()),
        ):
            torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)


# ---- requests ----

N = {70: 56, 140: 132, 280: 255, 1120: 1085}
"""Tokens of a picture of 330 x 300 pixels by ``max_soft_tokens``."""


def test_a_request_may_encode_more_tokens_and_keep_as_many() -> None:
    """N follows ``max_soft_tokens`` of the request, K is exact, and no two of them share a cache.

    The kept tokens are one run of embeddings, which is what vLLM makes a range of attention of.
    """
    sender = Sender(built("gemma4"), 40, placeholder="")
    seen = set()
    for soft_tokens, expected in N.items():
        for kwargs in (
            {"max_soft_tokens": soft_tokens},
            {"images_kwargs": {"max_soft_tokens": soft_tokens}},
        ):
            inputs = ProcessorInputs(
                sender.info.get_tokenizer().encode("user <image_soft_token> what"),
                sender.info.parse_mm_data({"image": [picture(330, 300)]}),
                hf_processor_mm_kwargs={
                    **kwargs,
                    REQUEST_FIELD: {"instructions": ["what"]},
                },
            )
            processed = sender._processor.apply(inputs, TimingContext(enabled=False))
            (placeholder,) = processed["mm_placeholders"]["image"]
            (item,) = processed["mm_kwargs"]["image"]
            plan = ItemPlan.decode(item[FIELD].data)
            assert (plan.tokens, plan.budget, placeholder.length) == (expected, 40, 42)
            assert placeholder.extract_embeds_range() == [
                (placeholder.offset + 1, placeholder.offset + 40)
            ]
            assert len(item["pixel_values"].data) == soft_tokens * SIDE**2
            seen.add(processed["mm_hashes"]["image"][0])
    assert len(seen) == 2 * len(N)
