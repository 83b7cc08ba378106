"""Short phrases about a scene: what the language model learns to look up before it is asked.

Knows nothing about pixels, tokenizers or models. A phrase names one part and its answer says the
rest. Half of its tokens are learnt, of a question's only one in fifteen, and finding the named
part is what takes a small model long.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.minillava.yardstick.layout import Canvas, Thing
from benchmarks.minillava.yardstick.questions import Asker, Question
from benchmarks.minillava.yardstick.render import Scene

# How often each kind is said; one name in five is of a shape that is not there.
_SHARES = {"named": 10, "found": 5, "beside": 8, "read": 5, "counted": 8}
_MISSING = 0.2
PHRASE_KINDS = tuple(_SHARES)


@dataclass(frozen=True)
class Teller(Asker):
    """Says phrases about one scene."""

    def tell(self, kind: str) -> Question | None:
        """A phrase of a kind, None where the scene has no matter for it."""
        match kind:
            case "named":
                if self.rng.random() < _MISSING:
                    return Question(kind, self._absent(), "no", ())
                thing = self._thing()
                return self._told(kind, thing.name, f"{thing.digit} {self._place(thing)}", thing)
            case "found":
                lone = self._lone()
                if lone is None:
                    return None
                text = f"digit {lone.digit}"
                return self._told(kind, text, f"{lone.name} {self._place(lone)}", lone)
            case "beside":
                found = self._beside()
                if found is None:
                    return None
                anchor, relation, target = found
                text = f"{relation} the {anchor.name}"
                return self._told(kind, text, f"{target.digit} {target.name}", target, anchor)
            case "read":
                if not self.scene.layout.signs:
                    return None
                sign = self.rng.choice(self.scene.layout.signs)
                return Question(kind, sign.name, sign.text, self._evidence((sign,)))
            case "counted":
                number, things, what = self._counted()
                return self._told(kind, what, str(number), *things)
        raise ValueError(f"{kind!r} is not a kind of phrase")

    def _place(self, thing: Thing) -> str:
        return " ".join(self._sides(thing))

    def _told(self, kind: str, text: str, answer: str, *things: Thing) -> Question:
        return Question(kind, text, answer, self._evidence(things))


def training_phrases(
    rng: random.Random, scene: Scene, canvas: Canvas, number: int
) -> list[Question]:
    """`number` phrases about a scene, as questions whose text is the phrase."""
    teller, told = Teller(rng, scene, canvas), list[Question]()
    while len(told) < number:
        phrase = teller.tell(rng.choices(PHRASE_KINDS, list(_SHARES.values()))[0])
        if phrase is not None:
            told.append(phrase)
    return told
