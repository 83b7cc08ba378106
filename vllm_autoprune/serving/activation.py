"""Makes a process serve an architecture pruned: its model class, its renderer, what runners ask.

Knows nothing about states: called wherever one arrives (``config``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_autoprune.serving import compat
from vllm_autoprune.serving.models import BACKBONES

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_active: set[str] = set()


def activate(architecture: str) -> None:
    """Put our classes in the place of vLLM's for one architecture; once, however often called.

    The classes put in place serve stock models unchanged, because each looks for a state in its
    own model's config.
    """
    if architecture in _active:
        return
    from vllm_autoprune.serving import engine_requests  # it reads the state that is being activated

    _active.add(architecture)
    backbone = BACKBONES[architecture]
    compat.register_model(architecture, backbone.model)
    if backbone.mrope:
        compat.let_cpu_runner_ask()
    engine_requests.watch_requests()
    compat.register_renderer("hf", "vllm_autoprune.serving.renderer", "AutopruneHfRenderer")
    compat.refuse_sleep(sleep_problem)


def sleep_problem(model_config: ModelConfig, level: int) -> str | None:
    """Why a server cannot wake up from a level of sleep; None where it can.

    Level 2 discards weights, and what reloads the checkpoint's does not reload the text tower's.
    """
    from vllm_autoprune.serving.served import served_state  # which imports this module

    served = served_state(model_config)
    if level < 2 or served is None or served.tower is None:
        return None
    return (
        f"sleep level {level} would discard the weights of --autoprune-text-tower, which are not "
        "part of the checkpoint and are not loaded again; use level 1"
    )
