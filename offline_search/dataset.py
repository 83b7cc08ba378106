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
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.questions import Example, read_lines

Split = Literal["search", "validation", "test"]

SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class Dataset:
    """The three splits of a data folder, each in evaluation order."""

    folder: Path
    splits: Mapping[Split, Sequence[Example]]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all questions and answers."""
        lines = [e.model_dump_json() for split in SPLITS for e in self.splits[split]]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def examples(self, split: Split) -> Sequence[Example]:
        """The examples of one split."""
        return self.splits[split]

    def image_bytes(self, example: Example) -> bytes:
        """Content of an example's image file."""
        return (self.folder / example.image).read_bytes()


def read_dataset(folder: Path, seed: int = 0, limit: int | None = None) -> Dataset:
    """Read and validate the splits, shuffle each by image, and keep at most ``limit`` images.

    Shuffled, because early stopping looks at the first examples only; whole images, because a
    server computes an image's features once. Raises :class:`ConfigError` that lists every problem:
    unreadable files, invalid lines, images that are missing or in two splits.
    """
    problems: list[Problem] = []
    splits: dict[Split, Sequence[Example]] = {}
    for split in SPLITS:
        examples = read_split(folder / f"{split}.jsonl", problems)
        splits[split] = _shuffle_images(examples, seed, limit)
        if not examples and not problems:
            fix = "give it at least one example"
            problems.append(Problem(f"{split}.jsonl", "contains no example", fix))
    problems += _check_images(folder, splits)
    if problems:
        raise ConfigError(f"data {folder}", problems[:20])
    return Dataset(folder, splits)


def read_split(path: Path, problems: list[Problem]) -> list[Example]:
    """The examples of one JSONL file; problems of the file are added to ``problems``."""
    fix = "a data folder has search.jsonl, validation.jsonl and test.jsonl"
    return [example for _, example in read_lines(path, problems, fix)]


def _shuffle_images(examples: Sequence[Example], seed: int, limit: int | None) -> list[Example]:
    by_image: dict[str, list[Example]] = {}
    for example in examples:
        by_image.setdefault(example.image, []).append(example)
    groups = list(by_image.values())
    random.Random(seed).shuffle(groups)
    return [example for group in groups[:limit] for example in group]


def _check_images(folder: Path, splits: Mapping[Split, Sequence[Example]]) -> list[Problem]:
    """Images that are missing, or whose content is in two splits under any file name."""
    problems, split_by_content = [], dict[str, Split]()
    for split, examples in splits.items():
        for name in dict.fromkeys(example.image for example in examples):
            try:
                content = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            except OSError as error:
                fix = "paths are relative to the data folder"
                problems.append(Problem(name, f"cannot be read ({error.strerror})", fix))
                continue
            other = split_by_content.setdefault(content, split)
            if other != split:
                what = f"the same image is in {other} and in {split}"
                problems.append(Problem(name, what, "splits must share no image"))
    return problems


def write_split(path: Path, examples: Sequence[Example]) -> None:
    """Write one split file of a data folder."""
    lines = [json.dumps(example.model_dump(exclude_none=True)) for example in examples]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
