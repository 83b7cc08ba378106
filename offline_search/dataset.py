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

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.formats import AskedQuestion, ask, render
from vllm_autoprune.evaluation.pictures import Picture
from vllm_autoprune.evaluation.questions import Example, read_asked, read_examples, refuse

Split = Literal["search", "validation", "test"]

SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class Dataset:
    """The three splits of a data folder, each in evaluation order."""

    folder: Path
    splits: Mapping[Split, Sequence[Example]]
    images: Mapping[str, Picture] = field(default_factory=dict)
    """By the examples' ``image``."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all questions and answers."""
        lines = [e.model_dump_json() for split in SPLITS for e in self.splits[split]]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def messages(self, example: Example) -> list[dict[str, object]]:
        """What a server is asked, as chat messages."""
        return render(ask(example.question, self.images[example.image]), Picture.part)


def read_dataset(folder: Path, seed: int = 0, limit: int | None = None) -> Dataset:
    """Read and validate the splits, shuffle each by image, and keep at most ``limit`` images.

    Shuffled, because early stopping looks at the first examples only; whole images, because a
    server computes an image's features once. Raises :class:`ConfigError` that lists every problem:
    those of ``vllm-autoprune eval``, and images in two splits.
    """
    problems: list[Problem] = []
    splits: dict[Split, Sequence[Example]] = {}
    images: dict[str, Picture] = {}
    split_of_content: dict[str, Split] = {}
    for split in SPLITS:
        fix = "a data folder has search.jsonl, validation.jsonl and test.jsonl"
        examples, pictures = read_examples(folder / f"{split}.jsonl", problems, fix)
        by_image: dict[str, list[Example]] = {}
        for example in examples:
            by_image.setdefault(example.image, []).append(example)
        groups = list(by_image.values())
        random.Random(seed).shuffle(groups)
        splits[split] = [example for group in groups[:limit] for example in group]
        images |= {e.image: pictures[e.image] for e in splits[split] if e.image in pictures}
        for name, picture in pictures.items():
            other = split_of_content.setdefault(picture.digest, split)
            if other != split:
                what = f"the same image is in {other} and in {split}"
                problems.append(Problem(name, what, "splits must share no image"))
    refuse("data", problems)
    return Dataset(folder, splits, images)


def write_split(path: Path, examples: Sequence[Example]) -> None:
    """Write one split file of a data folder."""
    lines = [json.dumps(example.model_dump(exclude_none=True)) for example in examples]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


_END_OF_SPLIT: dict[Split, float] = {"search": 0.5, "validation": 0.7, "test": 1.0}
"""Where each split ends, as a share of the images of a category."""


def convert_mme(source: Path, target: Path, seed: int = 0) -> dict[Split, int]:
    """Write MME's categories, a folder each, as a data folder; returns the questions of each split.

    The two questions about an image are a pair. An image of several categories is in one split,
    that of the first. Raises :class:`ConfigError` with every problem.
    """
    problems: list[Problem] = []
    splits: dict[Split, list[Example]] = {split: [] for split in SPLITS}
    split_of: dict[str, Split] = {}
    copies: dict[str, tuple[str, Picture]] = {}  # name and picture by content
    by_category: dict[str, list[AskedQuestion]] = {}
    for question in read_asked(source, problems, "give MME's folder"):
        by_category.setdefault(question.category, []).append(question)
        if not question.answers:
            what, fix = "is no question with an answer", "write the question, a tab, the answer"
            problems.append(Problem(question.where, what, fix))
    rng = random.Random(seed)
    for category, questions in () if problems else by_category.items():
        new = sorted({question.pictures[0].digest for question in questions} - split_of.keys())
        rng.shuffle(new)
        for split in reversed(SPLITS):
            split_of |= dict.fromkeys(new[: round(_END_OF_SPLIT[split] * len(new))], split)
        for question in questions:
            (picture,) = question.pictures
            name, _ = copies.setdefault(
                picture.digest, (f"images/{category}/{picture.path.name}", picture)
            )
            example = Example(
                image=name,
                question=question.text,
                answer=question.answers[0],
                category=category,
                pair=question.pair,
            )
            splits[split_of[picture.digest]].append(example)
    if not problems and not all(splits.values()):
        what = f"has too few images for three splits ({len(split_of)})"
        fix = "give MME's folder, which has a folder for each category"
        problems.append(Problem(str(source), what, fix))
    refuse("MME", problems)
    try:
        for name, picture in copies.values():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(picture.read())
        for split, examples in splits.items():
            write_split(target / f"{split}.jsonl", examples)
    except OSError as error:
        what = f"cannot be written ({error.strerror or error})"
        problem = Problem(str(target), what, "choose another folder with --data")
        raise ConfigError("search", [problem]) from None
    return {split: len(examples) for split, examples in splits.items()}
