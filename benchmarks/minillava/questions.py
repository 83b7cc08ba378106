"""Questions about a scene, with reference answers and the patches that hold the evidence."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.minillava.layout import COLOURS, NEIGHBOURS, SHAPES, Canvas, Sign, Thing
from benchmarks.minillava.render import Scene
from benchmarks.minillava.wordings import (
    MAX_COUNT,
    PAIR_KINDS,
    RELATIONS,
    name_plural,
    with_article,
)


@dataclass(frozen=True)
class Question:
    """One question; `evidence` lists raster patches, the most informative first."""

    kind: str
    text: str
    answer: str
    evidence: tuple[int, ...]


@dataclass(frozen=True)
class QuestionGenerator:
    """Random questions about one scene; `wordings` has the templates of every kind."""

    rng: random.Random
    scene: Scene
    canvas: Canvas
    wordings: Mapping[str, Sequence[str]]

    def generate(self, kind: str) -> list[Question] | None:
        """One open question, or a yes/no pair; None if the scene has nothing to ask about."""
        if kind in PAIR_KINDS:
            return self._generate_pair(kind)
        question = self._generate_open(kind)
        return None if question is None else [question]

    def _generate_open(self, kind: str) -> Question | None:
        match kind:
            case "digit":
                thing = self._pick_thing()
                return self._question(kind, (thing,), str(thing.digit), name=thing.name)
            case "colour" | "shape":
                unique = self._pick_unique_digit()
                if unique is None:
                    return None
                answer = COLOURS[unique.colour] if kind == "colour" else SHAPES[unique.shape]
                return self._question(kind, (unique,), answer, digit=unique.digit)
            case "text":
                if not self.scene.layout.signs:
                    return None
                sign = self.rng.choice(self.scene.layout.signs)
                return self._question(kind, (sign,), sign.text, name=sign.name)
            case "count":
                things, plural = self._pick_group()
                return self._question(kind, things, str(len(things)), plural=plural)
            case "quarter":
                thing = self._pick_thing()
                answer = " ".join(self._sides(thing))
                return self._question(kind, (thing,), answer, name=thing.name)
            case "relation":
                return self._generate_relation()
        raise ValueError(f"{kind!r} is not an open kind of question")

    def _generate_pair(self, kind: str) -> list[Question]:
        match kind:
            case "existence":
                thing, absent = self._pick_thing(), self._pick_absent_name()
                yes = self._question(kind, (thing,), "yes", a_name=with_article(thing.name))
                return [yes, self._question(kind, (), "no", a_name=with_article(absent))]
            case "reading":
                thing = self._pick_thing()
                shown = [other.digit for other in self.scene.layout.things]
                digits = shown if self.rng.random() < 0.5 else range(10)
                wrong = [digit for digit in digits if digit != thing.digit] or [9 - thing.digit]
                name, other = thing.name, self.rng.choice(wrong)
                yes = self._question(kind, (thing,), "yes", name=name, digit=thing.digit)
                return [yes, self._question(kind, (thing,), "no", name=name, digit=other)]
            case "position":
                thing = self._pick_thing()
                side = self.rng.choice(self._sides(thing))
                opposite = {"left": "right", "right": "left", "upper": "lower", "lower": "upper"}
                yes = self._question(kind, (thing,), "yes", name=thing.name, side=side)
                no = self._question(kind, (thing,), "no", name=thing.name, side=opposite[side])
                return [yes, no]
            case "counting":
                things, plural = self._pick_group()
                number = len(things)
                near = [n for n in (number - 1, number + 1) if 0 <= n <= MAX_COUNT]
                wrong_number = self.rng.choice(near)
                yes = self._question(kind, things, "yes", number=number, plural=plural)
                no = self._question(kind, things, "no", number=wrong_number, plural=plural)
                return [yes, no]
        raise ValueError(f"{kind!r} is not a kind of yes/no question")

    def _question(
        self, kind: str, parts: Iterable[Thing | Sign], answer: str, **slots: str | int
    ) -> Question:
        text = self.rng.choice(self.wordings[kind]).format(**slots)
        return Question(kind, text, answer, self._evidence(parts))

    def _evidence(self, parts: Iterable[Thing | Sign]) -> tuple[int, ...]:
        """Patches of all parts: the whole of every sign and the middle of every shape first."""
        ranked = [
            (0 if place == 0 or isinstance(part, Sign) else 1, index, place, patch)
            for index, part in enumerate(parts)
            for place, patch in enumerate(self.scene.patches(part))
        ]
        return tuple(patch for *_, patch in sorted(ranked))

    def _pick_thing(self) -> Thing:
        return self.rng.choice(self.scene.layout.things)

    def _pick_unique_digit(self) -> Thing | None:
        """A shape whose digit no other shape carries, if there is one."""
        things = self.scene.layout.things
        digits = [thing.digit for thing in things]
        unique = [thing for thing in things if digits.count(thing.digit) == 1]
        return self.rng.choice(unique) if unique else None

    def _pick_absent_name(self) -> str:
        """A name that no shape in the scene has; usually its colour and its form both occur."""
        things = self.scene.layout.things
        taken = {(thing.colour, thing.shape) for thing in things}
        colours = sorted({thing.colour for thing in things})
        shapes = sorted({thing.shape for thing in things})
        near = [(c, s) for c in colours for s in shapes if (c, s) not in taken]
        if not near or self.rng.random() < 0.2:
            pairs = [(c, s) for c in range(len(COLOURS)) for s in range(len(SHAPES))]
            near = [pair for pair in pairs if pair not in taken]
        if not near:
            raise ValueError("the scene shows every colour in every form: no name is absent")
        colour, shape = self.rng.choice(near)
        return f"{COLOURS[colour]} {SHAPES[shape]}"

    def _sides(self, thing: Thing) -> tuple[str, str]:
        half = self.canvas.cells // 2
        return (
            "upper" if thing.row < half else "lower",
            "left" if thing.column < half else "right",
        )

    def _pick_group(self) -> tuple[list[Thing], str]:
        """All shapes of one colour or form, and their name; sizes that occur are equally likely."""
        things = self.scene.layout.things
        groups: dict[int, list[tuple[list[Thing], str]]] = {}
        for colour in range(len(COLOURS)):
            group = [thing for thing in things if thing.colour == colour]
            groups.setdefault(len(group), []).append((group, name_plural(colour, None)))
        for shape in range(len(SHAPES)):
            group = [thing for thing in things if thing.shape == shape]
            groups.setdefault(len(group), []).append((group, name_plural(None, shape)))
        size = self.rng.choice(sorted(size for size in groups if size <= MAX_COUNT))
        return self.rng.choice(groups[size])

    def _generate_relation(self) -> Question | None:
        """Ask for the digit of the shape beside the one that the text names."""
        neighbours = self._pick_neighbours()
        if neighbours is None:
            return None
        anchor, relation, target = neighbours
        slots = {"name": anchor.name, "relation": relation}
        return self._question("relation", (target, anchor), str(target.digit), **slots)

    def _pick_neighbours(self) -> tuple[Thing, str, Thing] | None:
        """A shape, the relation of its neighbour to it, and that neighbour."""
        layout = self.scene.layout
        neighbours = [
            (anchor, relation, target)
            for anchor in layout.things
            for relation, step in zip(RELATIONS, NEIGHBOURS, strict=True)
            if (target := layout.neighbour(anchor, *step)) is not None
        ]
        return self.rng.choice(neighbours) if neighbours else None
