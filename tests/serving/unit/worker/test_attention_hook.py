from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor, nn

from vllm_autoprune.serving.worker import attention_hook
from vllm_autoprune.serving.worker.attention_hook import AttentionHook

HEADS, WIDTH = 2, 4


class Attention(nn.Module):
    """Attention with the call signature of vLLM's ``MMEncoderAttention``."""

    num_heads, scale = HEADS, 0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value


def plain(query: Tensor, key: Tensor) -> Tensor:
    """``(n,)`` of one sequence, head by head."""
    heads = [
        (query[:, h] @ key[:, h].T * Attention.scale).softmax(dim=-1).mean(dim=0)
        for h in range(HEADS)
    ]
    return torch.stack(heads).mean(dim=0)


def _made(*shape: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=source), torch.randn(*shape, generator=source)


def test_a_batch_of_sequences() -> None:
    module = Attention()
    listening = AttentionHook(module)
    query, key = _made(3, 7, HEADS * WIDTH)
    with listening.recording():
        module(query, key, key)
    for received, q, k in zip(listening.take(), query, key, strict=True):
        expected = plain(q.view(7, HEADS, WIDTH), k.view(7, HEADS, WIDTH))
        torch.testing.assert_close(received, expected)
        torch.testing.assert_close(received.sum(), torch.tensor(1.0))


def test_packed_sequences_attend_only_to_themselves() -> None:
    module = Attention()
    listening = AttentionHook(module)
    query, key = _made(1, 9, HEADS, WIDTH)
    with listening.recording():
        module(query=query, key=key, value=key)
    first, second = listening.take([4, 5])
    torch.testing.assert_close(first, plain(query[0, :4], key[0, :4]))
    torch.testing.assert_close(second, plain(query[0, 4:], key[0, 4:]))


def test_queries_are_taken_a_few_at_a_time() -> None:
    module = Attention()
    listening = AttentionHook(module)
    query, key = _made(1, attention_hook._MAX_QUERIES + 3, HEADS, WIDTH)
    with listening.recording():
        module(query, key, key)
    (received,) = listening.take()
    torch.testing.assert_close(received, plain(query[0], key[0]))


def test_nothing_is_kept_of_calls_that_are_not_recorded() -> None:
    """Videos go through the same tower, and nobody takes what was read of them."""
    module, (query, key) = Attention(), _made(1, 5, HEADS * WIDTH)
    AttentionHook(module)
    references = weakref.ref(query), weakref.ref(key)
    module(query, key, key)
    del query, key
    gc.collect()
    assert [reference() for reference in references] == [None, None]
