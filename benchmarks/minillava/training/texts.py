"""Training texts about a scene: questions, short phrases, pointing phrases and captions.

A phrase asks the same as a question in a few words. A fifth of its tokens are answer, of a
question's one in twenty, and finding the named shape is what a small model takes longest to learn.
"""

from __future__ import annotations

import random

from benchmarks.minillava.layout import Canvas, Sign, Thing
from benchmarks.minillava.questions import Question, QuestionGenerator
from benchmarks.minillava.render import Scene
from benchmarks.minillava.wordings import BRIEF, KINDS, SEEN, with_article

NEIGHBOUR, HALF = "beside", "half"
"""Kinds that occur in phrases only: the shape beside another one, and the half of the picture."""

# Relative frequencies; questions that take more than one look-up are asked more often.
_QUESTION_WEIGHTS = {
    "digit": 6, "colour": 4, "shape": 4, "text": 10, "count": 24, "quarter": 4, "relation": 14,
    "existence": 8, "reading": 12, "position": 5, "counting": 14,
}  # fmt: skip
# Counts are learnt last and therefore asked most. Halves are asked because columns, unlike rows, do
# not follow from the order of the tokens and were not learnt from quarters alone.
_PHRASE_WEIGHTS = {
    "digit": 8, "colour": 3, "shape": 3, "text": 5, "count": 14, "quarter": 3, "relation": 10,
    "existence": 5, "reading": 8, "position": 5, "counting": 10, NEIGHBOUR: 4, HALF: 6,
}  # fmt: skip


def phrase_kind(kind: str) -> str:
    """The kind of a phrase that asks the same as a question of `kind`."""
    return f"brief_{kind}"


PHRASE_KINDS = tuple(map(phrase_kind, (*KINDS, NEIGHBOUR, HALF)))


class PhraseGenerator(QuestionGenerator):
    """Random phrases about one scene; its wordings have to be `BRIEF`."""

    def generate_phrase(self, kind: str) -> Question | None:
        """A phrase of a kind; None if the scene has nothing to ask about."""
        if kind == NEIGHBOUR:
            return self._neighbour_phrase()
        if kind == HALF:
            thing = self._pick_thing()
            side = self._sides(thing)[1]
            evidence = self._evidence((thing,))
            return Question(phrase_kind(HALF), f"half {thing.name}", side, evidence)
        questions = self.generate(kind)
        if questions is None:
            return None
        one = self.rng.choice(questions)
        return Question(phrase_kind(kind), one.text, one.answer, one.evidence)

    def _neighbour_phrase(self) -> Question | None:
        """Ask for a neighbour's name and then its digit: the two steps of a relation."""
        neighbours = self._pick_neighbours()
        if neighbours is None:
            return None
        anchor, relation, target = neighbours
        text = f"shape {relation} the {anchor.name}"
        answer = f"{target.name} {target.digit}"
        evidence = self._evidence((target, anchor))
        return Question(phrase_kind(NEIGHBOUR), text, answer, evidence)


def training_phrases(
    rng: random.Random, scene: Scene, canvas: Canvas, number: int
) -> list[Question]:
    """Draw `number` phrases about a scene; the text of each question is the phrase."""
    generator, phrases = PhraseGenerator(rng, scene, canvas, BRIEF), list[Question]()
    while len(phrases) < number:
        kind = rng.choices(list(_PHRASE_WEIGHTS), list(_PHRASE_WEIGHTS.values()))[0]
        phrase = generator.generate_phrase(kind)
        if phrase is not None:
            phrases.append(phrase)
    return phrases


def training_questions(
    rng: random.Random, scene: Scene, canvas: Canvas, number: int
) -> list[Question]:
    """Draw `number` questions about a scene in training wordings; one question of each pair."""
    generator, drawn = QuestionGenerator(rng, scene, canvas, SEEN), list[Question]()
    while len(drawn) < number:
        kind = rng.choices(list(_QUESTION_WEIGHTS), list(_QUESTION_WEIGHTS.values()))[0]
        questions = generator.generate(kind)
        if questions is not None:
            drawn.append(rng.choice(questions))
    return drawn


def pointing_phrase(rng: random.Random, scene: Scene) -> tuple[str, tuple[int, ...]]:
    """Draw a phrase that names one part of a scene, with the patches of that part.

    The text tower is trained on such phrases and never on questions, so its relevance to a whole
    question is good but not perfect, as in a real model.
    """
    layout = scene.layout
    if layout.signs and rng.random() < 0.2:
        sign = rng.choice(layout.signs)
        return f"the {sign.name}", scene.patches(sign)
    thing = rng.choice(layout.things)
    digits = [other.digit for other in layout.things]
    if digits.count(thing.digit) == 1 and rng.random() < 0.35:
        return f"the digit {thing.digit}", scene.patches(thing)
    names = (thing.name, with_article(thing.name), f"the {thing.name}")
    return rng.choice(names), scene.patches(thing)


def caption(rng: random.Random, scene: Scene) -> str:
    """Describe three random parts of the scene, for the contrastive loss between images."""
    candidates: tuple[Thing | Sign, ...] = (*scene.layout.things, *scene.layout.signs)
    parts = rng.sample(candidates, 3)
    return ", ".join(
        f"{part.name} {part.text if isinstance(part, Sign) else part.digit}" for part in parts
    )
