"""Commands of examples, checked as vLLM would read them."""

from __future__ import annotations

import re

from tests.serving.unit.configurations import LLAVA, vllm_config
from vllm_autoprune.serving.startup import _resolve_settings


def flags_of(words: list[str]) -> dict[str, object]:
    """Settings of the plugin among the words of a command line."""
    pairs = re.findall(r"--autoprune-([a-z-]+)[= ](\S+)", " ".join(words))
    return {name.replace("-", "_"): value for name, value in pairs}


QWEN = "Qwen2_5_VLForConditionalGeneration"


def require_valid(words: list[str]) -> None:
    """Resolve the settings as a server does at start-up, but for the text tower's download."""
    settings = flags_of(words)
    assert str(settings.pop("text_tower", "openai/")).startswith("openai/")
    served = {"/Qwen3-VL": "Qwen3VLForConditionalGeneration", "/Qwen2.5-VL": QWEN}
    names = [
        name for part, name in served.items() if any(part in word for word in words)
    ]
    config = vllm_config(architecture=next(iter(names), LLAVA))
    assert _resolve_settings(settings, config) is not None
