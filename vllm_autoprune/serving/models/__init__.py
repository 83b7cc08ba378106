"""Registry of backbones that can be served pruned.

Model classes are named by import path: settings are checked before vLLM's models are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_autoprune.errors import Problem
from vllm_autoprune.serving.models.checkpoint_checks import (
    accept_checkpoint,
    check_clip_checkpoint,
    check_clip_inputs,
    check_clip_text_tower,
    check_merger_inputs,
    check_siglip_checkpoint,
    refuse_text_tower,
    refuse_tower_inputs,
)
from vllm_autoprune.serving.shared.text_tower import TextTower
from vllm_autoprune.tpdsl.tokens import Need

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


_PREFIX = "Autoprune"


@dataclass(frozen=True, slots=True)
class Backbone:
    """One served model family: import path of its class, and its start-up checks."""

    name: str
    model: str
    problems: Callable[[PreTrainedConfig], Sequence[Problem]] = accept_checkpoint
    tower_problems: Callable[[PreTrainedConfig, TextTower], Sequence[Problem]] = refuse_text_tower
    input_problems: Callable[[PreTrainedConfig, Collection[Need]], Sequence[Problem]] = (
        refuse_tower_inputs
    )
    """What a state reads and this checkpoint cannot give."""
    mrope: bool = False
    """Whether tokens have positions of their own in time, height and width."""
    unsplittable: str = ""
    """Why an image cannot be several items of a prompt; empty where it can."""

    @property
    def stock(self) -> str:
        """Name of the class in vLLM that is served pruned."""
        return self.model.rpartition(f":{_PREFIX}")[2]


def _at(module: str, stock: str) -> str:
    return f"vllm_autoprune.serving.models.{module}:{_PREFIX}{stock}"


def _clip(name: str, stock: str) -> Backbone:
    """A model of the LLaVA family with a CLIP tower."""
    return Backbone(
        name, _at(name, stock), check_clip_checkpoint, check_clip_text_tower, check_clip_inputs
    )


_LLAVA = "LlavaForConditionalGeneration"
_LLAVA_NEXT = "LlavaNextForConditionalGeneration"

_ONEVISION = "LlavaOnevisionForConditionalGeneration"
_GEMMA3 = "Gemma3ForConditionalGeneration"
_QWEN = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}

_IDEFICS = {
    "idefics3": "Idefics3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
}
_GLM = {
    "glm4v": "Glm4vForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
}

BACKBONES: dict[str, Backbone] = {
    _LLAVA: _clip("llava", _LLAVA),
    _LLAVA_NEXT: _clip("llava_next", _LLAVA_NEXT),
    **{
        stock: Backbone(name, _at(module, stock), input_problems=check_merger_inputs, mrope=True)
        for module, family in (("qwen_vl", _QWEN), ("glm4v", _GLM))
        for name, stock in family.items()
    },
    _ONEVISION: Backbone(
        "llava_onevision", _at("llava_onevision", _ONEVISION), check_siglip_checkpoint
    ),
    "InternVLForConditionalGeneration": Backbone(
        "internvl",
        _at("internvl", "InternS1ForConditionalGeneration"),
        input_problems=check_merger_inputs,
        unsplittable="writes the tokens that begin and end an image around every item",
    ),
    **{
        stock: Backbone(
            name,
            _at("idefics3", stock),
            input_problems=check_merger_inputs,
            unsplittable="writes text around the tiles of every item",
        )
        for name, stock in _IDEFICS.items()
    },
    _GEMMA3: Backbone(
        "gemma3",
        _at("gemma3", _GEMMA3),
        unsplittable="lets the tokens of an image see those that follow them",
    ),
}
"""Hugging Face architecture name -> backbone."""
