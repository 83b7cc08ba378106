"""A backbone that no table of the plugin has: a model of Qwen3-VL's kind, from another package.

Beside vLLM's class there are its row, its pruned form, and what its tiny model has other than
Qwen3-VL's. Importing this module adds the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.utils import WeightsMapper

from vllm_autoprune.selftest.backbones import TINY_MODELS
from vllm_autoprune.serving.models import _NAMED, BACKBONES, Backbone, _qwen
from vllm_autoprune.serving.models.grid import prune_grid
from vllm_autoprune.serving.models.qwen import _Qwen3Vision

ARCHITECTURE = "AddedForConditionalGeneration"


class AddedForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """Its weights have other names, so that Qwen3-VL's class does not load them."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "eyes.": "visual.",
            "lm_head.": "language_model.lm_head.",
            "model.language_model.": "language_model.model.",
        }
    )


@dataclass(frozen=True)
class _RowHere(Backbone):
    """A row whose pruned form is in this module."""

    @property
    def model(self) -> str:
        return f"{__name__}:Autoprune{self.stock}"


BACKBONES[ARCHITECTURE] = _RowHere(
    **vars(_qwen("added", ARCHITECTURE, whole_tower="", **_NAMED))
)
AutopruneAddedForConditionalGeneration = prune_grid(
    AddedForConditionalGeneration, _Qwen3Vision
)
TINY_MODEL: dict[str, Any] = {
    **TINY_MODELS["qwen3_vl"],
    "model_type": "qwen3_vl",
    "published": {"architectures": [ARCHITECTURE]},
    "renamed": {"model.visual.": "eyes."},
}
