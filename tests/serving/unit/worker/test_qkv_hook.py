from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.serving.unit.samples import clip_config
from vllm_autoprune.serving.worker import qkv_hook as under_test
from vllm_autoprune.serving.worker.qkv_hook import QkvHook, QueriesAndKeys


class Qkv(nn.Module):
    """Like vLLM's QKVParallelLinear: one fused product, and None as bias."""

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
    hook = QkvHook(attention(qkv, heads, scale=0.37))
    hidden = torch.randn(batch, tokens, 24)
    packed, _ = qkv(hidden)
    q, k, _ = packed.chunk(3, dim=-1)
    total = torch.zeros(batch, tokens)
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        scores = q[..., part] @ k[..., part].transpose(1, 2) * 0.37
        total += scores.softmax(dim=-1)[:, 0]
    captured = hook.take()
    attention_row = captured.cls_attention()
    assert attention_row.shape == (batch, tokens - 1)
    torch.testing.assert_close(attention_row, (total / heads)[:, 1:])
    keys = sum(k[..., h * size : (h + 1) * size] for h in range(heads)) / heads
    torch.testing.assert_close(captured.mean_keys(), keys[:, 1:])


def test_attention_and_keys_are_those_of_the_layer_the_model_reads() -> None:
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
    hook = QkvHook(attention(qkv, heads, scale=(config.hidden_size // heads) ** -0.5))
    with torch.no_grad():
        normed = layer.layer_norm1(seen.hidden_states[-3])
        qkv(normed)
        captured = hook.take()
        keys = layer.self_attn.k_proj(normed).unflatten(-1, (heads, -1)).mean(dim=2)
    attention_row = captured.cls_attention()
    torch.testing.assert_close(captured.mean_keys(), keys[:, 1:])
    assert len(seen.attentions) == 3
    torch.testing.assert_close(attention_row, seen.attentions[-2].mean(dim=1)[:, 0, 1:])
    assert not torch.allclose(attention_row, seen.attentions[-1].mean(dim=1)[:, 0, 1:], atol=1e-3)


def test_half_precision_attention_is_summed_in_float32() -> None:
    torch.manual_seed(2)
    qkv = Qkv(torch.randn(24, 8), torch.zeros(24)).to(torch.bfloat16)
    hook = QkvHook(attention(qkv, 2, scale=0.5))
    qkv(torch.randn(1, 500, 8, dtype=torch.bfloat16))
    captured = hook.take()
    attention_row = captured.cls_attention().detach()
    assert attention_row.dtype == captured.mean_keys().dtype == torch.float32
    assert 0.5 < float(attention_row.sum()) <= 1.0


@pytest.mark.parametrize("summed", [QueriesAndKeys.cls_attention, QueriesAndKeys.mean_keys])
def test_attention_is_averaged_over_the_heads_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, summed: Callable[[QueriesAndKeys], Tensor]
) -> None:
    """Two ranks of two heads each give the result of one rank with four heads."""
    torch.manual_seed(3)
    query, key = torch.randn(2, 7, 4, 5), torch.randn(2, 7, 4, 5)
    whole = QueriesAndKeys(query, key, 0.4, heads=4, sharded=False)
    halves = [
        QueriesAndKeys(query[:, :, part], key[:, :, part], 0.4, heads=4, sharded=True)
        for part in (slice(0, 2), slice(2, 4))
    ]
    parts: list[Tensor] = []

    def record_part(part: Tensor) -> Tensor:
        parts.append(part)
        return part

    monkeypatch.setattr(under_test, "sum_over_ranks", record_part)
    for half in halves:
        summed(half)
    monkeypatch.setattr(under_test, "sum_over_ranks", lambda _: parts[0] + parts[1])
    sums = [summed(half) for half in halves]
    assert torch.equal(sums[0], sums[1])
    torch.testing.assert_close(sums[0], summed(whole))


def test_values_of_a_batch_can_be_taken_once() -> None:
    qkv = Qkv(torch.randn(24, 8), torch.zeros(24))
    hook = QkvHook(attention(qkv, 2, scale=0.5))
    with pytest.raises(AssertionError, match="has not run"):
        hook.take()
    qkv(torch.randn(1, 5, 8))
    hook.take()
    with pytest.raises(AssertionError, match="has not run"):
        hook.take()
