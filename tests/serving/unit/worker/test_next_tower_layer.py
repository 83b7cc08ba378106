from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.serving.unit.samples import clip_config
from vllm_autoprune import ConfigError
from vllm_autoprune.serving.worker.next_tower_layer import NAMES, NextTowerLayer

CONFIG = clip_config().vision_config  # three layers; the model reads what the second one gives
NEXT = 2
LIKE = torch.zeros(1)
PREFIXES = (
    "vision_tower.vision_model.encoder.layers.",
    "model.vision_tower.vision_model.encoder.layers.",
    "model.vision_tower.encoder.layers.",
)


@pytest.fixture(scope="module")
def tower() -> Any:
    """A CLIP tower of transformers whose weights are all random."""
    from transformers import CLIPVisionModel

    torch.manual_seed(1)
    model = CLIPVisionModel._from_config(CONFIG, attn_implementation="eager").eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    return model


def checkpoint(tower: Any, prefix: str = PREFIXES[0]) -> Iterator[tuple[str, Tensor]]:
    """The tower's layers as a checkpoint streams them, among other things."""
    yield "language_model.model.layers.2.self_attn.q_proj.weight", torch.zeros(3, 3)
    for name, weight in tower.state_dict().items():
        _, separator, rest = name.partition("encoder.layers.")
        if separator:
            yield prefix + rest, weight


def load_layer(tower: Any, prefix: str = PREFIXES[0], like: Tensor = LIKE) -> NextTowerLayer:
    layer = NextTowerLayer(CONFIG, NEXT)
    for _ in layer.capture_weights(checkpoint(tower, prefix), like):
        pass
    layer.require_weights()
    return layer


@pytest.mark.parametrize("prefix", PREFIXES)
def test_attention_is_of_one_wide_head_of_the_next_layer(tower: Any, prefix: str) -> None:
    """PruMerge's own rule, from transformers' modules: q k^T / sqrt(Dv) over [CLS] and patches."""
    pixels = torch.randn(2, 3, CONFIG.image_size, CONFIG.image_size)
    with torch.no_grad():
        states = tower(pixels, output_hidden_states=True).hidden_states[-2]
        (block,) = [m for name, m in tower.named_modules() if name.endswith(f"layers.{NEXT}")]
        normed = block.layer_norm1(states)
        query, key = block.self_attn.q_proj(normed), block.self_attn.k_proj(normed)
        whole = (query @ key.transpose(1, 2) * CONFIG.hidden_size**-0.5).softmax(dim=-1)
    attention, keys = load_layer(tower, prefix)(states)
    torch.testing.assert_close(attention, whole[:, 0, 1:])
    torch.testing.assert_close(keys, key[:, 1:])


def test_weights_are_passed_through_unchanged(tower: Any) -> None:
    layer = NextTowerLayer(CONFIG, NEXT)
    for (name, weight), (own, same) in zip(
        layer.capture_weights(checkpoint(tower), LIKE), checkpoint(tower), strict=True
    ):
        assert name == own
        assert weight is same or torch.equal(weight, same)


def test_copies_are_kept_in_the_tower_s_dtype(tower: Any) -> None:
    """Loaders reuse their buffers, and serve in another dtype than checkpoints have."""
    weights = {name: weight.clone() for name, weight in checkpoint(tower)}
    layer = NextTowerLayer(CONFIG, NEXT)
    for _ in layer.capture_weights(iter(weights.items()), LIKE):
        pass
    for weight in weights.values():
        weight.fill_(torch.nan)
    attention, keys = layer(torch.randn(1, 5, CONFIG.hidden_size))
    assert attention.isfinite().all() and keys.isfinite().all()
    half = load_layer(tower, like=torch.zeros(1, dtype=torch.bfloat16))
    attention, keys = half(torch.randn(1, 5, CONFIG.hidden_size, dtype=torch.bfloat16))
    assert (attention.dtype, keys.dtype) == (torch.float32, torch.bfloat16)


def test_other_weights_replace_the_first_while_the_model_has_none(tower: Any) -> None:
    """``reload_weights`` of a running engine: the model's parameters are on the meta device."""
    layer, states = load_layer(tower), torch.randn(1, 5, CONFIG.hidden_size)
    _, before = layer(states)
    doubled = ((name, weight * 2) for name, weight in checkpoint(tower))
    for _ in layer.capture_weights(doubled, torch.zeros(1, device="meta")):
        pass
    _, after = layer(states)
    assert after.isfinite().all() and not torch.allclose(before, after)


@pytest.mark.parametrize("lost", NAMES)
def test_missing_weights_are_named(tower: Any, lost: str) -> None:
    layer = NextTowerLayer(CONFIG, NEXT)
    weights = ((n, w) for n, w in checkpoint(tower) if not n.endswith(f"layers.{NEXT}.{lost}"))
    for _ in layer.capture_weights(weights, LIKE):
        pass
    with pytest.raises(ConfigError) as caught:
        layer.require_weights()
    (problem,) = caught.value.problems
    assert problem.where.endswith(f"encoder.layers.{NEXT}.{lost}")
    assert "not in the checkpoint" in problem.what


def test_checkpoint_without_the_layer(tower: Any) -> None:
    layer = NextTowerLayer(CONFIG, NEXT)
    for _ in layer.capture_weights(
        (w for w in checkpoint(tower) if f"layers.{NEXT}." not in w[0]), LIKE
    ):
        pass
    with pytest.raises(ConfigError) as caught:
        layer.require_weights()
    assert len(caught.value.problems) == len(NAMES)


def test_weights_of_another_shape_are_refused(tower: Any) -> None:
    layer = NextTowerLayer(CONFIG, NEXT)
    packed = (
        (name, weight[:, :3] if name.endswith("k_proj.weight") else weight)
        for name, weight in checkpoint(tower)
    )
    for _ in layer.capture_weights(packed, LIKE):
        pass
    with pytest.raises(ConfigError, match=r"has shape \(24, 3\), not \(24, 24\)"):
        layer.require_weights()


def test_a_part_that_is_loaded_again_replaces_the_old_one(tower: Any) -> None:
    """vLLM reloads weights in pieces; what a piece does not hold stays as it was."""
    layer = load_layer(tower)
    states = torch.randn(1, 5, CONFIG.hidden_size)
    _, before = layer(states)
    bias = f"{PREFIXES[0]}{NEXT}.self_attn.k_proj.bias"
    for _ in layer.capture_weights([(bias, torch.zeros(CONFIG.hidden_size))], LIKE):
        pass
    layer.require_weights()
    _, after = layer(states)
    old = dict(checkpoint(tower))[bias]
    torch.testing.assert_close(before - after, old.expand_as(after))


def test_dummies_serve_where_nothing_was_loaded(tower: Any) -> None:
    """``--load-format dummy`` never shows the model a checkpoint."""
    layer = NextTowerLayer(CONFIG, NEXT)
    layer.init_dummy_weights(LIKE)
    attention, keys = layer(torch.randn(2, 10, CONFIG.hidden_size))
    assert attention.shape == (2, 9)
    assert keys.shape == (2, 9, CONFIG.hidden_size)
    assert attention.isfinite().all()
    real = load_layer(tower)
    before = real(torch.ones(1, 3, CONFIG.hidden_size))[1]
    real.init_dummy_weights(LIKE)
    assert torch.equal(real(torch.ones(1, 3, CONFIG.hidden_size))[1], before)
