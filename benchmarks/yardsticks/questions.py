"""Questions about scenes and pages, with reference answers and the tokens that hold the evidence.

Every kind of question has wordings for training, unseen paraphrases for testing, and phrases of as
few words as possible, from which language models learn first.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.yardsticks.pages import WORDS, Number, Page, Word
from benchmarks.yardsticks.scenes import COLOURS, NEIGHBOURS, SHAPES, Scene, Sign, Thing

Model = Literal["minillava", "miniqwen"]

CATEGORIES: dict[Model, dict[str, tuple[str, ...]]] = {
    "minillava": {
        "attributes": ("digit", "colour", "shape"),
        "existence": ("existence",),
        "reading": ("reading",),
        "position": ("position", "quarter"),
        "counting": ("count", "counting"),
        "two-hop": ("relation",),
        "fine text": ("text",),
    },
    "miniqwen": {
        "scenes": ("digit", "colour", "shape", "count", "quarter", "existence", "reading"),
        "pages": ("value", "word", "cell", "compare", "find"),
    },
}
"""Kinds that are reported together; every kind of a model is in exactly one category."""

KINDS = (
    "digit", "colour", "shape", "text", "count", "quarter", "relation",
    "existence", "reading", "position", "counting",
)  # fmt: skip
"""Kinds that mini-LLaVA is asked, in the order in which they are drawn."""

_MAX_COUNT = 5
"""The largest number that is ever asked for."""

_RELATIONS = ("left of", "right of", "above", "below")
_OPPOSITE = {"left": "right", "right": "left", "upper": "lower", "lower": "upper"}

Wordings = Mapping[str, Sequence[str]]
"""Texts of every kind, with slots."""

_WORDINGS = tomllib.loads(Path(__file__).with_name("wordings.toml").read_text(encoding="utf-8"))
SEEN, UNSEEN, BRIEF = (
    {kind: tuple(texts[use]) for kind, texts in _WORDINGS.items()}
    for use in ("seen", "unseen", "brief")
)


@dataclass(frozen=True)
class Question:
    """One question; `evidence` lists raster patches or tokens, the most informative first."""

    kind: str
    text: str
    answer: str
    evidence: tuple[int, ...]


@dataclass(frozen=True)
class SceneQuestions:
    """Random questions about a scene of `cells` (rows, columns)."""

    rng: random.Random
    scene: Scene
    cells: tuple[int, int]
    wordings: Wordings

    def generate(self, kind: str) -> list[Question] | None:
        """One open question, or a yes/no pair; None if the scene has nothing to ask about."""
        rng, layout = self.rng, self.scene.layout
        match kind:
            case "digit":
                thing = self.pick_thing()
                return [self._question(kind, (thing,), str(thing.digit), name=thing.name)]
            case "colour" | "shape":
                digits = [thing.digit for thing in layout.things]
                unique = [thing for thing in layout.things if digits.count(thing.digit) == 1]
                if not unique:
                    return None
                thing = rng.choice(unique)
                answer = COLOURS[thing.colour] if kind == "colour" else SHAPES[thing.shape]
                return [self._question(kind, (thing,), answer, digit=thing.digit)]
            case "text":
                if not layout.signs:
                    return None
                sign = rng.choice(layout.signs)
                return [self._question(kind, (sign,), sign.text, name=sign.name)]
            case "count":
                things, plural = self._pick_group()
                return [self._question(kind, things, str(len(things)), plural=plural)]
            case "quarter":
                thing = self.pick_thing()
                answer = " ".join(self.sides(thing))
                return [self._question(kind, (thing,), answer, name=thing.name)]
            case "relation":
                neighbours = self.pick_neighbours()
                if neighbours is None:
                    return None
                anchor, relation, target = neighbours
                slots = {"name": anchor.name, "relation": relation}
                return [self._question(kind, (target, anchor), str(target.digit), **slots)]
            case "existence":
                thing, absent = self.pick_thing(), self._pick_absent_name()
                yes = self._question(kind, (thing,), "yes", a_name=with_article(thing.name))
                return [yes, self._question(kind, (), "no", a_name=with_article(absent))]
            case "reading":
                thing = self.pick_thing()
                shown = [other.digit for other in layout.things]
                digits = shown if rng.random() < 0.5 else list(range(10))
                wrong = [digit for digit in digits if digit != thing.digit] or [9 - thing.digit]
                name, other = thing.name, rng.choice(wrong)
                yes = self._question(kind, (thing,), "yes", name=name, digit=thing.digit)
                return [yes, self._question(kind, (thing,), "no", name=name, digit=other)]
            case "position":
                thing = self.pick_thing()
                side, name = rng.choice(self.sides(thing)), thing.name
                yes = self._question(kind, (thing,), "yes", name=name, side=side)
                return [yes, self._question(kind, (thing,), "no", name=name, side=_OPPOSITE[side])]
            case "counting":
                things, plural = self._pick_group()
                count = len(things)
                near = rng.choice([n for n in (count - 1, count + 1) if 0 <= n <= _MAX_COUNT])
                yes = self._question(kind, things, "yes", number=count, plural=plural)
                return [yes, self._question(kind, things, "no", number=near, plural=plural)]
        raise ValueError(f"{kind!r} is not a kind of question about a scene")

    def evidence(self, parts: Iterable[Thing | Sign]) -> tuple[int, ...]:
        """Patches of all parts: the whole of every sign and the middle of every shape first."""
        ranked = [
            (0 if place == 0 or isinstance(part, Sign) else 1, index, place, patch)
            for index, part in enumerate(parts)
            for place, patch in enumerate(self.scene.patches(part))
        ]
        return tuple(patch for *_, patch in sorted(ranked))

    def pick_thing(self) -> Thing:
        """A random shape of the scene."""
        return self.rng.choice(self.scene.layout.things)

    def pick_neighbours(self) -> tuple[Thing, str, Thing] | None:
        """A shape, the relation of its neighbour to it, and that neighbour."""
        layout = self.scene.layout
        neighbours = [
            (anchor, relation, target)
            for anchor in layout.things
            for relation, step in zip(_RELATIONS, NEIGHBOURS, strict=True)
            if (target := layout.neighbour(anchor, *step)) is not None
        ]
        return self.rng.choice(neighbours) if neighbours else None

    def sides(self, thing: Thing) -> tuple[str, str]:
        """The halves of the picture that a shape is in: upper or lower, left or right."""
        rows, columns = self.cells
        return (
            "upper" if thing.row < rows // 2 else "lower",
            "left" if thing.column < columns // 2 else "right",
        )

    def _question(
        self, kind: str, parts: Iterable[Thing | Sign], answer: str, **slots: str | int
    ) -> Question:
        text = self.rng.choice(self.wordings[kind]).format(**slots)
        return Question(kind, text, answer, self.evidence(parts))

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
        colour, shape = self.rng.choice(near)
        return f"{COLOURS[colour]} {SHAPES[shape]}"

    def _pick_group(self) -> tuple[list[Thing], str]:
        """All shapes of one colour or form, and their name; sizes that occur are equally likely."""
        things = self.scene.layout.things
        named = [
            ([t for t in things if t.colour == n], f"{c} shapes") for n, c in enumerate(COLOURS)
        ]
        named += [([t for t in things if t.shape == n], plural_of(s)) for n, s in enumerate(SHAPES)]
        groups: dict[int, list[tuple[list[Thing], str]]] = {}
        for group, name in named:
            groups.setdefault(len(group), []).append((group, name))
        size = self.rng.choice(sorted(size for size in groups if size <= _MAX_COUNT))
        return self.rng.choice(groups[size])


@dataclass(frozen=True)
class PageQuestions:
    """Random questions about one page."""

    rng: random.Random
    page: Page
    wordings: Wordings

    def generate(self, kind: str) -> list[Question] | None:
        """One open question, or a yes/no pair; None if the page has nothing to ask about."""
        page, rng = self.page, self.rng
        table = page.style == "table"
        match kind:
            case "value" | "word" if not table:
                number = rng.choice(page.numbers)
                if kind == "word":
                    text = _label(number)
                    return [self._question(kind, (number,), text, number=number.value)]
                return [self._question(kind, (number,), str(number.value), word=_label(number))]
            case "cell" if table:
                number = rng.choice(page.numbers)
                assert number.head is not None
                slots = {"label": _label(number), "head": number.head.text}
                return [self._question(kind, (number,), str(number.value), **slots)]
            case "compare" if not table:
                pair = rng.sample(page.numbers, 2)
                if pair[0].value // 10 == pair[1].value // 10:
                    return None
                larger = max(pair, key=lambda number: number.value)
                slots = {"first": _label(pair[0]), "second": _label(pair[1])}
                return [self._question(kind, pair, _label(larger), **slots)]
            case "find":
                word = rng.choice(page.words)
                shown = {other.word for other in page.words}
                absent = rng.choice([text for i, text in enumerate(WORDS) if i not in shown])
                yes = self._question(kind, (word,), "yes", word=word.text)
                return [yes, self._question(kind, (), "no", word=absent)]
        return None

    def _question(
        self, kind: str, parts: Sequence[Number | Word], answer: str, **slots: str | int
    ) -> Question:
        """Its evidence is the tokens of all parts, then of the words that name them."""
        text = self.rng.choice(self.wordings[kind]).format(**slots)
        columns = self.page.size.columns
        names = [
            word
            for part in parts
            if isinstance(part, Number)
            for word in (part.label, part.head)
            if word is not None
        ]
        places = [part.row * columns + part.column for part in (*parts, *names)]
        return Question(kind, text, answer, tuple(dict.fromkeys(places)))


def with_article(name: str) -> str:
    """The name with its indefinite article: "a red square", "an orange circle"."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def plural_of(shape: str) -> str:
    """All shapes of a form: "squares", "crosses"."""
    return f"{shape}{'es' if shape.endswith('s') else 's'}"


def _label(number: Number) -> str:
    assert number.label is not None
    return number.label.text
