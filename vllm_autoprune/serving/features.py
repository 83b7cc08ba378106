"""Vision features of an image, kept per image so that further questions skip the vision tower.

Knows nothing about questions or budgets: what is kept here depends on the image alone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.model_executor.models.clip import CLIPAttention

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """One image after the vision tower.

    projected ``(N, D)``; cls_attention ``(N,)`` and patches ``(N, C)``, the tokens in the space
    where relevance is measured, only where the state reads them; cosine ``(N, N)`` float32
    between the projected tokens.
    """

    projected: Tensor
    cls_attention: Tensor | None
    patches: Tensor | None
    cosine: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        parts = (self.projected, self.cls_attention, self.patches, self.cosine)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


class FeatureCache:
    """Least recently used images, bounded in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Key, ImageFeatures] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> ImageFeatures | None:
        """The features of an image, now the most recently used, or None."""
        found = self._entries.get(key)
        if found is None:
            self.misses += 1
            return None
        self._entries.move_to_end(key)
        self.hits += 1
        return found

    def put(self, key: Key, features: ImageFeatures) -> None:
        """Keep an image's features, dropping the least recently used ones beyond the bound."""
        if features.nbytes > self.limit or key in self._entries:
            return
        self._entries[key] = features
        self.held += features.nbytes
        while self.held > self.limit:
            _, dropped = self._entries.popitem(last=False)
            self.held -= dropped.nbytes

    def clear(self) -> None:
        """Forget every image: other weights would see them otherwise."""
        self._entries.clear()
        self.held = 0

    def reserve(self, device: torch.device) -> Tensor | None:
        """A buffer of the bound's size, to be held while vLLM profiles a device's memory.

        vLLM gives all memory that profiling left free to the KV cache, so what this cache will
        hold later has to be seen then. The CPU's KV cache has a fixed size: nothing to reserve.
        """
        if device.type == "cpu" or self.limit == 0:
            return None
        return torch.empty(self.limit, dtype=torch.uint8, device=device)


class ClsAttention:
    """The [CLS] row of one CLIP layer's attention, averaged over heads, from its projections.

    Read by a forward hook on ``self_attn.qkv_proj``: fused attention kernels never form the
    probabilities. vLLM builds the tower only up to the feature layer, so its last layer is the
    one whose output the model reads (``attentions[-2]`` of the full tower for LLaVA-1.5).
    """

    def __init__(self, attention: CLIPAttention) -> None:
        self._attention = attention
        self._qkv: Tensor | None = None
        attention.qkv_proj.register_forward_hook(self._note)

    def _note(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        assert isinstance(output, tuple)
        self._qkv = output[0]

    def take(self) -> Tensor:
        """``(B, N)`` float32 of the batch that just went through the tower; [CLS] left out."""
        assert self._qkv is not None, "the vision tower has not run"
        qkv, self._qkv = self._qkv, None
        heads = self._attention.num_heads_per_partition
        query, key, _ = qkv.unflatten(-1, (3, heads, -1)).unbind(dim=2)
        scores = torch.einsum("bhd,bnhd->bhn", query[:, 0].float(), key.float())
        total = (scores * self._attention.scale).softmax(dim=-1).sum(dim=1)
        if self._attention.tp_size > 1:
            # Heads are sharded over ranks; after the sum every rank holds the same bits.
            from vllm.distributed import tensor_model_parallel_all_reduce

            total = tensor_model_parallel_all_reduce(total)
        mean: Tensor = total[:, 1:] / self._attention.num_heads
        return mean
