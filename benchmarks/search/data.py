"""mini-LLaVA's held-out scenes as a data folder of `vllm-autoprune search`.

Knows nothing about models. The splits are drawn from seeds that share no scene, and none of them is
drawn in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.minillava.split import LEARNT_KINDS, evaluation_split
from benchmarks.minillava.split import Example as Simple
from benchmarks.minillava.yardstick.split import Example as Hard
from benchmarks.minillava.yardstick.split import held_out, png
from offline_search.examples import SPLITS, Example, write_split
from offline_search.records import Split

SEEDS: dict[Split, int] = {"search": 1, "validation": 2, "test": 3}
"""Seeds of :func:`evaluation_split`; 0 is what the README's figures are measured on."""


def questions(split: Split, scenes: int, *, hard: bool) -> Sequence[Simple | Hard]:
    """Questions about the first scenes of a split, of the simple or of the harder family."""
    if hard:
        return held_out(split, scenes)
    asked = evaluation_split(scenes, SEEDS[split])
    return [example for example in asked if example.kind in LEARNT_KINDS]


def write(folder: Path, scenes: dict[Split, int], *, hard: bool) -> None:
    """Write images and the three splits."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        asked = questions(split, scenes[split], hard=hard)
        for example in asked:
            path = folder / image_name(split, example)
            if not path.exists():
                path.write_bytes(png(example.image))
        examples = [as_example(split, example) for example in asked]
        write_split(folder / f"{split}.jsonl", examples)


def as_example(split: Split, example: Simple | Hard) -> Example:
    """A question as the search reads it."""
    return Example(
        image=image_name(split, example),
        question=example.question,
        answer=example.answer,
        category=example.kind,
        pair=example.pair,
    )


def image_name(split: Split, example: Simple | Hard) -> str:
    """Path of an image within the folder."""
    return f"images/{split}-{example.image_id}.png"
