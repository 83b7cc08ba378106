"""A dense reference of towers that drop cells: whole images, of which attention is masked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@contextmanager
def attending_to(tower: Any, patches: Tensor, start: int = 0) -> Iterator[None]:
    """Let a tower over whole images attend to kept patches alone, from layer ``start`` on."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, *lengths: Any, **named: Any
    ) -> Tensor:
        edges = lengths[0] if lengths else named["cu_seqlens"]
        sequence = torch.searchsorted(
            edges, torch.arange(len(patches), dtype=edges.dtype), right=True
        )
        seen = (sequence[:, None] == sequence) & patches
        q, k, v = (
            p.reshape(-1, *p.shape[-2:]).transpose(0, 1) for p in (query, key, value)
        )
        rows = scaled_dot_product_attention(q, k, v, attn_mask=seen)
        # NaN where nothing of a sequence is kept.
        return rows.nan_to_num().transpose(0, 1).reshape(query.shape)

    with ExitStack() as stack:
        for block in tower.blocks[start:]:
            stack.enter_context(patch.object(block.attn.attn, "forward", attend))
        yield
