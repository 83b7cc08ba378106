"""Patches that only vLLM's model runner V1 needs: positions, encoder calls, memory profiling.

V2 has a place for each of these: the model's own state (``models/model_state.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from vllm_autoprune.serving.compat import patch, wraps
from vllm_autoprune.serving.compat.worker import find_largest_images

if TYPE_CHECKING:
    from torch import Tensor, nn
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


@wraps("vllm.v1.worker.cpu_model_runner:CPUModelRunner", "load_model", runner="v1")
def request_positions_on_cpu() -> None:
    """Have the CPU's model runner ask for positions too.

    Why: the runner's own method, which this one replaces, decides whether to ask.
    Remove when: this one decides that too.
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


_Split = Callable[[Sequence["MultiModalKwargsItem | None"]], list[slice]]
"""``autoprune_split`` of a model: runs of neighbouring images that its encoder takes in one call.
"""


@wraps(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "_execute_mm_encoder", runner="v1"
)
def bound_encoder_calls() -> None:
    """Encode the images of one step in groups, each within what memory profiling measured.

    Why: a step may hold many more images than fit unpruned, because the scheduler counts an image
    by its placeholders, K. The runner stacks the pixels of all of them on
    the device before it calls the model. vLLM encodes pruned videos one by one for the same reason,
    in ``GPUModelRunner._execute_mm_encoder``, but no images.
    Remove when: vLLM's encoder budget counts unpruned tokens, or V1 is no longer used.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @patch(GPUModelRunner, "_execute_mm_encoder")
    def execute(
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


@wraps("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "profile_run", runner="v1")
def profile_images(hold: Callable[[nn.Module], AbstractContextManager[bool]]) -> None:
    """Make memory profiling also encode the largest images, and hold what the model will keep.

    ``hold`` is a context manager that allocates what a model will keep later, until profiling ends.
    It returns whether the model prunes images.

    Why: only the modality with most tokens is encoded, and nothing held that is kept later. For
    Qwen2-VL, Qwen2.5-VL and InternVL that modality is video; if videos are left whole, no selection
    is measured. A model cannot know
    how long profiling takes, and the language model may need the most memory in it.
    Remove when: vLLM profiles every modality, and asks models what they keep between requests.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @patch(GPUModelRunner, "profile_run")
    def profile(
        stock: Callable[..., None], self: GPUModelRunner, *args: bool, **named: bool
    ) -> None:
        with hold(self.get_model()) as prunes:
            if prunes:
                _encode_largest_images(self)
            stock(self, *args, **named)


def _encode_largest_images(runner: GPUModelRunner) -> None:
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
    items = find_largest_images(budget)
    with torch.inference_mode():
        for *_, batch in group_and_batch_mm_kwargs(items, device=runner.device):
            runner.get_model().embed_multimodal(**batch)


_RESENT = "autoprune_features"
"""Attribute of what the scheduler sends about running requests: the items of resumed requests."""


@wraps(
    "vllm.v1.core.sched.scheduler:Scheduler", "_make_cached_request_data", runner="v1"
)
@wraps("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "_update_states", runner="v1")
def resend_features() -> None:
    """Send the images of a request again when it is resumed after a preemption.

    Why: tensors of images that the prefix cache covers are left out (``strip_covered_mm_data``).
    If the request is preempted, other requests may take those blocks, and the images have to be
    encoded after all. Model Runner V2 gets a resumed request anew. V1 keeps the items that it got
    first, and stock vLLM's engine ends: "Encoder cache miss", or tensors that are None.
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
        features = {request.request_id: request.mm_features for request in resumed_reqs}
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
