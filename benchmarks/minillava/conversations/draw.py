"""Held-out conversations: four questions about one scene, each about other objects."""

from __future__ import annotations

import random

from benchmarks.minillava.layout import SEEDS, Canvas
from benchmarks.minillava.questions import Question, QuestionGenerator
from benchmarks.minillava.split import MAX_SCENES, Example, Split, draw_scene
from benchmarks.minillava.wordings import KINDS, SEEN, UNSEEN

TURNS = 4
Conversation = tuple[Example, ...]
"""The turns about one image; every answer in the history is the reference answer."""

_TRIES = 40
"""Questions drawn before the turns so far are given up, because they leave no other object."""


def draw_conversations(
    split: Split, count: int, canvas: Canvas | None = None
) -> list[Conversation]:
    """Draw one conversation about each of `count` scenes.

    Every question has evidence in the image, and no two turns share a patch of it. As with single
    questions, a fourth of the test scenes has unseen arrangements, another fourth unseen wordings.
    """
    if not 0 < count <= MAX_SCENES:
        raise ValueError(f"the number of conversations must lie in 1..{MAX_SCENES}, got {count}")
    canvas = canvas or Canvas()
    conversations: list[Conversation] = []
    for image_id in range(count):
        seed = SEEDS[split][image_id]
        group = image_id % 4 if split == "test" else 0
        unseen_style, unseen_wording = group == 1, group == 3
        image, scene = draw_scene(seed, unseen_style, canvas)
        wordings = UNSEEN if unseen_wording else SEEN
        generator = QuestionGenerator(random.Random(seed + 2), scene, canvas, wordings)
        conversations.append(
            tuple(
                Example(
                    image_id, image, one.text, one.answer, one.kind, None, one.evidence,
                    unseen_wording, unseen_style,
                )
                for one in _draw_turns(generator)
            )
        )  # fmt: skip
    return conversations


def _draw_turns(generator: QuestionGenerator) -> list[Question]:
    """Questions of random kinds about what is shown, without a shared patch of evidence."""
    while True:
        turns: list[Question] = []
        for _ in range(_TRIES):
            drawn = generator.generate(generator.rng.choice(KINDS))
            if drawn is None:
                continue
            question = generator.rng.choice(drawn)
            asked = {patch for one in turns for patch in one.evidence}
            repeated = question.text in {one.text for one in turns}
            if question.evidence and not repeated and asked.isdisjoint(question.evidence):
                turns.append(question)
            if len(turns) == TURNS:
                return turns
