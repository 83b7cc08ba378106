"""Data set of questions with reference answers, in three splits that share no image.

A data folder has ``search.jsonl``, ``validation.jsonl`` and ``test.jsonl``;
a line is ``{"image": "images/7.png", "question": ..., "answer": ..., "category": ...}``, and may
have ``"pair": 3``, shared by the two yes/no questions that MME scores together.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from vllm_autoprune.errors import Problem
from vllm_autoprune.evaluation.questions import Example, read_examples, refuse

Split = Literal["search", "validation", "test"]

SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class Dataset:
    """The three splits of a data folder, each in evaluation order."""

    folder: Path
    splits: Mapping[Split, Sequence[Example]]
    images: Mapping[str, str] = field(default_factory=dict)
    """Data URLs by the examples' ``image``."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all questions and answers."""
        lines = [e.model_dump_json() for split in SPLITS for e in self.splits[split]]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def examples(self, split: Split) -> Sequence[Example]:
        """The examples of one split."""
        return self.splits[split]


def read_dataset(folder: Path, seed: int = 0, limit: int | None = None) -> Dataset:
    """Read and validate the splits, shuffle each by image, and keep at most ``limit`` images.

    Shuffled, because early stopping looks at the first examples only; whole images, because a
    server computes an image's features once. Raises :class:`ConfigError` that lists every problem:
    those of ``vllm-autoprune eval``, and images in two splits.
    """
    problems: list[Problem] = []
    splits: dict[Split, Sequence[Example]] = {}
    images: dict[str, str] = {}
    split_of_url: dict[str, Split] = {}
    for split in SPLITS:
        fix = "a data folder has search.jsonl, validation.jsonl and test.jsonl"
        examples, urls = read_examples(folder / f"{split}.jsonl", problems, fix)
        by_image: dict[str, list[Example]] = {}
        for example in examples:
            by_image.setdefault(example.image, []).append(example)
        groups = list(by_image.values())
        random.Random(seed).shuffle(groups)
        splits[split] = [example for group in groups[:limit] for example in group]
        images |= {e.image: urls[e.image] for e in splits[split] if e.image in urls}
        for name, url in urls.items():
            other = split_of_url.setdefault(url, split)
            if other != split:
                what = f"the same image is in {other} and in {split}"
                problems.append(Problem(name, what, "splits must share no image"))
    refuse("data", problems)
    return Dataset(folder, splits, images)


def write_split(path: Path, examples: Sequence[Example]) -> None:
    """Write one split file of a data folder."""
    lines = [json.dumps(example.model_dump(exclude_none=True)) for example in examples]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
