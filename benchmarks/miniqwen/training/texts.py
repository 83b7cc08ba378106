"""Training texts about scenes and pages: questions, and short phrases that ask the same."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.minillava.layout import Canvas
from benchmarks.minillava.questions import Question
from benchmarks.minillava.render import Scene
from benchmarks.minillava.training.texts import HALF, PhraseGenerator, phrase_kind
from benchmarks.miniqwen.pages import Page
from benchmarks.miniqwen.questions import PageQuestions, SceneQuestions
from benchmarks.miniqwen.sizes import Size
from benchmarks.miniqwen.wordings import BRIEF, KINDS, SEEN

Weights = tuple[dict[str, int], dict[str, int]]

# Relative frequencies while only phrases are asked, of scenes and of pages.
PHRASE_WEIGHTS: Weights = (
    {
        "digit": 7, "colour": 3, "shape": 3, "count": 10, "quarter": 4, "existence": 6,
        "reading": 6, HALF: 4,
    },
    {"value": 7, "word": 6, "cell": 12, "compare": 9, "find": 6},
)  # fmt: skip
# Later on, what is learnt late is asked more often.
QUESTION_WEIGHTS: Weights = (
    {
        "digit": 5, "colour": 4, "shape": 3, "count": 12, "quarter": 3, "existence": 6,
        "reading": 12,
    },
    {"value": 5, "word": 10, "cell": 9, "compare": 10, "find": 4},
)  # fmt: skip

TRAINED_KINDS = (*KINDS, *map(phrase_kind, (*KINDS, HALF)))


@dataclass(frozen=True)
class _ScenePhrases(SceneQuestions, PhraseGenerator):
    """Random phrases about a scene on a rectangle of cells; its wordings have to be `BRIEF`."""


def draw_texts(
    rng: random.Random,
    content: Scene | Page,
    size: Size,
    number: int,
    brief: bool,
    weights_of: Weights,
) -> list[Question]:
    """Draw `number` questions about a picture, or as many phrases; one question of each pair."""
    weights = weights_of[isinstance(content, Page)]
    drawn: list[Question] = []
    while len(drawn) < number:
        kind = rng.choices(list(weights), list(weights.values()))[0]
        question = _draw_text(rng, content, size, kind, brief)
        if question is not None:
            drawn.append(question)
    return drawn


def _draw_text(
    rng: random.Random, content: Scene | Page, size: Size, kind: str, brief: bool
) -> Question | None:
    wordings = BRIEF if brief else SEEN
    if isinstance(content, Page):
        questions = PageQuestions(rng, content, wordings).generate(kind)
    elif brief:
        return _ScenePhrases(rng, content, Canvas(), wordings, size).generate_phrase(kind)
    else:
        questions = SceneQuestions(rng, content, Canvas(), wordings, size).generate(kind)
    if questions is None:
        return None
    one = rng.choice(questions)
    kind = phrase_kind(one.kind) if brief else one.kind
    return Question(kind, one.text, one.answer, one.evidence)
