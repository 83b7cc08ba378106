"""Where the kept tokens of an image stand for the language model, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_autoprune.serving.models import require_served
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.tokens import Positions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PHRASES: Mapping[Positions, str] = {
    "true": "where they stood in the whole image",
    "spread": "evenly over the span of the whole image",
    "packed": "one after the other, as if the image had been small",
}


def _read_packed_reason(config: PretrainedConfig) -> str:
    """Why a checkpoint without M-RoPE has packed positions only; empty where it has others."""
    return ""


def describe_positions(
    state: PruningState, config: PretrainedConfig | None
) -> tuple[Positions, str]:
    """Positions that a checkpoint is served with, and a sentence; None: of any checkpoint.

    Raises :class:`ConfigError` where no state can serve the checkpoint.
    """
    if config is not None and require_served(config).mrope:
        return "true", "Kept tokens keep their places in the image, because the model has M-RoPE."
    if config is not None and (reason := _read_packed_reason(config)):
        return "packed", f"Kept tokens stand {_PHRASES['packed']}: {reason}."
    text = f"Kept tokens stand {_PHRASES[state.positions]}, as the state says"
    text += "." if config is not None else "; with M-RoPE they keep their places in the image."
    return state.positions, text
