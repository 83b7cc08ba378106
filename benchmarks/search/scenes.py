"""mini-LLaVA's held-out scenes as a data folder of `vllm-autoprune search`.

The splits use disjoint seeds, which training does not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from random import Random

from benchmarks.minillava.split import Example as SceneQuestion
from benchmarks.minillava.split import draw_examples, png
from offline_search.dataset import SPLITS, Split, write_split
from vllm_autoprune.evaluation.questions import Example


def select_questions(
    split: Split, scenes: int, *, each: int | None = None
) -> Sequence[SceneQuestion]:
    """Questions about the first scenes of a split, at most ``each`` about one."""
    return sample_questions(draw_examples(split, scenes), each)


def sample_questions(
    questions: Sequence[SceneQuestion], each: int | None
) -> Sequence[SceneQuestion]:
    """At most ``each`` questions about every image, a random sample that keeps pairs together.

    Scores of questions about one image are correlated, so few questions about many images give a
    more precise estimate than many about few.
    """
    if each is None:
        return questions
    by_scene = groupby(questions, key=lambda question: question.image_id)
    return [
        question
        for scene, group in by_scene
        for question in _sample(list(group), each, Random(scene))
    ]


def _sample(questions: list[SceneQuestion], size: int, rng: Random) -> list[SceneQuestion]:
    """A random sample of one scene's questions without incomplete pairs, in their order."""
    groups = [list(group) for _, group in groupby(enumerate(questions), key=_pair_key)]
    rng.shuffle(groups)
    sample: list[tuple[int, SceneQuestion]] = []
    for group in groups:
        if len(sample) + len(group) <= size:
            sample += group
    return [question for _, question in sorted(sample, key=lambda numbered: numbered[0])]


def _pair_key(numbered: tuple[int, SceneQuestion]) -> tuple[str, int]:
    index, question = numbered
    return ("alone", index) if question.pair is None else ("pair", question.pair)


def write_data(folder: Path, scenes: dict[Split, int], *, each: int | None = None) -> None:
    """Write a data folder: images and the three splits."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        questions = select_questions(split, scenes[split], each=each)
        for question in questions:
            path = folder / image_name(split, question)
            if not path.exists():
                path.write_bytes(png(question.image))
        examples = [as_example(split, question) for question in questions]
        write_split(folder / f"{split}.jsonl", examples)


def as_example(split: Split, question: SceneQuestion) -> Example:
    """A scene question as an example of the search."""
    return Example(
        image=image_name(split, question),
        question=question.question,
        answer=question.answer,
        category=question.kind,
        pair=question.pair,
    )


def image_name(split: Split, question: SceneQuestion) -> str:
    """Path of an image within the data folder."""
    return f"images/{split}-{question.image_id}.png"
