"""Questions about a scene: kinds, answers, evidence patches, yes/no pairs.

Knows nothing about pixels, tokenizers or models.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.minillava.layout import COLOURS, SHAPES, Canvas, Sign, Thing
from benchmarks.minillava.render import NEIGHBOURS, Scene
from benchmarks.minillava.wordings import (
    MOST_COUNTED,
    PAIR_KINDS,
    RELATIONS,
    SEEN,
    a,
    plural,
)


@dataclass(frozen=True)
class Question:
    """One question: `evidence` are raster patches, what tells most first."""

    kind: str
    text: str
    answer: str
    evidence: tuple[int, ...]


@dataclass(frozen=True)
class Asker:
    """Asks about one scene in wordings of a table of kinds."""

    rng: random.Random
    scene: Scene
    canvas: Canvas
    wordings: Mapping[str, Sequence[str]]

    def ask(self, kind: str) -> list[Question] | None:
        """A question of an open kind, or a yes and a no; None where the scene has no matter."""
        if kind in PAIR_KINDS:
            return self._pair(kind)
        question = self._open(kind)
        return None if question is None else [question]

    def _word(self, kind: str, **slots: str | int) -> str:
        return self.rng.choice(self.wordings[kind]).format(**slots)

    def _open(self, kind: str) -> Question | None:
        match kind:
            case "digit":
                thing = self._thing()
                return self._about(kind, (thing,), str(thing.digit), name=thing.name)
            case "colour" | "shape":
                lone = self._lone()
                if lone is None:
                    return None
                answer = COLOURS[lone.colour] if kind == "colour" else SHAPES[lone.shape]
                return self._about(kind, (lone,), answer, digit=lone.digit)
            case "text":
                if not self.scene.layout.signs:
                    return None
                sign = self.rng.choice(self.scene.layout.signs)
                return self._about(kind, (sign,), sign.text, name=sign.name)
            case "count":
                number, things, what = self._counted()
                return self._about(kind, things, str(number), plural=what)
            case "quarter":
                thing = self._thing()
                vertical, horizontal = self._sides(thing)
                return self._about(kind, (thing,), f"{vertical} {horizontal}", name=thing.name)
            case "relation":
                return self._relation()
        raise ValueError(f"{kind!r} is not an open kind of question")

    def _pair(self, kind: str) -> list[Question]:
        match kind:
            case "existence":
                thing, missing = self._thing(), self._absent()
                yes = self._about(kind, (thing,), "yes", a_name=a(thing.name))
                return [yes, self._about(kind, (), "no", a_name=a(missing))]
            case "reading":
                thing = self._thing()
                shown = [other.digit for other in self.scene.layout.things]
                every = shown if self.rng.random() < 0.5 else range(10)
                wrong = [digit for digit in every if digit != thing.digit] or [9 - thing.digit]
                name, other = thing.name, self.rng.choice(wrong)
                yes = self._about(kind, (thing,), "yes", name=name, digit=thing.digit)
                return [yes, self._about(kind, (thing,), "no", name=name, digit=other)]
            case "position":
                thing = self._thing()
                side = self.rng.choice(self._sides(thing))
                opposite = {"left": "right", "right": "left", "upper": "lower", "lower": "upper"}
                yes = self._about(kind, (thing,), "yes", name=thing.name, side=side)
                no = self._about(kind, (thing,), "no", name=thing.name, side=opposite[side])
                return [yes, no]
            case "counting":
                number, things, what = self._counted()
                near = [n for n in (number - 1, number + 1) if 0 <= n <= MOST_COUNTED]
                wrong_number = self.rng.choice(near)
                yes = self._about(kind, things, "yes", number=number, plural=what)
                no = self._about(kind, things, "no", number=wrong_number, plural=what)
                return [yes, no]
        raise ValueError(f"{kind!r} is not a kind of yes/no question")

    def _about(
        self, kind: str, parts: Iterable[Thing | Sign], answer: str, **slots: str | int
    ) -> Question:
        return Question(kind, self._word(kind, **slots), answer, self._evidence(parts))

    def _evidence(self, parts: Iterable[Thing | Sign]) -> tuple[int, ...]:
        """Patches of all parts: all of a sign, and of shapes first the middles, then the rest."""
        whole = [
            (0 if place == 0 or isinstance(part, Sign) else 1, index, place, patch)
            for index, part in enumerate(parts)
            for place, patch in enumerate(self.scene.patches(part))
        ]
        return tuple(patch for *_, patch in sorted(whole))

    def _thing(self) -> Thing:
        return self.rng.choice(self.scene.layout.things)

    def _lone(self) -> Thing | None:
        """A shape whose digit no other shape carries."""
        things = self.scene.layout.things
        digits = [thing.digit for thing in things]
        lone = [thing for thing in things if digits.count(thing.digit) == 1]
        return self.rng.choice(lone) if lone else None

    def _absent(self) -> str:
        """A name that no shape in the scene bears, made of words that some shapes bear."""
        things = self.scene.layout.things
        taken = {(thing.colour, thing.shape) for thing in things}
        colours = sorted({thing.colour for thing in things})
        shapes = sorted({thing.shape for thing in things})
        near = [(c, s) for c in colours for s in shapes if (c, s) not in taken]
        if not near or self.rng.random() < 0.2:
            every = [(c, s) for c in range(len(COLOURS)) for s in range(len(SHAPES))]
            near = [pair for pair in every if pair not in taken]
        if not near:
            raise ValueError("every colour and shape is in the scene: nothing is absent")
        colour, shape = self.rng.choice(near)
        return f"{COLOURS[colour]} {SHAPES[shape]}"

    def _sides(self, thing: Thing) -> tuple[str, str]:
        half = self.canvas.cells // 2
        return (
            "upper" if thing.row < half else "lower",
            "left" if thing.column < half else "right",
        )

    def _counted(self) -> tuple[int, list[Thing], str]:
        """Shapes of one colour or form; every number that the scene offers is equally likely."""
        things = self.scene.layout.things
        offers: dict[int, list[tuple[list[Thing], str]]] = {}
        for colour in range(len(COLOURS)):
            found = [thing for thing in things if thing.colour == colour]
            offers.setdefault(len(found), []).append((found, plural(colour, None)))
        for shape in range(len(SHAPES)):
            found = [thing for thing in things if thing.shape == shape]
            offers.setdefault(len(found), []).append((found, plural(None, shape)))
        number = self.rng.choice(sorted(n for n in offers if n <= MOST_COUNTED))
        found, what = self.rng.choice(offers[number])
        return number, found, what

    def _relation(self) -> Question | None:
        """The text names an anchor; the answer is on the shape beside it."""
        found = self._beside()
        if found is None:
            return None
        anchor, relation, target = found
        slots = {"name": anchor.name, "relation": relation}
        return self._about("relation", (target, anchor), str(target.digit), **slots)

    def _beside(self) -> tuple[Thing, str, Thing] | None:
        """An anchor, how its neighbour lies to it, and the neighbour."""
        layout = self.scene.layout
        found = [
            (anchor, relation, target)
            for anchor in layout.things
            for relation, step in zip(RELATIONS, NEIGHBOURS, strict=True)
            if (target := layout.neighbour(anchor, *step)) is not None
        ]
        return self.rng.choice(found) if found else None


# Shares of training; what needs more than one look gets more.
_SHARES = {
    "digit": 6, "colour": 4, "shape": 4, "text": 10, "count": 24, "quarter": 4, "relation": 14,
    "existence": 8, "reading": 12, "position": 5, "counting": 14,
}  # fmt: skip


def training_questions(
    rng: random.Random, scene: Scene, canvas: Canvas, number: int
) -> list[Question]:
    """`number` questions about a scene in wordings for training; one of each pair."""
    asker, asked = Asker(rng, scene, canvas, SEEN), list[Question]()
    while len(asked) < number:
        kind = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
        found = asker.ask(kind)
        if found is not None:
            asked.append(rng.choice(found))
    return asked


def pointing_phrase(rng: random.Random, scene: Scene) -> tuple[str, tuple[int, ...]]:
    """A phrase, never a question, and the patches it points to.

    Relevance to a whole question is what the text tower makes of it on its own, which is
    what keeps relevance good but not perfect.
    """
    layout = scene.layout
    if layout.signs and rng.random() < 0.2:
        sign = rng.choice(layout.signs)
        return f"the {sign.name}", scene.patches(sign)
    thing = rng.choice(layout.things)
    digits = [other.digit for other in layout.things]
    if digits.count(thing.digit) == 1 and rng.random() < 0.35:
        return f"the digit {thing.digit}", scene.patches(thing)
    return rng.choice((thing.name, a(thing.name), f"the {thing.name}")), scene.patches(thing)


def caption(rng: random.Random, scene: Scene) -> str:
    """Three parts of the scene in words, for the contrast between images."""
    every: tuple[Thing | Sign, ...] = (*scene.layout.things, *scene.layout.signs)
    parts = rng.sample(every, 3)
    return ", ".join(
        f"{part.name} {part.text if isinstance(part, Sign) else part.digit}" for part in parts
    )
