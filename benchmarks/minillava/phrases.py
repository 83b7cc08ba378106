"""Phrases about a scene: questions in a few words, which teach to look up before to understand.

Knows nothing about pixels, tokenizers or models. A fifth of a phrase's tokens are learnt, of a
question's one in twenty, and finding the named part is what takes a small model long.
"""

from __future__ import annotations

import random

from benchmarks.minillava.layout import Canvas
from benchmarks.minillava.questions import Asker, Question
from benchmarks.minillava.render import Scene
from benchmarks.minillava.wordings import BRIEF, KINDS

BESIDE, HALF = "beside", "half"
# How often each kind is said; what takes two steps is said most, and numbers, learnt last. Halves:
# rows follow from the order of the tokens, columns do not, and were not learnt from quarters.
_SHARES = {
    "digit": 8, "colour": 3, "shape": 3, "text": 5, "count": 14, "quarter": 3, "relation": 10,
    "existence": 5, "reading": 8, "position": 5, "counting": 10, BESIDE: 4, HALF: 6,
}  # fmt: skip


def brief(kind: str) -> str:
    """What a kind is called where it is asked in a phrase."""
    return f"brief_{kind}"


PHRASE_KINDS = tuple(map(brief, (*KINDS, BESIDE, HALF)))


class Teller(Asker):
    """Says phrases about one scene; its wordings are to be `BRIEF`."""

    def tell(self, kind: str) -> Question | None:
        """A phrase of a kind, None where the scene has no matter for it."""
        if kind == BESIDE:
            return self._neighbour()
        if kind == HALF:
            thing = self._thing()
            side = self._sides(thing)[1]
            return Question(brief(HALF), f"half {thing.name}", side, self._evidence((thing,)))
        found = self.ask(kind)
        if found is None:
            return None
        one = self.rng.choice(found)
        return Question(brief(kind), one.text, one.answer, one.evidence)

    def _neighbour(self) -> Question | None:
        """Who is beside a shape, and only then its digit: a relation's two steps, one at a time."""
        found = self._beside()
        if found is None:
            return None
        anchor, relation, target = found
        text = f"shape {relation} the {anchor.name}"
        answer = f"{target.name} {target.digit}"
        return Question(brief(BESIDE), text, answer, self._evidence((target, anchor)))


def training_phrases(
    rng: random.Random, scene: Scene, canvas: Canvas, number: int
) -> list[Question]:
    """`number` phrases about a scene, as questions whose text is the phrase."""
    teller, told = Teller(rng, scene, canvas, BRIEF), list[Question]()
    while len(told) < number:
        phrase = teller.tell(rng.choices(list(_SHARES), list(_SHARES.values()))[0])
        if phrase is not None:
            told.append(phrase)
    return told
