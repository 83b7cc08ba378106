"""A tiny model within this process: its API server's check, and its worker without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from vllm.config import MultiModalConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
)
from vllm.multimodal.utils import group_and_batch_mm_items, group_and_batch_mm_kwargs
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.utils import sanity_check_mm_encoder_outputs

from tests.serving.unit.samples import video_state
from tests.serving.unit.sender import LARGE, OTHER, Sender, picture
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.selftest.engine import mend_products
from vllm_autoprune.selftest.questions import video
from vllm_autoprune.serving.api.foreign_items import check_features
from vllm_autoprune.serving.compat import attach
from vllm_autoprune.serving.compat import worker as patches
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.plan import FIELD, LINE
from vllm_autoprune.serving.plan_rules import PlanRules
from vllm_autoprune.serving.request_rules import RequestRules
from vllm_autoprune.serving.served_state import ATTRIBUTE, served_state

CONTEXT = 1024


@dataclass(frozen=True)
class Request:
    """A prompt's token ids, and its items with their tensors and plans."""

    ids: list[int]
    features: Sequence[MultiModalFeatureSpec]


@contextmanager
def distributed(folder: Path) -> Iterator[None]:
    """The process groups of one rank, which vLLM's layers ask for."""
    init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, backend="gloo")
    try:
        yield
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()


class Worker:
    """One backbone with random weights, and what its own API server makes of some requests."""

    def __init__(self, backbone: str, folder: Path) -> None:
        build(backbone, folder)
        mend_products()
        rules = RequestRules("states", 1, 1024, explicit=True, recall=4)
        mark = "<|image_pad|>" if backbone.startswith("qwen") else ""
        state = video_state("vcast")
        self.sender = Sender(
            folder, 8, rules=rules, placeholder=mark, **state
        ).with_blocks(4)
        served = served_state(self.sender._config)
        assert served is not None
        self.rules = PlanRules(served, self.sender._config.get_vocab_size())
        options = EngineArgs(
            str(folder), max_model_len=CONTEXT, dtype="float32", enforce_eager=True
        )
        config = options.create_engine_config()
        attach(config.model_config, ATTRIBUTE, served)
        if served.capabilities.axes == LINE:
            patches.keep_positions()
            patches.keep_axes(config.model_config, LINE)
        module, _, name = BACKBONES[config.model_config.architecture].model.partition(
            ":"
        )
        with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
            ensure_model_parallel_initialized(1, 1)
            self.model: Any = vars(import_module(module))[name](vllm_config=config)
            loader = get_model_loader(config.load_config)
            loader.load_weights(self.model, config.model_config)
            cpu = torch.device("cpu")
            process_weights_after_loading(self.model, config.model_config, cpu)
        self.has_videos = served.capabilities.prunes_videos
        self.requests = [*self._make_requests()]
        (self.neighbour,) = self.requests[0].features
        (self.rows,) = self.encode([self.neighbour])

    def _make_requests(self) -> Iterator[Request]:
        """Sound requests of every kind that the model serves."""
        entries: list[dict[str, Any]] = [
            {},
            {"budget": 300},
            {"budget": 5, "state": "divprune"},
        ]
        entries += [{"keep": "random"}, {"keep": "reference", "state": "autoprune"}]
        if not self.sender._processor._placeholders.unsplittable:
            turns = [{"images": 1, "text": "is"}, {"images": 1, "text": "the cat"}]
            entries += [{"state": "shared-core"}, {"recall": 3, "recall_turns": turns}]
        if not self.rules.served.capabilities.whole_only:
            entries.append({"cells": "flat"})
        if not self.rules.served.capabilities.whole_tower:
            entries.append({"tower": "1/2@1/2"})
        pictures = LARGE, page(), OTHER
        for number, entry in enumerate(entries):
            yield self._make(
                [page() if "cells" in entry else pictures[number % 3]], **entry
            )
        if self.sender._processor._placeholders.resize is not None:
            yield self._make([LARGE], keep="resized", budget=9)
        if self.has_videos:
            for k in (5, "100%", "1/3"):
                yield self._make([video(8)], modality="video", video_budget=k)

    def _make(self, images: Sequence[Any], **named: Any) -> Request:
        modality = named.get("modality", "image")
        inputs = self.sender.process(images, **named)
        features = [
            MultiModalFeatureSpec(MultiModalKwargsItem(item), modality, identity, span)
            for item, identity, span in zip(
                inputs["mm_kwargs"][modality],
                inputs["mm_hashes"][modality],
                inputs["mm_placeholders"][modality],
                strict=True,
            )
        ]
        return Request(list(inputs["prompt_token_ids"]), features)

    def check(self, request: Request) -> None:
        """The check of an API server; raises what it raises."""
        check_features(self.rules, request.features, "", MultiModalConfig())

    @torch.inference_mode()
    def positions(self, request: Request) -> Tensor | None:
        """Positions ``(A, L)`` of the prompt; None where there are none to ask the model for."""
        axes = self.model.autoprune_axes
        if not axes:
            return None
        positions: Tensor
        positions, delta = self.model.get_mrope_input_positions(
            request.ids, [*request.features]
        )
        assert positions.shape == (axes, len(request.ids))
        end = max(int(positions.max()) + 1, len(request.ids) + delta)
        assert int(positions[0].min()) >= 0 and end <= self.model.autoprune_table
        return positions

    @torch.inference_mode()
    def encode(self, features: Sequence[MultiModalFeatureSpec]) -> list[Tensor]:
        """Rows of every item, of one step, as vLLM's model runners have them made."""
        pairs = [(feature.modality, feature.data) for feature in features]
        rows: list[Tensor] = []
        for run in self.model.autoprune_split([item for _, item in pairs]):
            for _, count, batch in group_and_batch_mm_kwargs(pairs[run]):
                outputs = self.model.embed_multimodal(**batch)
                sanity_check_mm_encoder_outputs(outputs, count)
                rows += outputs
        return rows

    @torch.inference_mode()
    def place(
        self, request: Request, rows: Sequence[Tensor], positions: Tensor
    ) -> None:
        """Place the request's tokens, all in one step."""
        split, placed, _ = self.model.recompute_mrope_positions(
            request.ids, rows, positions.clone(), 0
        )
        assert {part.shape[1] for part in split} == {self.model.autoprune.row_width}
        assert placed.shape == positions.shape
        assert (
            int(placed[0].min()) >= 0 and int(placed.max()) < self.model.autoprune_table
        )


def page() -> Image.Image:
    """A white page with noise on it, of which cells can be dropped."""
    blank = Image.new("RGB", (168, 224), "white")
    blank.paste(picture(84, 28), (28, 28))
    return blank


def reaches_worker(feature: MultiModalFeatureSpec) -> bool:
    """Whether vLLM can make the arguments of a call of an item, with a plan, before any model."""
    item = feature.data or {}
    if FIELD not in item or not isinstance(item[FIELD].field, MultiModalBatchedField):
        return False
    try:
        return len([*group_and_batch_mm_items([MultiModalKwargsItem(item)])]) == 1
    except Exception:  # noqa: BLE001
        return False


def plan_row(feature: MultiModalFeatureSpec) -> Any:
    """What an item has in the place of its plan's row."""
    assert feature.data is not None
    return feature.data[FIELD].data
