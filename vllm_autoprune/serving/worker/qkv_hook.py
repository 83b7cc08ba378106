"""Forward hook that reads queries and keys of the vision tower's last layer.

Fused attention kernels never form probabilities, so the [CLS] row is recomputed from them. vLLM
builds the tower only up to the feature layer, so its last layer is the one whose output the model
reads (``attentions[-2]`` of the full tower for LLaVA-1.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_autoprune.serving.worker.tensor_parallel import sum_over_ranks

if TYPE_CHECKING:
    from vllm.model_executor.models.clip import CLIPAttention


@dataclass(frozen=True, slots=True)
class QueriesAndKeys:
    """Queries and keys ``(B, 1 + N, h, d)`` of the h heads of this rank; [CLS] comes first.

    heads counts those of all ranks; sharded says whether there are other ranks' heads.
    """

    query: Tensor
    key: Tensor
    scale: float
    heads: int
    sharded: bool

    def cls_attention(self) -> Tensor:
        """``(B, N)`` float32: the [CLS] row, averaged over heads; [CLS] itself is left out."""
        scores = torch.einsum("bhd,bnhd->bhn", self.query[:, 0].float(), self.key.float())
        total = (scores * self.scale).softmax(dim=-1).sum(dim=1)
        return self._mean(total)[:, 1:]

    def mean_keys(self) -> Tensor:
        """``(B, N, d)`` float32: the patches' keys, averaged over heads."""
        return self._mean(self.key[:, 1:].float().sum(dim=2))

    def _mean(self, total: Tensor) -> Tensor:
        return (sum_over_ranks(total) if self.sharded else total) / self.heads


class QkvHook:
    """Forward hook on ``self_attn.qkv_proj`` of the last layer."""

    def __init__(self, attention: CLIPAttention) -> None:
        self._attention = attention
        self._qkv: Tensor | None = None
        attention.qkv_proj.register_forward_hook(self._store)

    def _store(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        assert isinstance(output, tuple)
        self._qkv = output[0]

    def take(self) -> QueriesAndKeys:
        """Return, and drop, queries and keys of the batch that just went through the tower."""
        assert self._qkv is not None, "the vision tower has not run"
        qkv, self._qkv = self._qkv, None
        attention = self._attention
        heads = attention.num_heads_per_partition
        query, key, _ = qkv.unflatten(-1, (3, heads, -1)).unbind(dim=2)
        sharded = attention.tp_size > 1
        return QueriesAndKeys(query, key, attention.scale, attention.num_heads, sharded)
