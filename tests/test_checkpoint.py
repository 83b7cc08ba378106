"""LLaVA's vision side with transformers, compared with direct calls of the model."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks.yardsticks.examples import CLIP, LLAVA, draw_examples
from vllm_autoprune.backbones import BACKBONE_SHAPES, BackboneShape
from vllm_autoprune.checkpoint import LlavaVision, count_published
from vllm_autoprune.errors import ConfigError, UnsupportedModelError
from vllm_autoprune.selftest.backbones import TINY_MODELS, write_processor

EXAMPLE = draw_examples("test", 1)[0]
SCENE = Image.open(io.BytesIO(EXAMPLE.png)).convert("RGB")


@pytest.fixture(scope="module")
def vision() -> LlavaVision:
    return LlavaVision(LLAVA, CLIP)


def test_attention_and_keys_are_those_of_the_layer_that_is_read_and_of_the_next(
    vision: LlavaVision,
) -> None:
    tokens = vision.encode(SCENE, EXAMPLE.question)
    pixels = vision.processor.image_processor(SCENE, return_tensors="pt")[
        "pixel_values"
    ]
    tower = vision.model.model.vision_tower
    states = tokens.require_tower()
    keys: list[torch.Tensor] = []
    for layer in (-2, -1):
        attention = tower.encoder.layers[layer].self_attn
        attention.k_proj.register_forward_hook(
            lambda *call: keys.append(call[-1].float()[:, 1:])
        )
    with torch.no_grad():
        run = tower(
            pixels.to(torch.bfloat16), output_hidden_states=True, output_attentions=True
        )
    attention = run.attentions[-2][:, :, 0, 1:].float().mean(dim=1)
    assert tokens.cls_attention is not None and states.cls is not None
    # The tower's own probabilities were rounded to bfloat16.
    torch.testing.assert_close(tokens.cls_attention, attention, atol=2e-3, rtol=2e-2)
    hidden = run.hidden_states[-2]
    assert torch.equal(states.patches, hidden[:, 1:]) and torch.equal(
        states.cls, hidden[:, :1]
    )
    assert torch.equal(tokens.require_encoder(), states.patches)
    assert torch.equal(states.project(states.patches), tokens.features)
    heads = tower.config.num_attention_heads
    torch.testing.assert_close(
        states.keys, keys[0].unflatten(-1, (heads, -1)).mean(dim=2)
    )
    following = states.next_layer
    assert following is not None and following.attention.shape == (1, 144)
    torch.testing.assert_close(following.keys, keys[1])
    assert 0 < float(following.attention.sum()) < 1  # [CLS] itself takes the rest


def test_words_are_those_that_carry_content(vision: LlavaVision) -> None:
    words = vision.encode(SCENE, "what is the red circle").require_words()
    tokenizer = vision.processor.tokenizer
    ids = [
        tokenizer(word, add_special_tokens=False)["input_ids"]
        for word in ("red", "circle")
    ]
    rows = vision.model.get_input_embeddings()(torch.tensor(ids[0] + ids[1]))
    assert torch.equal(words.embeddings[0], rows)
    assert words.used.tolist() == [[True] * len(rows)]
    assert vision.encode(SCENE, "").require_words().used.shape == (1, 0)


def test_the_language_models_layers_are_those_that_transformers_runs() -> None:
    vision = LlavaVision(LLAVA, CLIP)
    vision.model.float()  # in bfloat16 two kernels differ by more than a wrong layer would show
    tokens = vision.encode(SCENE, "the red circle")
    prefix = tokens.require_language()
    language = vision.model.model.language_model
    words = vision.processor.tokenizer("the red circle", add_special_tokens=False)[
        "input_ids"
    ]
    assert (prefix.start, prefix.layers) == (1, len(language.layers))
    assert prefix.text.tolist() == [[True] * len(words)]
    embeddings = prefix.embeddings()
    assert embeddings.shape[1] == 1 + 144 + len(words)
    assert torch.equal(embeddings[:, 1:145], tokens.features)
    with torch.no_grad():
        run = language(
            inputs_embeds=embeddings, output_attentions=True, output_hidden_states=True
        )
    attention = prefix.attention(2)
    states = prefix.states(1)
    torch.testing.assert_close(
        attention, run.attentions[2][:, :, 145:], atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(states, run.hidden_states[2], atol=1e-4, rtol=1e-4)
    assert vision.encode(SCENE, "").require_language().text.shape == (1, 1)


def test_relevance_has_the_towers_sign_or_the_language_models(
    vision: LlavaVision,
) -> None:
    with_tower = vision.encode(SCENE, "the red circle").instruction
    without = LlavaVision(LLAVA).encode(SCENE, "the red circle")
    assert with_tower is not None and with_tower.patches.shape[2] == 128
    assert without.instruction is not None
    assert without.instruction.sign == 1
    assert without.instruction.patches is without.features


@pytest.mark.parametrize(
    "config", ['{"architectures": ["CLIPModel"]}', "[1]", "{}", "{", ""]
)
def test_unsupported_checkpoints_are_refused(config: str, tmp_path: Path) -> None:
    if config:
        (tmp_path / "config.json").write_text(config)
    error = UnsupportedModelError if "CLIP" in config else ConfigError
    with pytest.raises(error, match=r"is no LlavaFor|has no config\.json"):
        LlavaVision(tmp_path)


def make_ovis_processor(folder: Path, shape: BackboneShape) -> Any:
    """The class that vLLM has for Ovis, of which transformers has the parts alone."""
    from transformers import AutoImageProcessor, AutoTokenizer
    from vllm.transformers_utils.processors.ovis2_5 import Ovis2_5Processor

    processor = Ovis2_5Processor(
        image_processor=AutoImageProcessor.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        patch_size=shape.geometry["vision"]["patch_size"],
    )
    return processor


def process(shape: BackboneShape, size: tuple[int, int], folder: Path) -> int:
    """Number of image tokens that transformers' processor makes of an image of a backbone."""
    from transformers import AutoProcessor

    # Without the configuration of the publisher's own code, which transformers cannot read.
    geometry = {part: v for part, v in shape.geometry.items() if part != "published"}
    write_processor(shape.family, folder, geometry)
    processor = AutoProcessor.from_pretrained(folder)
    marks = 0
    if shape.family.startswith("ovis"):
        processor = make_ovis_processor(folder, shape)
        marks = 2  # the rows that begin and end an image have the id of its tokens
    text = TINY_MODELS[shape.family]["tokens"][0]
    ids = processor(images=[Image.new("RGB", size)], text=[text])["input_ids"][0]
    # The image's token is the one that is repeated; few others stand around or between.
    ((_, count),) = Counter(map(int, ids)).most_common(1)
    return count - marks


SIZES = {
    "portrait": (600, 1200),
    "tiny": (32, 32),
    "huge": (5000, 4000),
    "panorama": (4000, 400),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKBONE_SHAPES)
def test_an_image_has_the_tokens_that_transformers_makes_of_it(
    name: str, tmp_path: Path
) -> None:
    shape = BACKBONE_SHAPES[name]
    counted = {
        kind: count_published(shape, *size).tokens for kind, size in SIZES.items()
    }
    expected = dict.fromkeys(SIZES, shape.tokens)
    if shape.family in TINY_MODELS:  # LLaVA-1.5 makes every image as large
        expected = {
            kind: process(shape, size, tmp_path / kind) for kind, size in SIZES.items()
        }
    assert counted == expected
