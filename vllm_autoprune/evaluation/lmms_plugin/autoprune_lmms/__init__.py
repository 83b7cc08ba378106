"""A plugin of lmms-eval: its `openai` model, which records images and sends pruning options.

It runs in lmms-eval's process and environment and imports nothing from this repository. The folder
above is put on `PYTHONPATH`; lmms-eval finds the `.dist-info` beside this package by the entry
point group `lmms_eval.models` (lmms_eval/models/registry_v2.py of 0.7.3).
"""

from __future__ import annotations

from lmms_eval.models.registry_v2 import ModelManifest


def manifest() -> ModelManifest:
    """Replace lmms-eval's model of the same name, so that tasks use their prompts for that name."""
    return ModelManifest("openai", chat_class_path=f"{__name__}.model.OpenAIWithImages")
