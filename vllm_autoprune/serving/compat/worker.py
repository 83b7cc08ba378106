"""Patches of vLLM's engine core and workers: positions, caches, encoder calls, collectives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

from vllm_autoprune.serving.compat import depends_on, patch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from vllm.config import ModelConfig, MultiModalConfig
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
    from vllm.v1.worker.gpu.mm.rope import RopeState
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
    from vllm.v1.worker.gpu_worker import Worker

_AXES = "autoprune_axes"
"""Attribute of a model config: number of axes of the positions that its runner keeps; 0 for none.
"""


@depends_on("vllm.config:ModelConfig", "uses_mrope", "mrope_num_dims")
def keep_positions() -> None:
    """Let runners keep the positions that a model computes, if its config asks for it.

    Why: runners keep positions only under M-RoPE, which these two properties report. Configs of
    draft models, and of models without a state, are unchanged.
    Remove when: any model may compute positions, as by ``ModelState.prepare_inputs`` of V2.
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

UNCHANGED_DELTA = -(2**31)
"""Delta that tells a runner to keep the delta that was known when the request arrived. A delta is
added to the index of a generated token to get its position."""


@depends_on("vllm.config:MultiModalConfig", "is_multimodal_pruning_enabled")
@depends_on("vllm.v1.worker.gpu.mm.rope:RopeState", "update_prefill_positions")
def request_positions(config: MultiModalConfig) -> None:
    """Have runners ask the model for positions again once it has selected image tokens.

    The model may leave a request's delta unchanged (:data:`UNCHANGED_DELTA`).

    Why: runners call ``recompute_mrope_positions`` only if video pruning is on. Turning that on
    would change how videos are served; patching the one property that runners read does not.
    Qwen3-VL sizes its table of rotations by the same property, which is right here too: kept tokens
    may stand beyond the number of tokens. Model Runner V2 takes the delta as a number on the host,
    while positions are on the device, so a model that computed it from them would wait for all
    queued work of the device.
    Remove when: runners ask every model that declares ``supports_multimodal_pruning``, and
    ``RopeState.update_prefill_positions`` takes a tensor, or no delta.
    """
    from vllm.v1.worker.gpu.mm.rope import RopeState

    @patch(type(config), "is_multimodal_pruning_enabled")
    def enabled(stock: Callable[..., bool], self: MultiModalConfig) -> bool:
        return stock(self) or getattr(self, _POSITIONS, False)

    @patch(RopeState, "update_prefill_positions")
    def update(
        stock: Callable[..., None],
        self: RopeState,
        req_idx: int,
        positions: Tensor,
        delta: int,
    ) -> None:
        if delta == UNCHANGED_DELTA:
            delta = int(self.prefill_delta.np[req_idx])
        stock(self, req_idx, positions, delta)

    setattr(config, _POSITIONS, True)


@depends_on("vllm.v1.worker.cpu_model_runner:CPUModelRunner", "load_model")
def request_positions_on_cpu() -> None:
    """Have the CPU's model runner V1 ask for positions too.

    Why: ``CPUModelRunner.load_model`` replaces the method that decides whether to ask.
    Remove when: it decides that itself.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    @patch(CPUModelRunner, "load_model")
    def load_model(
        stock: Callable[..., None], self: CPUModelRunner, *args: bool, **named: bool
    ) -> None:
        from vllm.model_executor.models.interfaces import supports_multimodal_pruning

        stock(self, *args, **named)
        config = self.model_config.multimodal_config
        if config is not None and supports_multimodal_pruning(self.get_model()):
            self.is_multimodal_pruning_enabled = config.is_multimodal_pruning_enabled()


_WORKER_RESETS = (
    "reset_encoder_cache",
    "reset_mm_cache",
    "reload_weights",
    "update_weights",
    "finish_weight_update",
)


@depends_on("vllm.v1.worker.gpu_worker:Worker", "get_model", *_WORKER_RESETS)
def clear_with_worker_caches(clear: Callable[[nn.Module], None]) -> None:
    """Call ``clear`` with a worker's model after vLLM cleared its caches or replaced its weights.

    ``clear`` is also called if vLLM's method raises, because weights may be half replaced.

    Why: vLLM clears its own image caches by these methods of ``vllm.v1.worker.gpu_worker.Worker``,
    which both model runners and the CPU worker use, without telling the model. Weight transfers,
    and ``Worker.reload_weights`` with ``is_checkpoint_format=False``, copy into parameters without
    calling the model's ``load_weights``.
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


_Split = Callable[[Sequence["MultiModalKwargsItem | None"]], list[slice]]
"""``autoprune_split`` of a model: runs of neighbouring images that its encoder takes in one call.
"""


@depends_on("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "_execute_mm_encoder")
@depends_on("vllm.v1.worker.gpu.mm.encoder_runner:EncoderRunner", "execute_mm_encoder")
def bound_encoder_calls() -> None:
    """Encode the images of one step in groups, each within what memory profiling measured.

    Why: the scheduler counts an image by its placeholders, K, so a step may hold many more images
    than the encoder budget has room for unpruned. Both runners stack the pixels of all of them on
    the device before they call the model. vLLM encodes pruned videos one by one for the same
    reason, in ``GPUModelRunner._execute_mm_encoder``, but no images.
    Remove when: vLLM's encoder budget counts unpruned tokens, or its runners ask the model how many
    items to encode at once.
    """
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @patch(GPUModelRunner, "_execute_mm_encoder")
    def execute_v1(
        stock: Callable[[GPUModelRunner, SchedulerOutput], list[Tensor]],
        self: GPUModelRunner,
        scheduler_output: SchedulerOutput,
    ) -> list[Tensor]:
        split: _Split | None = getattr(self.get_model(), "autoprune_split", None)
        scheduled = scheduler_output.scheduled_encoder_inputs
        places = [(request, i) for request, inputs in scheduled.items() for i in inputs]
        if split is None or len(places) < 2:
            return stock(self, scheduler_output)
        features = [self.requests[request].mm_features[i] for request, i in places]
        groups = split([feature.data for feature in features])
        if len(groups) == 1:
            return stock(self, scheduler_output)
        outputs: list[Tensor] = []
        for some in groups:
            part = copy.copy(scheduler_output)
            part.scheduled_encoder_inputs = {}
            for request, i in places[some]:
                part.scheduled_encoder_inputs.setdefault(request, []).append(i)
            outputs += stock(self, part)
        return outputs

    @patch(EncoderRunner, "execute_mm_encoder")
    def execute_v2(
        stock: Callable[..., list[Tensor]],
        self: EncoderRunner,
        mm_kwargs: list[tuple[str, MultiModalKwargsItem]],
    ) -> list[Tensor]:
        split: _Split | None = getattr(self.model, "autoprune_split", None)
        if split is None or len(mm_kwargs) < 2:
            return stock(self, mm_kwargs)
        groups = split([item for _, item in mm_kwargs])
        return [output for some in groups for output in stock(self, mm_kwargs[some])]


@depends_on("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "profile_run")
@depends_on("vllm.v1.worker.gpu.model_runner:GPUModelRunner", "profile_run")
@depends_on(
    "vllm.multimodal.encoder_budget:MultiModalBudget",
    "get_modality_with_max_tokens",
    "get_dummy_encoder_profile_inputs",
)
def profile_images(hold: Callable[[nn.Module], AbstractContextManager[bool]]) -> None:
    """Make memory profiling also encode the largest images, and hold what the model will keep.

    ``hold`` is a context manager that allocates what a model will keep later, until profiling ends.
    It returns whether the model prunes images.

    Why: ``profile_run`` encodes only the modality with most tokens, which is video for Qwen2-VL,
    Qwen2.5-VL and InternVL; if videos are left whole, no selection is measured. A model cannot know
    how long profiling takes, and the language model may need the most memory in it.
    Remove when: vLLM profiles every modality, and asks models what they keep between requests.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    def profile(
        stock: Callable[..., None],
        self: RunnerV1 | RunnerV2,
        *args: bool,
        **named: bool,
    ) -> None:
        with hold(self.get_model()) as prunes:
            if prunes:
                _encode_largest_images(self)
            stock(self, *args, **named)

    for runner in (RunnerV1, RunnerV2):
        patch(runner, "profile_run")(profile)


def _encode_largest_images(runner: RunnerV1 | RunnerV2) -> None:
    """Encode as many of the largest images as a step may hold, unless vLLM does so itself."""
    import torch
    from vllm.multimodal.encoder_budget import MultiModalBudget
    from vllm.multimodal.utils import group_and_batch_mm_kwargs

    config = runner.model_config.multimodal_config
    if config is None or config.skip_mm_profiling:
        return
    budget = MultiModalBudget(
        runner.vllm_config, runner.mm_registry, enable_cache=False
    )
    if "image" not in budget.mm_max_toks_per_item:
        return
    if budget.get_modality_with_max_tokens() == "image":
        return
    items = budget.get_dummy_encoder_profile_inputs("image")
    with torch.inference_mode():
        for *_, batch in group_and_batch_mm_kwargs(items, device=runner.device):
            runner.get_model().embed_multimodal(**batch)


class _EncoderSteps(Protocol):
    """Bound of the encoder inputs that a scheduler takes in one step."""

    def admits(self, request: Request, input_id: int, budget: int) -> bool:
        """Whether the step has room for an encoder input, with ``budget`` left of vLLM's own."""

    def take(self, request: Request, input_id: int) -> None:
        """Count an input for which the step has room."""

    def schedule(self, request: Request, input_id: int) -> None:
        """Record that an input is encoded, or loaded, in this step."""

    def end(self) -> None:
        """End the step."""


_STEPS = "_autoprune_steps"
"""Attribute of an encoder cache manager that holds its :class:`_EncoderSteps`."""


@depends_on(
    "vllm.v1.core.encoder_cache_manager:EncoderCacheManager",
    "can_allocate",
    "allocate",
    "get_freed_mm_hashes",
)
def bound_encoder_steps(make_steps: Callable[[], _EncoderSteps]) -> None:
    """Bound the encoder work of a step, of which vLLM's encoder budget counts too little.

    Why: the scheduler counts an encoder input by the tokens that it keeps. At K = N/8 a step would
    hold eight times the tower's work, and all other requests would wait for it. A recall, or a
    state that a request brings, keeps few tokens but costs a whole selection.
    Remove when: a plugin can say what an encoder input costs.
    """
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    @patch(EncoderCacheManager, "can_allocate")
    def can_allocate(
        stock: Callable[..., bool],
        self: EncoderCacheManager,
        request: Request,
        input_id: int,
        encoder_compute_budget: int,
        *rest: object,
    ) -> bool:
        steps: _EncoderSteps = self.__dict__.setdefault(_STEPS, make_steps())
        if not steps.admits(request, input_id, encoder_compute_budget):
            return False
        if not stock(self, request, input_id, encoder_compute_budget, *rest):
            return False
        steps.take(request, input_id)
        return True

    @patch(EncoderCacheManager, "allocate")
    def allocate(
        stock: Callable[..., None],
        self: EncoderCacheManager,
        request: Request,
        input_id: int,
    ) -> None:
        # Not every input with room is scheduled: KV blocks may be lacking.
        stock(self, request, input_id)
        if _STEPS in self.__dict__:
            self.__dict__[_STEPS].schedule(request, input_id)

    @patch(EncoderCacheManager, "get_freed_mm_hashes")
    def get_freed_mm_hashes(
        stock: Callable[..., list[str]], self: EncoderCacheManager
    ) -> list[str]:
        # The scheduler calls this once, at the end of each step.
        if _STEPS in self.__dict__:
            self.__dict__[_STEPS].end()
        return stock(self)


_RESENT = "autoprune_features"
"""Attribute of what the scheduler sends about running requests: the items of resumed requests."""


@depends_on("vllm.v1.core.sched.scheduler:Scheduler", "_make_cached_request_data")
@depends_on("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "_update_states")
def resend_features() -> None:
    """Send the images of a request again when it is resumed after a preemption.

    Why: ``NewRequestData.from_request`` leaves out the tensors of images that the prefix cache
    covers (``strip_covered_mm_data``). If the request is preempted, other requests may take those
    blocks, and the images have to be encoded after all. Model Runner V2 gets a resumed request
    anew. V1 keeps the items that it got first, and stock vLLM's engine ends: "Encoder cache miss",
    or tensors that are None.
    Remove when: ``CachedRequestData`` has the items of resumed requests.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @patch(Scheduler, "_make_cached_request_data")
    def make_cached_request_data(
        stock: Callable[..., CachedRequestData],
        self: Scheduler,
        running_reqs: list[Request],
        resumed_reqs: list[Request],
        *args: object,
        **named: object,
    ) -> CachedRequestData:
        data = stock(self, running_reqs, resumed_reqs, *args, **named)
        if not self.use_v2_model_runner:
            features = {
                request.request_id: request.mm_features for request in resumed_reqs
            }
            setattr(data, _RESENT, features)
        return data

    @patch(GPUModelRunner, "_update_states")
    def update_states(
        stock: Callable[..., object],
        self: GPUModelRunner,
        scheduler_output: SchedulerOutput,
        *args: object,
        **named: object,
    ) -> object:
        resent = getattr(scheduler_output.scheduled_cached_reqs, _RESENT, {})
        for request_id, features in resent.items():
            state = self.requests[request_id]
            # Items are always sent whole here: an address in shared memory was replaced by its
            # tensors.
            state.mm_features = [
                present if "address" in (feature.data or {}) else feature
                for present, feature in zip(state.mm_features, features, strict=True)
            ]
        return stock(self, scheduler_output, *args, **named)


@depends_on("vllm.v1.engine.core:EngineCore", "sleep")
def refuse_sleep(reason: Callable[[ModelConfig, int], str | None]) -> None:
    """Refuse a level of sleep for which ``reason`` returns a text, before the engine is paused.

    Why: ``EngineCore.sleep`` pauses scheduling and then tells the workers, so after a refusal by a
    worker the engine would answer nothing.
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
