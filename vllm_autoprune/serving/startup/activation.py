"""Registration of the pruned model class, its processor and renderer, in each process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_autoprune.serving import compat
from vllm_autoprune.serving.api import engine_requests, misplaced_fields, request_headers
from vllm_autoprune.serving.compat import api, worker
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.shared import receiver_cache
from vllm_autoprune.serving.shared.plan import is_recall
from vllm_autoprune.serving.shared.served_state import served_state

if TYPE_CHECKING:
    from vllm.config import ModelConfig

ATTRIBUTE = "autoprune_activation"

_active: set[str] = set()


def activate(architecture: str) -> None:
    """Replace vLLM's classes for one architecture by the pruned ones; idempotent.

    They serve stock models unchanged, because each looks for a state on its own model's config.
    """
    if architecture in _active:
        return
    _active.add(architecture)
    backbone = BACKBONES[architecture]
    compat.register_model(architecture, backbone.model)
    if backbone.mrope:
        worker.request_positions_on_cpu()
    engine_requests.watch_requests()
    api.check_requests(misplaced_fields.check_request, request_headers.handling)
    receiver_cache.cache_without_plans()
    api.register_renderer("hf", "vllm_autoprune.serving.api.renderer", "AutopruneHfRenderer")
    worker.spread_recalls(is_recall)
    worker.refuse_sleep(sleep_problem)


class Activation:
    """Attribute of the model config that activates every process which unpickles the config.

    vLLM pickles the config for its engine cores and workers, and a process must have our classes
    registered before it builds the model.
    """

    def __init__(self, architecture: str) -> None:
        activate(architecture)
        self.architecture = architecture

    def __reduce__(self) -> tuple[type[Activation], tuple[str]]:
        return Activation, (self.architecture,)


def sleep_problem(model_config: ModelConfig, level: int) -> str | None:
    """Reason why a server cannot wake up from a sleep level; None if it can.

    Level 2 discards weights, and what reloads the checkpoint's does not reload the text tower's.
    """
    served = served_state(model_config)
    if level < 2 or served is None or served.tower is None:
        return None
    return (
        f"sleep level {level} would discard the weights of --autoprune-text-tower, which are not "
        "part of the checkpoint and are not loaded again; use level 1"
    )
