"""Hooks on mini-Qwen3-VL's vision tower that read what policies see of it."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor, nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

from benchmarks.miniqwen.sizes import MERGE


class TowerHooks:
    """Records one pass of the tower over one image, while the context is open."""

    def __init__(self, tower: nn.Module) -> None:
        *_, last = tower.get_submodule("blocks").children()
        self._attention, merger = last.get_submodule("attn"), tower.get_submodule("merger")
        first = tower.get_submodule("deepstack_merger_list.0")
        self._projections: tuple[Tensor, Tensor] | None = None
        self._patches: Tensor | None = None
        self._early_patches: Tensor | None = None
        self._hooks = [
            self._attention.register_forward_pre_hook(self._store_projections, with_kwargs=True),
            merger.register_forward_pre_hook(self._store_patches),
            first.register_forward_pre_hook(self._store_early_patches),
        ]

    def __enter__(self) -> TowerHooks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def attention(self) -> Tensor:
        """Attention that each token gets in the last layer (N,), as a server measures it.

        The mean over heads and over all patches as queries, then over the patches of a token.
        """
        assert self._projections is not None, "the tower has not run"
        query, key = (part.float().transpose(0, 1) for part in self._projections)
        scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        return scores.softmax(-1).mean((0, 1)).unflatten(0, (-1, MERGE**2)).mean(1)

    def encoder(self) -> Tensor:
        """Mean of each token's patches as the merger gets them (N, Dv) float32."""
        assert self._patches is not None, "the tower has not run"
        return self._patches.float().unflatten(0, (-1, MERGE**2)).mean(1)

    def merger_norms(self) -> Tensor:
        """Mean norms of each token's patches as the first deepstack merger gets them (N, 2).

        The sum of absolute values and the Euclidean norm, float32.
        """
        assert self._early_patches is not None, "the tower has not run"
        patches = self._early_patches.float().unflatten(0, (-1, MERGE**2))
        return torch.stack([patches.abs().sum(2), patches.norm(dim=2)], 2).mean(1)

    def _store_projections(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, object]
    ) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        turns = kwargs["position_embeddings"]
        assert isinstance(hidden, Tensor) and isinstance(turns, tuple)
        heads = self._attention.num_heads
        assert isinstance(heads, int)
        joined = self._attention.get_submodule("qkv")(hidden)
        query, key, _ = joined.unflatten(-1, (3, heads, -1)).unbind(1)
        self._projections = apply_rotary_pos_emb_vision(query, key, *turns)

    def _store_patches(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        (self._patches,) = args

    def _store_early_patches(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        (self._early_patches,) = args
