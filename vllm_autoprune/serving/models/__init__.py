"""The backbones that can be served pruned: one record each, the model classes stay unloaded.

Knows nothing about vLLM at import, so that settings are checked before models are built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_autoprune.errors import Problem
from vllm_autoprune.serving.towers import FLAG, TextTower
from vllm_autoprune.serving.words import LAST_WORDS
from vllm_autoprune.tpdsl.tokens import Need

if TYPE_CHECKING:
    from transformers import LlavaConfig, PreTrainedConfig


@dataclass(frozen=True, slots=True)
class Backbone:
    """One served model family: its class by import path, and what it cannot do."""

    name: str
    model: str
    problems: Callable[[PreTrainedConfig], Sequence[Problem]]
    tower_problems: Callable[[PreTrainedConfig, TextTower], Sequence[Problem]]
    input_problems: Callable[[PreTrainedConfig, Collection[Need]], Sequence[Problem]]
    """What a state reads and this checkpoint cannot give."""


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


def _llava_input_problems(config: LlavaConfig, needs: Collection[Need]) -> Sequence[Problem]:
    problems = []
    mend = "serve another state, or another checkpoint"
    vision, text = config.vision_config, config.text_config
    if "next_layer" in needs:
        layers, reads = vision.num_hidden_layers, config.vision_feature_layer
        if reads in (-1, layers):
            what = "the model reads the vision tower's last layer, and the state the one after it"
            problems.append(Problem("model", what, mend))
    if "language" in needs:
        if text.model_type != "llama":
            what = f"the state reads the first layers of a llama, not of {text.model_type!r}"
            problems.append(Problem("model", what, mend))
        elif not isinstance(text.bos_token_id, int):
            what = f"bos_token_id {text.bos_token_id!r} is no token to begin a sequence with"
            problems.append(Problem("model", what, mend))
        side = vision.image_size // vision.patch_size
        longest = 1 + side * side + LAST_WORDS
        if text.max_position_embeddings < longest:
            what = f"max_position_embeddings {text.max_position_embeddings} is below {longest}"
            problems.append(Problem("model", what, mend))
    return problems


BACKBONES: dict[str, Backbone] = {
    "LlavaForConditionalGeneration": Backbone(
        name="llava",
        model="vllm_autoprune.serving.models.llava:AutopruneLlavaForConditionalGeneration",
        problems=_llava_problems,
        tower_problems=_llava_tower_problems,
        input_problems=_llava_input_problems,
    ),
}
"""Hugging Face architecture name -> backbone."""
