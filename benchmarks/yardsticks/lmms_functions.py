"""Functions that lmms-eval calls for the mini-LLaVA task, copied into its folder as `utils.py`.

It imports nothing from this repository, so that a task folder can be used anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

_Record = Mapping[str, object]
"""A question, or what is known of its answer."""


def doc_to_visual(doc: _Record) -> list[Image.Image]:
    """The image of a question; its path is relative to this file."""
    return [Image.open(Path(__file__).parent / str(doc["image"])).convert("RGB")]


def doc_to_text(doc: _Record, lmms_eval_specific_kwargs: object = None) -> str:
    """The question alone: the model was trained without further instructions."""
    return str(doc["question"])


def process_results(doc: _Record, results: Sequence[str]) -> dict[str, _Record]:
    """One row per metric; lmms-eval computes standard errors from ``score`` and the image."""
    expected = str(doc["answer"]).lower().split()
    words = re.findall(r"[a-z0-9]+", results[0].lower())
    score = float(words[: len(expected)] == expected)
    return {"minillava_accuracy": {"image": doc["image"], "score": score}}


def aggregate_accuracy(rows: Sequence[_Record]) -> float:
    """Share of questions answered right."""
    return sum(row["score"] == 1.0 for row in rows) / len(rows)
