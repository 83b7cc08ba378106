"""State of a pruned model in vLLM's model runner V2, which asks each model for its own.

For runner V1, patches do the same (``compat/runner_v1.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.compat.worker import find_largest_images

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.multimodal.encoder_budget import MultiModalBudget
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
    from vllm.v1.worker.gpu.mm.rope import RopeState
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState as _Stock
    from vllm.v1.worker.gpu.model_states.interface import ModelState

    from vllm_autoprune.serving.models.vision import Vision
else:
    _Stock = object


class _PrunedModel(SupportsMultiModal, Protocol):
    autoprune: Vision

    def autoprune_split(
        self, items: Sequence[MultiModalKwargsItem | None]
    ) -> list[slice]: ...


_FEATURES = "autoprune_features"
"""Entry of the encoder cache that stands for the feature cache while memory is profiled."""


@depends_on(
    "vllm.v1.worker.encoder_cudagraph:EncoderCudaGraphManager",
    "execute",
    "is_captured",
    "supports_modality",
)
class TowerGraphs(EncoderCudaGraphManager):
    """Captured graphs of the vision tower, which the vision side replays before it prunes."""

    def __init__(self, stock: EncoderCudaGraphManager) -> None:
        self.__dict__.update(stock.__dict__)

    def supports_modality(self, modality: str) -> bool:
        """Whether vLLM replays a graph itself: never, for it would hand on all tokens."""
        return False


@depends_on(
    "vllm.v1.worker.gpu.mm.encoder_runner:EncoderRunner",
    "execute_mm_encoder",
    "profile_encoder_cache",
)
@depends_on("vllm.v1.worker.gpu.mm.encoder_cache:EncoderCache", "reset_encoder_cache")
@depends_on("vllm.v1.worker.gpu.model_runner:GPUModelRunner", "profile_run")
class BoundedEncoder(EncoderRunner):
    """vLLM's encoder runner, with encoder calls and memory profiling of a pruned model."""

    model: _PrunedModel
    cudagraph_manager: EncoderCudaGraphManager | None

    def __init__(self, stock: EncoderRunner) -> None:
        # Its buffers are taken over, not allocated a second time.
        self.__dict__.update(stock.__dict__)
        if self.cudagraph_manager is not None:
            graphs = TowerGraphs(self.cudagraph_manager)
            self.cudagraph_manager = graphs
            self.model.autoprune.graphs = graphs

    def execute_mm_encoder(
        self, mm_kwargs: list[tuple[str, MultiModalKwargsItem]]
    ) -> list[Tensor]:
        """Outputs of all inputs, encoded in groups, each within what profiling measured.

        The scheduler counts an image by its placeholders, K, so a step may hold many more images
        than the encoder budget has room for unpruned, and vLLM stacks the pixels of all of them on
        the device.
        """
        outputs: list[Tensor] = []
        for group in self.model.autoprune_split([item for _, item in mm_kwargs]):
            outputs += super().execute_mm_encoder(mm_kwargs[group])
        return outputs

    def profile_encoder_cache(
        self,
        dummy_mm_inputs: list[tuple[str, MultiModalKwargsItem]],
        budget: MultiModalBudget,
    ) -> None:
        """As vLLM's own; also encodes the largest images, and holds what the model will keep.

        vLLM encodes only the modality with most tokens, and drops all encoder outputs when
        profiling ends.
        """
        buffer = self.model.autoprune.cache.reserve(self.device)
        if buffer is not None:
            self.encoder_cache.encoder_outputs[_FEATURES] = buffer
        if images := find_largest_images(budget):
            self.execute_mm_encoder(images)
        super().profile_encoder_cache(dummy_mm_inputs, budget)


@depends_on(
    "vllm.v1.worker.gpu.mm.rope:RopeState",
    "__init__",
    "read_prefill_positions",
    "update_prefill_positions",
)
class KnownDeltas:
    """Positions of requests as vLLM's pruner reads and writes them, whose deltas stay.

    A delta is added to the index of a generated token to get its position. vLLM takes it as a
    number on the host, while positions are on the device, so a model that computed it from them
    would wait for all queued work of the device. It was known when the request arrived.
    """

    def __init__(self, positions: RopeState) -> None:
        self._positions = positions

    def read_prefill_positions(self, req_idx: int, length: int) -> Tensor:
        """Positions ``(A, L)`` of a request's prompt."""
        return self._positions.read_prefill_positions(req_idx, length)

    def update_prefill_positions(
        self, req_idx: int, positions: Tensor, delta: int
    ) -> None:
        """Replace the positions ``(A, L)`` of a request's prompt."""
        known = int(self._positions.prefill_delta.np[req_idx])
        self._positions.update_prefill_positions(req_idx, positions, known)


@depends_on("vllm.v1.worker.gpu.model_states.interface:ModelState", "__init__")
@depends_on(
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState", "prepare_inputs_embeds"
)
@depends_on("vllm.v1.worker.gpu.model_states.mm_pruning:MultiModalPruner", "recompute")
class PrunedState(_Stock):
    """Mixin for the state of a model with a tower, whose images are pruned."""

    encoder_runner: EncoderRunner

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: EncoderCache | None,
        device: torch.device,
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        if self.supports_mm_inputs:
            self.encoder_runner = BoundedEncoder(self.encoder_runner)
        if self.mm_pruner is not None and self.rope_state is not None:
            self.mm_pruner.rope_state = KnownDeltas(self.rope_state)


def prune_state(stock: type[ModelState]) -> type[ModelState]:
    """The state of a pruned model whose language model vLLM gives the state ``stock``."""
    return type(f"Autoprune{stock.__name__}", (PrunedState, stock), {})
