"""Functions that lmms-eval calls for the mini-LLaVA task, copied into its folder as `utils.py`.

It imports nothing from this repository, so that a task folder can be used anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

Record = Mapping[str, object]
"""A question, or what is known of its answer."""


def doc_to_visual(doc: Record) -> list[Image.Image]:
    """The image of a question; its path is relative to this file."""
    return [Image.open(Path(__file__).parent / str(doc["image"])).convert("RGB")]


def doc_to_text(doc: Record, lmms_eval_specific_kwargs: Mapping[str, str] | None = None) -> str:
    """The question alone by default: the model was trained without further instructions."""
    prompts = lmms_eval_specific_kwargs or {}
    return f"{prompts.get('pre_prompt', '')}{doc['question']}{prompts.get('post_prompt', '')}"


def process_results(doc: Record, results: Sequence[str]) -> dict[str, Record]:
    """One row per metric; lmms-eval computes standard errors from ``score`` and the image."""
    expected = str(doc["answer"]).lower().split()
    words = re.findall(r"[a-z0-9]+", results[0].lower())
    row = {name: doc[name] for name in ("image", "category", "pair")}
    row["score"] = float(words[: len(expected)] == expected)
    return {"minillava_accuracy": row, "minillava_accuracy_plus": row}


def aggregate_accuracy(rows: Sequence[Record]) -> float:
    """Share of questions answered right."""
    return sum(row["score"] == 1.0 for row in rows) / len(rows)


def aggregate_accuracy_plus(rows: Sequence[Record]) -> float:
    """Share of yes/no pairs with both answers right, as in MME; 0 where there is no pair."""
    pairs: dict[object, list[bool]] = {}
    for row in rows:
        if row["pair"] is not None:
            pairs.setdefault(row["pair"], []).append(row["score"] == 1.0)
    return sum(map(all, pairs.values())) / len(pairs) if pairs else 0.0
