"""Makes a process serve an architecture pruned: its model class, its renderer, what runners ask.

Knows nothing about states: called wherever one arrives (``config``).
"""

from __future__ import annotations

from vllm_autoprune.serving import compat
from vllm_autoprune.serving.models import BACKBONES

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
