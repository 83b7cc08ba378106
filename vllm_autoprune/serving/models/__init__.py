"""The backbones that can be served pruned: one record each, the model classes stay unloaded.

Knows nothing about vLLM at import, so that settings are checked before models are built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_autoprune.errors import Problem
from vllm_autoprune.serving.towers import FLAG, TextTower

if TYPE_CHECKING:
    from transformers import LlavaConfig, PreTrainedConfig


@dataclass(frozen=True, slots=True)
class Backbone:
    """One served model family: its class by import path, and what it cannot do."""

    name: str
    model: str
    problems: Callable[[PreTrainedConfig], Sequence[Problem]]
    tower_problems: Callable[[PreTrainedConfig, TextTower], Sequence[Problem]]


def _llava_problems(config: LlavaConfig) -> Sequence[Problem]:
    problems = []
    kind = config.vision_config.model_type
    if kind != "clip_vision_model":
        what = f"vision tower {kind!r} has no [CLS] token to read attention from"
        problems.append(Problem("model", what, "serve a LLaVA with a CLIP vision tower"))
    if config.vision_feature_select_strategy != "default":
        what = f"vision_feature_select_strategy {config.vision_feature_select_strategy!r}"
        problems.append(Problem("model", what, "only 'default' (patches without [CLS]) is known"))
    if not isinstance(config.vision_feature_layer, int):
        what = "reads several vision layers at once"
        problems.append(Problem("model", what, "serve a LLaVA with one vision_feature_layer"))
    return problems


def _llava_tower_problems(config: LlavaConfig, tower: TextTower) -> Sequence[Problem]:
    width = config.vision_config.hidden_size
    if tower.vision_width == width:
        return ()
    what = f"its vision tower is {tower.vision_width} wide, the model's {width}"
    mend = "give the CLIP checkpoint that the model's vision tower comes from"
    return (Problem(f"{FLAG} {tower.path}", what, mend),)


BACKBONES: dict[str, Backbone] = {
    "LlavaForConditionalGeneration": Backbone(
        name="llava",
        model="vllm_autoprune.serving.models.llava:AutopruneLlavaForConditionalGeneration",
        problems=_llava_problems,
        tower_problems=_llava_tower_problems,
    ),
}
"""Hugging Face architecture name -> backbone."""
