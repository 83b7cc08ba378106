"""Description of the positions that kept tokens have in the language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_autoprune.serving.models import find_packed_reason, require_served
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import POSITIONS, Positions

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def describe_positions(
    state: PruningState, config: PretrainedConfig | None
) -> tuple[Positions, str]:
    """Positions that ``state`` is served with on a checkpoint, and a sentence that explains them.

    Without a ``config`` the sentence covers every checkpoint. Raises :class:`ConfigError` for a
    checkpoint that no state can serve.
    """
    backbone = None if config is None else require_served(config)
    if backbone is not None and backbone.mrope:
        return (
            "true",
            "Kept tokens keep their places in the image, because the model has M-RoPE.",
        )
    if backbone is not None and (reason := find_packed_reason(backbone, config)):
        return "packed", f"Kept tokens stand {POSITIONS['packed']}: the model {reason}."
    text = f"Kept tokens stand {POSITIONS[state.positions]}, as the state says"
    text += (
        "."
        if config is not None
        else "; with M-RoPE they keep their places in the image."
    )
    return state.positions, text
