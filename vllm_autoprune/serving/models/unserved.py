"""Architectures that vLLM serves, that users ask for, and that cannot be served pruned; and why."""

from __future__ import annotations

from collections.abc import Mapping

_ROW_BREAKS = (
    "a token follows every row of an image, so the prompt would have to say how many tokens each "
    "row keeps before any of them is chosen"
)
_RESAMPLER = "a resampler makes its tokens, so none of them stands for a part of the picture"
_OWN_PROCESSOR = "its image processor is Python code of the checkpoint, which the tests do not run"

UNSERVED: Mapping[str, str] = {
    "PixtralForConditionalGeneration": _ROW_BREAKS,
    "Mistral3ForConditionalGeneration": _ROW_BREAKS,
    "Llama4ForConditionalGeneration": (
        "separators stand between the tiles of an image, and its layers attend in chunks of the "
        "whole prompt; the tests do not run it"
    ),
    "MiniCPMV": _RESAMPLER,
    "MiniCPMO": _RESAMPLER,
    "KimiVLForConditionalGeneration": _OWN_PROCESSOR,
    "InternVLChatModel": (
        "its image processor is Python code of the checkpoint; the same model in the format of "
        "transformers (names that end in -hf) is served"
    ),
}
"""Architecture -> why it has no pruned form."""
