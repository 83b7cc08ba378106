"""Data set of questions with reference answers, in three splits that share no image.

A data folder has ``search.jsonl``, ``validation.jsonl`` and ``test.jsonl``; any other file or
folder of questions that `eval` reads is split by image. A line is
``{"image": "images/7.png", "question": ..., "answer": ..., "category": ...}``, and may have
``"pair": 3``, shared by the two yes/no questions that MME scores together.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.asked_question import ask, render
from vllm_autoprune.evaluation.chosen_by import format_images
from vllm_autoprune.evaluation.pictures import Picture
from vllm_autoprune.evaluation.questions import (
    Example,
    read_asked,
    read_examples,
    refuse,
)
from vllm_autoprune.tpdsl.state import PruningState

Split = Literal["search", "validation", "test"]

SPLITS: tuple[Split, ...] = get_args(Split)

_SHARES: Mapping[Split, int] = {"search": 5, "validation": 2, "test": 3}
"""Number of images that each split gets out of every ten."""
_MINIMUM_IMAGES = sum(_SHARES.values())
"""Fewest images that can be divided by ``_SHARES``."""


@dataclass(frozen=True)
class Dataset:
    """Three splits of questions in evaluation order, and the path that they were read from.

    ``note`` says how a source without splits was divided; it is empty for a data folder.
    """

    folder: Path
    splits: Mapping[Split, Sequence[Example]]
    images: Mapping[str, Picture] = field(default_factory=dict)
    """Pictures by the ``image`` of the examples."""
    note: str = ""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all questions and answers."""
        lines = [e.model_dump_json() for split in SPLITS for e in self.splits[split]]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def mark_chosen(self, state: PruningState) -> PruningState:
        """``state`` with the images in its provenance by whose questions a search chose it.

        Ledgers lack these images, so that a search can be replayed with pictures of other bytes.
        """
        choosing = (*self.splits["search"], *self.splits["validation"])
        digests = [self.images[example.image].digest for example in choosing]
        update = {"chosen_by": format_images(digests)}
        provenance = state.provenance.model_copy(update=update)
        return state.model_copy(update={"provenance": provenance})

    def format_split(self, split: Split, folder: Path) -> str:
        """The content of a file of questions in ``folder``, which eval reads."""
        return _format_lines(
            example.model_copy(
                update={"image": self.images[example.image].refer(folder)}
            )
            for example in self.splits[split]
        )

    def ask_models(self, models: Sequence[str]) -> Dataset:
        """The data set with every question once for each of several ``models``, in their order.

        Questions about an image stay together, and any run of questions has equally many of each
        model. Without models, the data set itself.
        """
        if not models:
            return self
        splits = {
            split: [
                example.model_copy(update={"model": model})
                for example in examples
                for model in models
            ]
            for split, examples in self.splits.items()
        }
        return replace(self, splits=splits)

    def in_blocks(self, size: int, seed: int) -> Dataset:
        """The data set with its search split in stratified order if it has over ``size`` questions.

        A shorter search split is always asked as a whole. Its order does not change, so that
        ledgers of older searches can be replayed.
        """
        pool = self.splits["search"]
        if len(pool) <= size:
            return self
        order = stratify([(example.image, example.category) for example in pool], seed)
        ordered = [pool[index] for index in order]
        return replace(self, splits={**self.splits, "search": ordered})

    def messages(self, example: Example) -> list[dict[str, object]]:
        """The chat messages that ask a server the question of ``example``."""
        return render(ask(example.question, self.images[example.image]), Picture.part)


def read_dataset(data: Path, seed: int = 0, limit: int | None = None) -> Dataset:
    """Read and validate the splits, shuffle each by image, and keep at most ``limit`` images.

    ``data`` is a data folder, or any other source of questions, which is split by image. Images are
    shuffled because early stopping looks at the first examples only; questions about an image stay
    together because a server computes its features once. Raises :class:`ConfigError` that lists
    every problem: those of ``vllm-autoprune eval``, images in two splits, and too few images.
    """
    fix = "give a file of questions, or a folder with search.jsonl, validation.jsonl and test.jsonl"
    problems: list[Problem] = []
    note = ""
    examples_of: dict[Split, list[Example]] = {split: [] for split in SPLITS}
    pictures: dict[str, Picture] = {}
    if any((data / f"{split}.jsonl").exists() for split in SPLITS):
        split_of_content: dict[str, Split] = {}
        for split in SPLITS:
            path = data / f"{split}.jsonl"
            examples_of[split], pictures_of_split = read_examples(path, problems, fix)
            pictures |= pictures_of_split
            for name, picture in pictures_of_split.items():
                other = split_of_content.setdefault(picture.digest, split)
                if other != split:
                    what = f"the same image is in {other} and in {split}"
                    problems.append(Problem(name, what, "splits must share no image"))
    else:
        examples, pictures = read_examples(data, problems, fix)
        categories = [(example.image, example.category) for example in examples]
        split_of = _split_images(data, categories, seed, problems)
        for example in examples:
            examples_of[split_of[example.image]].append(example)
        note = f"{data} is split by image, with seed {seed}: {_describe(examples_of)}"
    refuse("data", problems)
    splits: dict[Split, Sequence[Example]] = {}
    for split, examples in examples_of.items():
        by_image: dict[str, list[Example]] = {}
        for example in examples:
            by_image.setdefault(example.image, []).append(example)
        groups = list(by_image.values())
        random.Random(seed).shuffle(groups)
        splits[split] = [example for group in groups[:limit] for example in group]
    used = {example.image for split in SPLITS for example in splits[split]}
    return Dataset(data, splits, {name: pictures[name] for name in used}, note)


def _describe(examples_of: Mapping[Split, Sequence[Example]]) -> str:
    """A sentence with the questions and images of each split, and its questions by category."""
    parts = []
    for split, examples in examples_of.items():
        images = len({example.image for example in examples})
        parts.append(f"{len(examples)} questions about {images} images for {split}")
    text = ", ".join(parts)
    counts = Counter(
        (example.category, split) for split in SPLITS for example in examples_of[split]
    )
    for category in sorted({category for category, _ in counts} - {"all"}):
        numbers = [str(counts[category, split]) for split in SPLITS]
        text += f"; {category} {' + '.join(numbers)}"
    return text


def _split_images(
    source: Path, images: Iterable[tuple[str, str]], seed: int, problems: list[Problem]
) -> dict[str, Split]:
    """Assign each image to a split.

    Every category is divided by ``_SHARES``, to within one image per split. ``images`` are pairs of
    an image's name and a category; the first category of a name counts. Returns the split of each
    name. If there are too few images, adds that to ``problems``.
    """
    category_of: dict[str, str] = {}
    for name, category in images:
        category_of.setdefault(name, category)
    rng = random.Random(seed)
    counts = Counter[Split]()
    split_of = dict[str, Split]()
    for category in sorted({*category_of.values()}):
        names = sorted(name for name in category_of if category_of[name] == category)
        rng.shuffle(names)
        for name in names:
            # The image goes to the split that lacks most of its share of all images so far.
            total = len(split_of) + 1
            lacks = {
                split: total * _SHARES[split] - _MINIMUM_IMAGES * counts[split]
                for split in SPLITS
            }
            split = max(SPLITS, key=lambda split: lacks[split])
            split_of[name] = split
            counts[split] += 1
    if not problems and len(split_of) < _MINIMUM_IMAGES:
        what = f"has {len(split_of)} images, too few for three splits"
        shares = ", ".join(f"{share} for {split}" for split, share in _SHARES.items())
        fix = f"give questions about at least {_MINIMUM_IMAGES} images: {shares}"
        problems.append(Problem(str(source), what, fix))
    return split_of


def stratify(questions: Sequence[tuple[str, str]], seed: int) -> list[int]:
    """Stratified order of ``questions``, which are pairs of an image and a category.

    Returns indices. In any run of consecutive questions, the number in each category is
    proportional to its size, to within a question or two. Questions about an image stay together;
    images with the same set of categories form a stratum.
    """
    rng = random.Random(seed)
    images = dict[str, list[int]]()
    for index, (image, _) in enumerate(questions):
        images.setdefault(image, []).append(index)
    strata: dict[frozenset[str], list[list[int]]] = {}
    for indices in images.values():
        categories = frozenset(questions[index][1] for index in indices)
        strata.setdefault(categories, []).append(indices)
    keyed: list[tuple[float, list[int]]] = []
    for groups in strata.values():
        rng.shuffle(groups)
        # Images of a stratum are spread evenly over the order, from a random start on.
        start = rng.random()
        for number, indices in enumerate(groups):
            keyed.append(((number + start) / len(groups), indices))
    keyed.sort(key=lambda item: item[0])
    return [index for _, indices in keyed for index in indices]


def cut_blocks(images: Sequence[str], size: int) -> list[slice]:
    """Divide questions into consecutive blocks of about equal length, at most about ``size``.

    ``images`` has the image of each question; no image is in two blocks.
    """
    count = -(-len(images) // size)
    starts = [0]
    heads = [n for n, image in enumerate(images) if not n or image != images[n - 1]]
    for number in range(1, count):
        wanted = round(number * len(images) / count)
        starts.append(min(heads, key=lambda head: abs(head - wanted)))
    bounds = sorted({*starts, len(images)})
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def write_split(path: Path, examples: Sequence[Example]) -> None:
    """Write one split file of a data folder."""
    path.write_text(_format_lines(examples), encoding="utf-8")


def _format_lines(examples: Iterable[Example]) -> str:
    lines = (json.dumps(example.model_dump(exclude_none=True)) for example in examples)
    return "".join(f"{line}\n" for line in lines)


def convert_mme(source: Path, target: Path, seed: int = 0) -> dict[Split, int]:
    """Convert MME, which has one folder for each category, to a data folder.

    Returns the number of questions in each split. The two questions about an image are a pair. An
    image in several categories is assigned to a split by the first of them. Raises
    :class:`ConfigError` with every problem.
    """
    problems: list[Problem] = []
    splits: dict[Split, list[Example]] = {split: [] for split in SPLITS}
    copies: dict[str, tuple[str, Picture]] = {}  # name and picture by content
    questions = read_asked(source, problems, "give MME's folder")
    for question in questions:
        if not question.answers:
            what = "is no question with an answer"
            fix = "write the question, a tab, the answer"
            problems.append(Problem(question.where, what, fix))
    contents = [
        (question.pictures[0].digest, question.category) for question in questions
    ]
    split_of = _split_images(source, contents, seed, problems)
    refuse("MME", problems)
    for question in questions:
        (picture,) = question.pictures
        name, _ = copies.setdefault(
            picture.digest, (f"images/{question.category}/{picture.path.name}", picture)
        )
        example = Example(
            image=name,
            question=question.text,
            answer=question.answers[0],
            category=question.category,
            pair=question.pair,
        )
        splits[split_of[picture.digest]].append(example)
    try:
        for name, picture in copies.values():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(picture.read())
        for split, examples in splits.items():
            write_split(target / f"{split}.jsonl", examples)
    except OSError as error:
        what = f"cannot be written ({error.strerror or error})"
        fix = "choose another folder with --data"
        raise ConfigError.of(str(target), what, fix, subject="search") from None
    return {split: len(examples) for split, examples in splits.items()}
