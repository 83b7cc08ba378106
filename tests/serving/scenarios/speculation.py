"""The requests of :mod:`modes` under speculative decoding: by n-grams, and by a draft model."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.serving.paths import LLAVA
from tests.serving.scenarios import Report, scenario
from tests.serving.scenarios.modes import answer_together_and_alone, counter, start_mode

_PREFIX = "language_model."


@scenario
def ngram_mode() -> Report:
    """Answers ``together`` and ``alone``; ``drafted`` and ``accepted`` tokens."""
    return _speculate({"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3})


@scenario
def draft_model_mode() -> Report:
    """The same with mini-LLaVA's language model as the draft model, which sees no image."""
    with tempfile.TemporaryDirectory() as folder:
        return _speculate({"method": "draft_model", "model": str(_write_draft(Path(folder)))})


def _speculate(config: dict[str, object]) -> Report:
    llm = start_mode(speculative_config={**config, "num_speculative_tokens": 3})
    report = answer_together_and_alone(llm)
    for name in ("draft", "accepted"):
        report[name] = counter(llm, f"vllm:spec_decode_num_{name}_tokens")
    return report


def _write_draft(folder: Path) -> Path:
    """The language model of mini-LLaVA as a checkpoint of its own."""
    weights = load_file(LLAVA / "model.safetensors")
    text = {k.removeprefix(_PREFIX): v for k, v in weights.items() if k.startswith(_PREFIX)}
    save_file(text, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((LLAVA / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config["text_config"]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAVA / name, folder)
    return folder
