"""A plugin of lmms-eval: its `openai` model, which also tells what images it sent.

Knows nothing about this repository: it runs in lmms-eval's process and environment. The folder
above is put on `PYTHONPATH`; the `.dist-info` beside this package is how lmms-eval finds it, by the
entry point group `lmms_eval.models` (lmms_eval/models/registry_v2.py of 0.7.3).
"""

from __future__ import annotations

from lmms_eval.models.registry_v2 import ModelManifest


def manifest() -> ModelManifest:
    """Takes the place of the model of this name, so that tasks word their prompts as for it."""
    return ModelManifest("openai", chat_class_path=f"{__name__}.model.OpenAIWithImages")
