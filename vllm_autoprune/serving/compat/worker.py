"""Patches of vLLM's engine core and workers that both model runners need, and collectives.

What only model runner V1 needs is patched in :mod:`.runner_v1`; V2 asks a model for its own state
(``models/model_state.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from vllm_autoprune.serving.compat import depends_on, patch, wraps

if TYPE_CHECKING:
    from torch import Tensor, nn
    from vllm.config import ModelConfig, MultiModalConfig
    from vllm.multimodal.encoder_budget import MultiModalBudget
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.worker.gpu_worker import Worker

_AXES = "autoprune_axes"
"""Attribute of a model config: number of axes of the positions that its runner keeps; 0 for none.
"""


@wraps("vllm.config:ModelConfig", "uses_mrope", "mrope_num_dims")
def keep_positions() -> None:
    """Let runners keep the positions that a model computes, if its config asks for it.

    Why: runners keep positions only under M-RoPE, which these two properties report. A state of V2
    could keep its own, but the scheduler reads the first one too: without it, a request whose image
    is in the prefix cache comes without the plan that positions are computed from. Configs of draft
    models, and of models without a state, are unchanged.
    Remove when: any model may compute positions, and say which fields of cached items it needs
    (``strip_covered_mm_data``).
    """
    from vllm.config import ModelConfig

    @patch(ModelConfig, "uses_mrope")
    def uses_mrope(stock: Callable[[ModelConfig], bool], self: ModelConfig) -> bool:
        return bool(getattr(self, _AXES, 0)) or stock(self)

    @patch(ModelConfig, "mrope_num_dims")
    def mrope_num_dims(stock: Callable[[ModelConfig], int], self: ModelConfig) -> int:
        return getattr(self, _AXES, 0) or stock(self)


def keep_axes(model_config: ModelConfig, axes: int) -> None:
    """Have the runners of a model keep positions with this number of axes."""
    setattr(model_config, _AXES, axes)


_POSITIONS = "autoprune_positions"


@wraps("vllm.config:MultiModalConfig", "is_multimodal_pruning_enabled")
def request_positions(config: MultiModalConfig) -> None:
    """Have runners ask the model for positions again once it has selected image tokens.

    Why: runners ask again, and Qwen3-VL sizes its table of rotations for it, only if video pruning
    is on. Turning that on would change how videos are served; patching the one method that both
    read does not. The larger table is right here too: kept tokens may stand beyond the number of
    tokens.
    Remove when: both ask the model (``supports_multimodal_pruning``).
    """

    @patch(type(config), "is_multimodal_pruning_enabled")
    def enabled(stock: Callable[..., bool], self: MultiModalConfig) -> bool:
        return stock(self) or getattr(self, _POSITIONS, False)

    setattr(config, _POSITIONS, True)


_WORKER_RESETS = (
    "reset_encoder_cache",
    "reset_mm_cache",
    "reload_weights",
    "update_weights",
    "finish_weight_update",
)


@depends_on("vllm.v1.worker.gpu_worker:Worker", "get_model")
@wraps("vllm.v1.worker.gpu_worker:Worker", *_WORKER_RESETS)
def clear_with_worker_caches(clear: Callable[[nn.Module], None]) -> None:
    """Call ``clear`` with a worker's model after vLLM cleared its caches or replaced its weights.

    ``clear`` is also called if vLLM's method raises, because weights may be half replaced.

    Why: vLLM clears its image caches and replaces weights without telling the model. Both model
    runners and the CPU worker use these methods. Weight transfers, and ``Worker.reload_weights``
    with ``is_checkpoint_format=False``, copy into parameters without calling ``load_weights``.
    Remove when: vLLM tells a model that its encoder outputs are dropped.
    """
    from vllm.v1.worker.gpu_worker import Worker

    def reset(
        stock: Callable[..., object], self: Worker, *args: object, **named: object
    ) -> object:
        try:
            return stock(self, *args, **named)
        finally:
            clear(self.get_model())

    for name in _WORKER_RESETS:
        patch(Worker, name)(reset)


@depends_on(
    "vllm.multimodal.encoder_budget:MultiModalBudget",
    "get_modality_with_max_tokens",
    "get_dummy_encoder_profile_inputs",
)
def find_largest_images(
    budget: MultiModalBudget,
) -> list[tuple[str, MultiModalKwargsItem]]:
    """As many of the largest images as a step may hold; none if vLLM profiles these itself."""
    if "image" not in budget.mm_max_toks_per_item:
        return []
    if budget.get_modality_with_max_tokens() == "image":
        return []
    return budget.get_dummy_encoder_profile_inputs("image")


@wraps("vllm.v1.engine.core:EngineCore", "sleep")
def refuse_sleep(reason: Callable[[ModelConfig, int], str | None]) -> None:
    """Refuse a level of sleep for which ``reason`` returns a text, before the engine is paused.

    Why: scheduling is paused before workers are told, so after a refusal by a worker the engine
    would answer nothing.
    Remove when: vLLM asks a model which levels of sleep it can wake up from.
    """
    from vllm.v1.engine.core import EngineCore

    @patch(EngineCore, "sleep")
    def sleep(
        stock: Callable[..., object],
        self: EngineCore,
        level: int = 1,
        *args: object,
        **named: object,
    ) -> object:
        refused = reason(self.vllm_config.model_config, level)
        if refused is not None:
            raise ValueError(refused)
        return stock(self, level, *args, **named)


# Collectives over tensor-parallel ranks; every rank has to call them at the same point.


def world_size() -> int:
    """Number of ranks that share the model; 1 if nothing is distributed."""
    from vllm.distributed import get_tp_group, model_parallel_is_initialized

    return int(get_tp_group().world_size) if model_parallel_is_initialized() else 1


def broadcast_rank_zero(tensor: Tensor) -> Tensor:
    """Rank 0's tensor on every rank; all ranks pass tensors of the same shape and dtype."""
    from vllm.distributed import get_tp_group

    broadcast: Tensor = get_tp_group().broadcast(tensor, src=0)
    return broadcast


def is_rank_zero() -> bool:
    """Whether this is rank 0, or nothing is distributed."""
    from vllm.distributed import get_tp_group

    return world_size() == 1 or int(get_tp_group().rank_in_group) == 0


def connect_ranks(device: torch.device) -> None:
    """Make the first broadcast between ranks.

    NCCL creates the communicators of a group in its first collective. That takes seconds, and
    memory that must be in use when vLLM measures what remains for the KV cache. vLLM's own
    collectives use other communicators.
    """
    if world_size() > 1:
        broadcast_rank_zero(torch.zeros(1, device=device))


def leaves_ranks_apart(error: Exception) -> bool:
    """Whether an exception of this rank may not have occurred on the other ranks.

    Several ranks encode an image together. A rank that went on alone would wait for collectives
    that the others do not make, or receive the data of their next one. So the engine ends, as a
    stock engine would. Exceptions that follow from tensors occur on every rank.
    """
    return world_size() > 1 and isinstance(error, torch.OutOfMemoryError)
