"""Vision side of LLaVA models with a CLIP tower: [CLS] and every layer that policies read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from vllm_autoprune.serving.models.vision import Tiles, Vision
from vllm_autoprune.serving.shared.served_state import ServedState
from vllm_autoprune.serving.worker.features import TowerFeatures
from vllm_autoprune.serving.worker.language_layers import FirstLanguageLayers
from vllm_autoprune.serving.worker.next_tower_layer import NextTowerLayer
from vllm_autoprune.serving.worker.qkv_hook import QkvHook, QueriesAndKeys
from vllm_autoprune.serving.worker.region_selection import ModelParts
from vllm_autoprune.tpdsl.tokens import Grid

if TYPE_CHECKING:
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration


class ClipVision(Vision):
    """Vision side shared by LLaVA-1.5 and LLaVA-NeXT."""

    _model: LlavaForConditionalGeneration

    def __init__(self, model: LlavaForConditionalGeneration, served: ServedState) -> None:
        super().__init__(model, served)
        config = model.config.vision_config
        side = config.image_size // config.patch_size
        self.grid = Grid(side, side)
        layers = model.vision_tower.vision_model.encoder.layers
        inside = not self.needs.isdisjoint({"cls_attention", "tower", "next_layer"})
        self._last = QkvHook(layers[-1].self_attn) if inside else None
        self._next = NextTowerLayer(config, len(layers)) if "next_layer" in self.needs else None
        self._language: FirstLanguageLayers | None = None

    @staticmethod
    def tower(model: LlavaForConditionalGeneration) -> nn.Module:
        """The model's vision tower."""
        tower: nn.Module = model.vision_tower
        return tower

    def project(self, rows: Tensor) -> Tensor:
        """Rows of the vision tower ``(..., Dv)`` through the model's projector, ``(..., D)``."""
        projected: Tensor = self._model.multi_modal_projector(rows.to(self.sample_weight.dtype))
        return projected

    def model_parts(self) -> ModelParts:
        """Parts of the model that policies read, with the language model's first layers."""
        if self._language is None and "language" in self.needs:
            first = self._model.config.text_config.bos_token_id
            model = self._model.language_model.model
            self._language = FirstLanguageLayers(model, (first,), self.sample_weight.device)
        language = None if self._language is None else self._language.read
        return ModelParts(self.project, self.relevance(), language, self.word_embedding())

    def capture_weights(
        self, weights: Iterable[tuple[str, Tensor]]
    ) -> Iterable[tuple[str, Tensor]]:
        """Also copy the next layer, which is in the checkpoint and not in the model."""
        return (
            weights
            if self._next is None
            else self._next.capture_weights(weights, self.sample_weight)
        )

    def finish_loading(self) -> None:
        """Finish loading, and require the weights of the next layer where the state reads it."""
        super().finish_loading()
        if self._next is not None:
            self._next.require_weights()

    def encode_tiles(self, pixels: Tensor) -> Tiles:
        """Encode tiles ``(M, 3, H, W)`` in one pass of the vision tower."""
        model, relevance = self._model, self.relevance()
        states = model.vision_tower(pixels)
        hidden = states[:, 1:]
        last = None if self._last is None else self._last.take()
        tower = None if last is None else self._inside(states, last)
        return Tiles(
            model.multi_modal_projector(hidden),
            last.cls_attention() if last and "cls_attention" in self.needs else None,
            None if relevance is None else relevance.patches(hidden),
            tower,
            hidden if tower is None and "encoder" in self.needs else None,
        )

    def _inside(self, states: Tensor, last: QueriesAndKeys) -> TowerFeatures | None:
        """Tower features of all tiles, from states ``(M, 1 + n, Dv)``."""
        if self.needs.isdisjoint({"tower", "next_layer"}):
            return None
        attention, keys = None, None
        if self._next is not None:
            self._next.init_dummy_weights(self.sample_weight)
            attention, keys = self._next(states)
        return TowerFeatures(states[:, 1:], states[:, :1], last.mean_keys(), attention, keys)
