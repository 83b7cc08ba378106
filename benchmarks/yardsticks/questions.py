"""Questions about scenes and pages, with reference answers and the tokens that hold the evidence.

Every kind of question has wordings for training, unseen paraphrases for testing, and phrases of as
few words as possible, from which language models learn first.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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

# Slots of scenes: name, a_name, digit, colour, plural, side, number, relation; of pages: word,
# number, label, head, first, second. On pages, words and numbers follow a space, so that they are
# the same tokens in questions and answers.
Wordings = Mapping[str, Sequence[str]]

SEEN: Wordings = {
    "digit": (
        "What digit is on the {name}?",
        "Which digit does the {name} carry?",
        "Read the digit on the {name}.",
        "What is written on the {name}?",
        "Name the digit of the {name}.",
        "Look at the {name}. What digit is on it?",
        "On the {name}, which digit is written?",
        "The {name} has which digit on it?",
        "Can the digit on the {name} be read? Name it.",
    ),
    "colour": (
        "What colour is the shape with the digit {digit}?",
        "Which colour has the shape that carries the digit {digit}?",
        "Name the colour of the shape with the digit {digit}.",
        "Look for the digit {digit}. Which colour has its shape?",
        "The shape with the digit {digit} has which colour?",
        "Of which colour is the shape that carries the digit {digit}?",
        "The digit {digit}: on which colour is it?",
        "Which colour is under the digit {digit}?",
    ),
    "shape": (
        "What shape carries the digit {digit}?",
        "Which shape has the digit {digit}?",
        "Name the shape with the digit {digit}.",
        "Look for the digit {digit}. What shape is it on?",
        "The digit {digit} is carried by which shape?",
        "The digit {digit}: on which shape is it?",
        "Of the shapes, which has the digit {digit} on it?",
    ),
    "text": (
        "What number is on the {name}?",
        "Read the number on the {name}.",
        "Which number does the {name} show?",
        "Look at the {name}. Which number is on it?",
        "On the {name}, what number is written?",
        "The {name} has which number on it?",
        "Which number can be read on the {name}?",
    ),
    "count": (
        "How many {plural} are there?",
        "Count the {plural} in the picture.",
        "How many {plural} does the picture show?",
        "Look for {plural}. How many are there?",
        "Of {plural}, how many are in the picture?",
        "Count all {plural} that can be seen.",
        "The picture shows how many {plural}?",
        "Name the number of {plural}.",
        "What number of {plural} does the picture show?",
    ),
    "quarter": (
        "In which quarter of the picture is the {name}?",
        "Which quarter of the picture holds the {name}?",
        "Name the quarter that the {name} is in.",
        "Look for the {name}. In which quarter is it?",
        "Where is the {name}? Name the quarter.",
        "The {name}: which quarter is it in?",
    ),
    "relation": (
        "What digit is on the shape {relation} the {name}?",
        "Which digit does the shape {relation} the {name} carry?",
        "Read the digit {relation} the {name}.",
        "Which digit is {relation} the {name}?",
        "Look at the {name}. What digit is on the shape {relation} it?",
        "The shape {relation} the {name} carries which digit?",
    ),
    "existence": (
        "Is there {a_name} in the picture?",
        "Does the picture show {a_name}?",
        "Can {a_name} be seen?",
        "Look for {a_name}. Is it there?",
        "Is {a_name} there?",
        "Can the picture be said to show {a_name}?",
    ),
    "reading": (
        "Does the {name} carry the digit {digit}?",
        "Is the digit on the {name} a {digit}?",
        "Is there the digit {digit} on the {name}?",
        "Look at the {name}. Is its digit a {digit}?",
        "Is {digit} the digit on the {name}?",
        "Does the {name} have the digit {digit} on it?",
        "Is a {digit} written on the {name}?",
        "Can the digit {digit} be read on the {name}?",
        "The {name}: is its digit a {digit}?",
    ),
    "position": (
        "Is the {name} in the {side} half of the picture?",
        "Does the {side} half of the picture hold the {name}?",
        "Is the {name} in the {side} half?",
        "Look for the {name}. Is it in the {side} half?",
        "Is the {side} half where the {name} is?",
        "The {name}: is it in the {side} half?",
    ),
    "counting": (
        "Are there exactly {number} {plural}?",
        "Does the picture show exactly {number} {plural}?",
        "Are there {number} {plural} in the picture?",
        "Is {number} the number of {plural}?",
        "Can {number} {plural} be counted, no more and no less?",
        "Does the picture have exactly {number} {plural}?",
        "Of {plural}, are there exactly {number}?",
    ),
    "value": (
        "What number is next to {word}?",
        "Which number does the page give for {word}?",
        "Read the number next to {word}.",
        "Look for {word}. What number is next to it?",
        "The number of {word} is what?",
    ),
    "word": (
        "Which word has the number {number}?",
        "What word is next to {number}?",
        "Look for the number {number}. Which word is next to it?",
        "Name the word with the number {number}.",
        "The number {number} is next to which word?",
    ),
    "cell": (
        "What number is in row {label} under {head}?",
        "Which number does the table give for {label} and {head}?",
        "Read the number of {label} in column {head}.",
        "In column {head}, what is the number of {label}?",
        "Look at row {label}. What number is under {head}?",
    ),
    "compare": (
        "Which has the larger number, {first} or {second}?",
        "Of {first} and {second}, which has the larger number?",
        "Compare {first} and {second}. Which number is larger?",
        "Is the number of {first} or of {second} larger?",
    ),
    "find": (
        "Is the word {word} on the page?",
        "Does the page show {word}?",
        "Look for {word}. Is it there?",
        "Can {word} be read on the page?",
        "Is there a {word} on the page?",
    ),
}

# Paraphrases in the words of training, put together in a new way.
UNSEEN: Wordings = {
    "digit": ("The {name} carries which digit?", "Name the digit that is on the {name}."),
    "colour": ("The digit {digit} is on a shape of which colour?",),
    "shape": ("On which shape is the digit {digit}?", "The digit {digit} is on what shape?"),
    "text": ("Name the number that the {name} shows.", "The {name} carries what number?"),
    "count": ("What is the number of {plural}?", "How many {plural} can be seen?"),
    "quarter": ("The {name} is in which quarter?",),
    "relation": ("Name the digit on the shape that is {relation} the {name}.",),
    "existence": ("Does the picture have {a_name}?", "Is {a_name} in the picture?"),
    "reading": ("Does the {name} show the digit {digit}?",),
    "position": ("Can the {name} be seen in the {side} half?",),
    "counting": ("Can exactly {number} {plural} be seen?",),
    "value": ("Name the number of {word}.",),
    "word": ("What word has {number} next to it?",),
    "cell": ("What number does the table give in row {label}, column {head}?",),
    "compare": ("Which number is larger, of {first} or of {second}?",),
    "find": ("Can the page be read to show {word}?",),
}

BRIEF: Wordings = {
    "digit": ("{name}",),
    "colour": ("colour digit {digit}",),
    "shape": ("shape digit {digit}",),
    "text": ("{name}",),
    "count": ("{plural}",),
    "quarter": ("quarter {name}",),
    "relation": ("{relation} the {name}",),
    "existence": ("{a_name}",),
    # The name never comes first, because a name followed by a digit is an answered `digit` phrase.
    "reading": ("{digit} on the {name}", "the {name} a {digit}"),
    "position": ("{side} half {name}",),
    "counting": ("{number} {plural}",),
    "value": ("number {word}",),
    "word": ("word {number}",),
    "cell": ("row {label} under {head}",),
    "compare": ("larger {first} or {second}",),
    "find": ("there {word}",),
}


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
                side = rng.choice(self.sides(thing))
                yes = self._question(kind, (thing,), "yes", name=thing.name, side=side)
                opposite = _OPPOSITE[side]
                no = self._question(kind, (thing,), "no", name=thing.name, side=opposite)
                return [yes, no]
            case "counting":
                things, plural = self._pick_group()
                number = len(things)
                near = [n for n in (number - 1, number + 1) if 0 <= n <= _MAX_COUNT]
                wrong_number = rng.choice(near)
                yes = self._question(kind, things, "yes", number=number, plural=plural)
                no = self._question(kind, things, "no", number=wrong_number, plural=plural)
                return [yes, no]
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
        groups: dict[int, list[tuple[list[Thing], str]]] = {}
        for number, colour in enumerate(COLOURS):
            group = [thing for thing in things if thing.colour == number]
            groups.setdefault(len(group), []).append((group, f"{colour} shapes"))
        for number, shape in enumerate(SHAPES):
            group = [thing for thing in things if thing.shape == number]
            groups.setdefault(len(group), []).append((group, name_plural(shape)))
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


def name_plural(shape: str) -> str:
    """All shapes of a form: "squares", "crosses"."""
    return f"{shape}{'es' if shape.endswith('s') else 's'}"


def _label(number: Number) -> str:
    assert number.label is not None
    return number.label.text
