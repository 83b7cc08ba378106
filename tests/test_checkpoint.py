"""LLaVA's vision side with transformers, compared with direct calls of the model."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks.yardsticks.examples import CLIP, LLAVA, draw_examples, png
from tests.tpdsl.samples import state
from vllm_autoprune import materialize, refine
from vllm_autoprune.checkpoint import LlavaVision, open_vision
from vllm_autoprune.errors import ConfigError, UnsupportedModelError
from vllm_autoprune.explain import trace_images
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

EXAMPLE = draw_examples("test", 1)[0]


@pytest.fixture(scope="module")
def vision() -> LlavaVision:
    return open_vision(LLAVA, CLIP)


@pytest.fixture(scope="module")
def scene() -> Image.Image:
    return Image.open(io.BytesIO(png(EXAMPLE.image))).convert("RGB")


def test_attention_and_keys_are_those_of_the_layer_that_is_read_and_of_the_next(
    vision: LlavaVision, scene: Image.Image
) -> None:
    tokens = vision.encode(scene, EXAMPLE.question)
    pixels = vision.processor.image_processor(scene, return_tensors="pt")["pixel_values"]
    tower, states = vision.model.model.vision_tower, tokens.require_tower()
    with torch.no_grad():
        run = tower(pixels.to(torch.bfloat16), output_hidden_states=True, output_attentions=True)

        def keys_of(layer: int) -> torch.Tensor:
            block = tower.encoder.layers[layer]
            keys = block.self_attn.k_proj(block.layer_norm1(run.hidden_states[layer - 1]))
            return keys.float()[:, 1:]

        keys, following_keys = keys_of(-2), keys_of(-1)
    attention = run.attentions[-2][:, :, 0, 1:].float().mean(dim=1)
    assert tokens.cls_attention is not None and states.cls is not None
    # The tower's own probabilities were rounded to bfloat16.
    torch.testing.assert_close(tokens.cls_attention, attention, atol=2e-3, rtol=2e-2)
    assert torch.equal(states.patches, run.hidden_states[-2][:, 1:])
    assert torch.equal(states.cls, run.hidden_states[-2][:, :1])
    assert torch.equal(states.project(states.patches), tokens.features)
    heads = tower.config.num_attention_heads
    torch.testing.assert_close(states.keys, keys.unflatten(-1, (heads, -1)).mean(dim=2))
    following = states.next_layer
    assert following is not None
    torch.testing.assert_close(following.keys, following_keys)
    assert following.attention.shape == (1, 144)
    assert 0 < float(following.attention.sum()) < 1  # [CLS] itself takes the rest


def test_words_and_tokens_before_the_projector(vision: LlavaVision, scene: Image.Image) -> None:
    tokens = vision.encode(scene, "what is the red circle")
    assert torch.equal(tokens.require_encoder(), tokens.require_tower().patches)
    words = tokens.require_words()
    tokenizer = vision.processor.tokenizer
    ids = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in ("red", "circle")]
    expected = vision.model.get_input_embeddings()(torch.tensor([ids[0] + ids[1]]))
    assert torch.equal(words.embeddings, expected)
    assert words.used.tolist() == [[True] * expected.shape[1]]
    assert vision.encode(scene, "").require_words().used.shape == (1, 0)


def test_the_language_models_layers_are_those_that_transformers_runs(scene: Image.Image) -> None:
    vision = open_vision(LLAVA, CLIP)
    vision.model.float()  # in bfloat16 two kernels differ by more than a wrong layer would show
    tokens = vision.encode(scene, "the red circle")
    prefix = tokens.require_language()
    language = vision.model.model.language_model
    length = prefix.embeddings().shape[1]
    assert (prefix.start, prefix.layers) == (1, len(language.layers))
    words = vision.processor.tokenizer("the red circle", add_special_tokens=False)["input_ids"]
    assert prefix.text.tolist() == [[True] * len(words)] and length == 1 + 144 + len(words)
    assert torch.equal(prefix.embeddings()[:, 1:145], tokens.features)
    with torch.no_grad():
        run = language(
            inputs_embeds=prefix.embeddings(), output_attentions=True, output_hidden_states=True
        )
    attention, states = prefix.attention(2), prefix.states(1)
    torch.testing.assert_close(attention, run.attentions[2][:, :, 145:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states, run.hidden_states[2], atol=1e-4, rtol=1e-4)
    assert vision.encode(scene, "").require_language().text.shape == (1, 1)


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_inputs_suffice_for_every_base_policy(
    vision: LlavaVision, scene: Image.Image, name: str
) -> None:
    alone = state({"/base_policy": {"name": name}, "/budget/atom": "fixed_budget@16"})
    tokens = vision.encode(scene, EXAMPLE.question)
    policy = materialize(alone)
    (image_trace,) = trace_images(policy, tokens, refine(policy, tokens))
    assert image_trace.fallback == "none"
    assert len(image_trace.kept) + image_trace.extra == 16


def test_relevance_has_the_towers_sign_or_the_language_models(scene: Image.Image) -> None:
    with_tower = open_vision(LLAVA, CLIP).encode(scene, "the red circle").instruction
    without = open_vision(LLAVA).encode(scene, "the red circle")
    assert with_tower is not None and with_tower.patches.shape[2] == 128
    assert without.instruction is not None and without.instruction.sign == 1
    assert without.instruction.patches is without.features


def test_unsupported_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    for checkpoint, message in ((tmp_path, "unknown"), (CLIP, "CLIPModel")):
        with pytest.raises(UnsupportedModelError, match=message):
            open_vision(checkpoint)
    (tmp_path / "config.json").write_text("{")
    for checkpoint, message in ((tmp_path, "not JSON"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(ConfigError, match=message):
            open_vision(checkpoint)
