from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.serving.unit.samples import clip_config
from vllm_autoprune.serving.features import ClsAttention, FeatureCache, ImageFeatures


def sized(units: int) -> ImageFeatures:
    """Features of ``16 * units`` bytes."""
    return ImageFeatures(torch.zeros(units, 4), None, None)


def test_bytes_count_everything_that_is_held() -> None:
    full = ImageFeatures(torch.zeros(5, 4, dtype=torch.bfloat16), torch.zeros(5), torch.zeros(5, 3))
    assert full.nbytes == 5 * 4 * 2 + 5 * 4 + 5 * 3 * 4


@given(st.integers(0, 10), st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12)), max_size=60))
def test_the_bound_holds_whatever_is_put_in(limit: int, puts: list[tuple[int, int]]) -> None:
    cache = FeatureCache(16 * limit)
    for key, units in puts:
        cache.put((key, 0), sized(units))
        assert cache.held <= cache.limit
        inside = [found for k in range(9) if (found := cache.get((k, 0))) is not None]
        assert cache.held == sum(found.nbytes for found in inside)
        assert len(cache) == len(inside)


def test_the_least_recently_used_goes_first() -> None:
    cache = FeatureCache(3 * 16)
    for key in (1, 2, 3):
        cache.put((key, 0), sized(1))
    cache.get((1, 0))
    cache.put((4, 0), sized(1))
    assert [cache.get((key, 0)) is not None for key in (1, 2, 3, 4)] == [True, False, True, True]
    cache.put((5, 0), sized(2))  # drops as many as it takes
    assert [cache.get((key, 0)) is not None for key in (1, 3, 4, 5)] == [False, False, True, True]


def test_what_is_too_large_stays_out_and_drops_nothing() -> None:
    cache = FeatureCache(2 * 16)
    cache.put((1, 0), sized(2))
    cache.put((2, 0), sized(3))
    assert cache.get((1, 0)) is not None
    assert cache.get((2, 0)) is None


def test_a_bound_of_zero_holds_nothing() -> None:
    cache = FeatureCache(0)
    cache.put((1, 0), sized(1))
    assert (len(cache), cache.held) == (0, 0)
    assert cache.reserve(torch.device("cuda")) is None


def test_a_key_is_both_of_its_numbers_and_is_counted_once() -> None:
    cache = FeatureCache(4 * 16)
    first = sized(1)
    cache.put((1, 2), first)
    cache.put((1, 2), sized(1))
    assert cache.held == 16
    assert cache.get((1, 2)) is first
    assert cache.get((2, 1)) is None
    assert (cache.hits, cache.misses) == (1, 1)


def test_cleared_it_is_empty_and_counts_on() -> None:
    cache = FeatureCache(16)
    cache.put((1, 0), sized(1))
    cache.get((1, 0))
    cache.clear()
    assert (len(cache), cache.held, cache.hits) == (0, 0, 1)
    assert cache.get((1, 0)) is None
    cache.put((1, 0), sized(1))
    assert len(cache) == 1


def test_profiling_reserves_the_bound_where_memory_is_measured() -> None:
    assert FeatureCache(64).reserve(torch.device("cpu")) is None
    held = FeatureCache(64).reserve(torch.device("meta"))
    assert held is not None
    assert held.nbytes == 64


class Qkv(nn.Module):
    """As vLLM's QKVParallelLinear: one product, returned with a bias that is never there."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(hidden, self.weight, self.bias), None


def attention(qkv: Qkv, heads: int, scale: float) -> Any:
    return SimpleNamespace(
        qkv_proj=qkv, num_heads=heads, num_heads_per_partition=heads, scale=scale, tp_size=1
    )


def test_cls_attention_is_the_softmax_row_of_the_first_token() -> None:
    torch.manual_seed(0)
    batch, tokens, heads, size = 3, 10, 4, 6
    qkv = Qkv(torch.randn(3 * heads * size, 24), torch.randn(3 * heads * size))
    row = ClsAttention(attention(qkv, heads, scale=0.37))
    hidden = torch.randn(batch, tokens, 24)
    packed, _ = qkv(hidden)
    q, k, _ = packed.chunk(3, dim=-1)
    total = torch.zeros(batch, tokens)
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        scores = q[..., part] @ k[..., part].transpose(1, 2) * 0.37
        total += scores.softmax(dim=-1)[:, 0]
    found = row.take()
    assert found.shape == (batch, tokens - 1)
    torch.testing.assert_close(found, (total / heads)[:, 1:])


def test_cls_attention_is_that_of_the_layer_the_model_reads() -> None:
    """Transformers' ``attentions[-2]``, from the same weights in one fused projection."""
    from transformers import CLIPVisionModel

    torch.manual_seed(1)
    config = clip_config().vision_config
    model = CLIPVisionModel._from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    pixels = torch.randn(2, 3, config.image_size, config.image_size)
    with torch.no_grad():
        seen = model(pixels, output_attentions=True, output_hidden_states=True)
    (layer,) = [m for name, m in model.named_modules() if name.endswith("encoder.layers.1")]
    projections = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    qkv = Qkv(
        torch.cat([p.weight.detach() for p in projections]),
        torch.cat([p.bias.detach() for p in projections]),
    )
    heads = config.num_attention_heads
    row = ClsAttention(attention(qkv, heads, scale=(config.hidden_size // heads) ** -0.5))
    with torch.no_grad():
        qkv(layer.layer_norm1(seen.hidden_states[-3]))
        found = row.take()
    assert len(seen.attentions) == 3
    torch.testing.assert_close(found, seen.attentions[-2].mean(dim=1)[:, 0, 1:])
    assert not torch.allclose(found, seen.attentions[-1].mean(dim=1)[:, 0, 1:], atol=1e-3)


def test_half_precision_attention_is_summed_in_float32() -> None:
    torch.manual_seed(2)
    qkv = Qkv(torch.randn(24, 8), torch.zeros(24)).to(torch.bfloat16)
    row = ClsAttention(attention(qkv, 2, scale=0.5))
    qkv(torch.randn(1, 500, 8, dtype=torch.bfloat16))
    found = row.take().detach()
    assert found.dtype == torch.float32
    assert 0.5 < float(found.sum()) <= 1.0


def test_a_batch_is_taken_once() -> None:
    qkv = Qkv(torch.randn(24, 8), torch.zeros(24))
    row = ClsAttention(attention(qkv, 2, scale=0.5))
    with pytest.raises(AssertionError, match="has not run"):
        row.take()
    qkv(torch.randn(1, 5, 8))
    row.take()
    with pytest.raises(AssertionError, match="has not run"):
        row.take()
