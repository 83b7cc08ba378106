"""mini-LLaVA's held-out scenes as a data folder of `vllm-autoprune search`.

Knows nothing about models. The splits are drawn from seeds that share no scene, and none of them is
drawn in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from random import Random

from benchmarks.minillava.split import Example as Asked
from benchmarks.minillava.split import held_out, png
from offline_search.examples import SPLITS, Example, write_split
from offline_search.records import Split


def questions(split: Split, scenes: int, *, each: int | None = None) -> Sequence[Asked]:
    """Questions about the first scenes of a split.

    ``each`` is the most that are asked about one scene, drawn from all; pairs stay together.
    Questions about one scene share its luck: few about many scenes tell more than many about few.
    """
    asked = held_out(split, scenes)
    if each is None:
        return asked
    by_scene = groupby(asked, key=lambda one: one.image_id)
    return [one for scene, group in by_scene for one in _drawn(list(group), each, Random(scene))]


def _drawn(asked: list[Asked], each: int, dice: Random) -> list[Asked]:
    """At most so many of one scene's questions, in their order; half a pair is not asked."""
    groups = [list(group) for _, group in groupby(enumerate(asked), key=_group)]
    dice.shuffle(groups)
    found: list[tuple[int, Asked]] = []
    for group in groups:
        if len(found) + len(group) <= each:
            found += group
    return [one for _, one in sorted(found, key=lambda numbered: numbered[0])]


def _group(numbered: tuple[int, Asked]) -> tuple[str, int]:
    """What a question is asked together with: the other of its pair, or nothing."""
    place, one = numbered
    return ("alone", place) if one.pair is None else ("pair", one.pair)


def write(folder: Path, scenes: dict[Split, int], *, each: int | None = None) -> None:
    """Write images and the three splits."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        asked = questions(split, scenes[split], each=each)
        for example in asked:
            path = folder / image_name(split, example)
            if not path.exists():
                path.write_bytes(png(example.image))
        examples = [as_example(split, example) for example in asked]
        write_split(folder / f"{split}.jsonl", examples)


def as_example(split: Split, example: Asked) -> Example:
    """A question as the search reads it."""
    return Example(
        image=image_name(split, example),
        question=example.question,
        answer=example.answer,
        category=example.kind,
        pair=example.pair,
    )


def image_name(split: Split, example: Asked) -> str:
    """Path of an image within the folder."""
    return f"images/{split}-{example.image_id}.png"
