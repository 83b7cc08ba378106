"""LLaVA-1.5, pruned: vision tower once per image, one selection a budget, K rows an image.

Knows nothing about states or atoms; it fills their inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.model_executor.models.llava import LlavaForConditionalGeneration
from vllm.model_executor.models.utils import StageMissingLayer

from vllm_autoprune.serving.batch import ModelParts, prune_images
from vllm_autoprune.serving.config import ServedState, served_state
from vllm_autoprune.serving.features import FeatureCache, ImageFeatures, TowerFeatures
from vllm_autoprune.serving.language import FirstLayers
from vllm_autoprune.serving.last_layer import LastLayer, Projected
from vllm_autoprune.serving.next_layer import FollowingLayer
from vllm_autoprune.serving.plan import FIELD, ItemPlan
from vllm_autoprune.serving.processor import pruned_factories
from vllm_autoprune.serving.prune import FallbackMeter
from vllm_autoprune.serving.relevance import ClipTower, InputEmbeddings, Relevance
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.interfaces import MultiModalEmbeddings


class LlavaVision:
    """The vision side of a LLaVA model: features of each image, made once.

    Kept out of the module tree: what it holds beyond the model's own modules (CLIP's text
    tower, cached features) is no weight of the checkpoint, and vLLM's loader must not look for it.
    """

    def __init__(self, model: LlavaForConditionalGeneration, served: ServedState) -> None:
        config = model.config.vision_config
        side = config.image_size // config.patch_size
        self.grid = Grid(side, side)
        self.cache = FeatureCache(served.cache_bytes)
        self.runs = 0
        self._model = model
        self._served = served
        self._needs = served.needs
        layers = model.vision_tower.vision_model.encoder.layers
        inside = not self._needs.isdisjoint({"cls_attention", "tower", "next_layer"})
        self._last = LastLayer(layers[-1].self_attn) if inside else None
        self._next = FollowingLayer(config, len(layers)) if "next_layer" in self._needs else None
        self._relevance: Relevance | None = None
        self._language: FirstLayers | None = None

    def relevance(self) -> Relevance | None:
        """Where relevance is measured, loaded at first use.

        That is at the end of weight loading, or while profiling where weights are dummies; both
        times vLLM counts its memory.
        """
        if self._relevance is None and "instruction" in self._needs:
            device = self._like.device
            tower = self._served.tower
            if tower is not None:
                self._relevance = ClipTower(tower, device)
            else:
                embed = self._model.language_model.model.embed_tokens
                self._relevance = InputEmbeddings(embed, device)
        return self._relevance

    def parts(self) -> ModelParts:
        """What policies read beside the features of an image."""
        if self._language is None and "language" in self._needs:
            first = self._model.config.text_config.bos_token_id
            model = self._model.language_model.model
            self._language = FirstLayers(model, (first,), self._like.device)
        language = None if self._language is None else self._language.read
        return ModelParts(self.grid, self._project, self.relevance(), language)

    def heard(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The checkpoint as it streams by; what the model leaves out of it is taken here."""
        return weights if self._next is None else self._next.heard(weights, self._like)

    def loaded(self) -> None:
        """The weights are new: nothing made with the old ones is kept.

        Raises :class:`ConfigError` where the checkpoint lacks what the state reads.
        """
        self.cache.clear()
        self.relevance()
        if self._next is not None:
            self._next.require()

    @property
    def _like(self) -> Tensor:
        """A parameter of the vision tower: its device and dtype."""
        found: Tensor = next(self._model.vision_tower.parameters())
        return found

    def _project(self, rows: Tensor) -> Tensor:
        """Rows of the vision tower ``(..., Dv)`` through the model's projector, ``(..., D)``."""
        projected: Tensor = self._model.multi_modal_projector(rows.to(self._like.dtype))
        return projected

    def features(self, plans: list[ItemPlan], pixels: Tensor | list[Tensor]) -> list[ImageFeatures]:
        """Features of every image: cached ones, and one pass for each image not seen yet."""
        profile = any(plan.profile for plan in plans)
        known: dict[tuple[int, int], ImageFeatures] = {}
        missing: dict[tuple[int, int], Tensor] = {}
        for plan, image in zip(plans, pixels, strict=True):
            if plan.key in known or plan.key in missing:
                continue
            found = None if profile else self.cache.get(plan.key)
            if found is None:
                missing[plan.key] = image
            else:
                known[plan.key] = found
        if profile:
            # All dummies look alike; telling them apart would measure too little memory.
            return self._encode(torch.stack(list(pixels)))
        if missing:
            made = self._encode(torch.stack(list(missing.values())))
            for key, image in zip(missing, made, strict=True):
                known[key] = image
                self.cache.put(key, image)
        return [known[plan.key] for plan in plans]

    def _encode(self, pixels: Tensor) -> list[ImageFeatures]:
        """One pass of the vision tower over ``(B, 3, H, W)``."""
        self.runs += 1
        model, relevance = self._model, self.relevance()
        states = model.vision_tower(pixels)
        hidden = states[:, 1:]
        last = None if self._last is None else self._last.take()
        attention = last.cls_attention() if last and "cls_attention" in self._needs else None
        projected = model.multi_modal_projector(hidden)
        patches = None if relevance is None else relevance.patches(hidden)
        tower = None if last is None else self._tower(states, last)
        # Rows are copied: a view would keep the whole batch alive in the cache.
        return [
            ImageFeatures(
                projected[i].clone(),
                None if attention is None else attention[i].clone(),
                None if patches is None else patches[i].clone(),
                VisualTokens(projected[i : i + 1], self.grid).cosine[0],
                None if tower is None else tower.of(i),
            )
            for i in range(len(pixels))
        ]

    def _tower(self, states: Tensor, last: Projected) -> TowerFeatures | None:
        """Of a whole batch, from states ``(B, 1 + N, Dv)``."""
        if self._needs.isdisjoint({"tower", "next_layer"}):
            return None
        attention, keys = None, None
        if self._next is not None:
            self._next.make_up(self._like)
            attention, keys = self._next(states)
        return TowerFeatures(states[:, 1:], states[:, :1], last.mean_keys(), attention, keys)


class AutopruneLlavaForConditionalGeneration(LlavaForConditionalGeneration):
    """``LlavaForConditionalGeneration`` that keeps K of N visual tokens where a state is served.

    Without a state on the model config it is the stock model.
    """

    _processor_factory = pruned_factories(LlavaForConditionalGeneration._processor_factory)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        served = served_state(vllm_config.model_config)
        self.autoprune: LlavaVision | None = None
        # `--limit-mm-per-prompt '{"image": 0}'` leaves the tower's weights out.
        if served is None or isinstance(self.vision_tower, StageMissingLayer):
            return
        self.autoprune_served = served
        self.autoprune_meter = FallbackMeter()
        self.autoprune = LlavaVision(self, served)
        budget = vllm_config.scheduler_config.max_num_encoder_input_tokens
        self.autoprune_batch = max(1, budget // self.autoprune.grid.tokens)

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Rows of every image: ``[(K_i, D)]`` (``SupportsMultiModal.embed_multimodal``)."""
        rows = kwargs.pop(FIELD, None)
        pixels = kwargs.get("pixel_values")
        if self.autoprune is None or rows is None or pixels is None:
            return super().embed_multimodal(**kwargs)
        checked = self._parse_and_validate_image_input(**kwargs)
        assert checked is not None and isinstance(rows, Tensor | list)
        assert isinstance(pixels, Tensor)
        plans = [ItemPlan.decode(row) for row in rows]
        profile = any(plan.profile for plan in plans)
        reserved = self.autoprune.cache.reserve(pixels.device) if profile else None
        done: list[Tensor] = []
        # vLLM counts a pruned image as K tokens, so a step may hold far more images than
        # profiling saw: features and selections are made for as many at a time as it did see.
        bound = len(plans) if profile else self.autoprune_batch
        for start in range(0, len(plans), bound):
            some = slice(start, start + bound)
            done += prune_images(
                self.autoprune_served,
                plans[some],
                self.autoprune.features(plans[some], checked["pixel_values"][some]),
                self.autoprune.parts(),
                self.autoprune_meter,
            )
        del reserved
        return done

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As stock; other weights that the state reads are taken here too, so vLLM counts them.

        A running engine may be given new weights (``reload_weights``): features of the old ones
        are dropped.
        """
        if self.autoprune is None:
            return super().load_weights(weights)
        loaded = super().load_weights(self.autoprune.heard(weights))
        self.autoprune.loaded()
        return loaded
