"""Questions about scenes and pages, with reference answers and the tokens that hold the evidence.

Every kind of question has wordings for training, paraphrases that only the test split uses, and
phrases of as few words as possible, from which language models learn first.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

from benchmarks.yardsticks.clips import Clip, Fact
from benchmarks.yardsticks.pages import Number, Page, Word
from benchmarks.yardsticks.scenes import (
    COLOURS,
    NEIGHBOURS,
    SHAPES,
    WORDS,
    Scene,
    Sign,
    Thing,
)

_Slots = Mapping[str, str | int]
"""Values for the slots of a wording."""

Model = Literal["minillava", "miniqwen", "miniintern", "minigemma", "clips"]
"""A model and its questions; those of `clips` suit any model that takes videos."""

_SCENES = ("digit", "colour", "shape", "count", "quarter", "existence", "reading")
_PAGES = ("value", "word", "cell", "compare", "find")
"""Kinds of question about scenes and pages, where a model is asked about both."""
_TILED = {"scenes": _SCENES, "grounding": ("grounding",), "pages": _PAGES}
"""Categories of a model that sees square tiles."""

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
        "scenes": _SCENES,
        "pages": _PAGES,
    },
    # It was trained on grounding and quarters too, but has not learned to tell places.
    "miniintern": {
        "scenes": tuple(kind for kind in _SCENES if kind != "quarter"),
        "pages": _PAGES,
    },
    "minigemma": _TILED,
    "clips": {"clips": ("moves", "where", "appears", "shows", "passes", "still")},
}
"""Kinds that are reported together; every kind of a model belongs to exactly one category."""

KINDS: tuple[str, ...] = (
    "digit",
    "colour",
    "shape",
    "text",
    "count",
    "quarter",
    "relation",
    "existence",
    "reading",
    "position",
    "counting",
)
"""Kinds that mini-LLaVA is asked, in the order in which they are drawn."""

_PHRASES = {"beside": "shape {relation} the {name}", "half": "half {name}"}
"""Kinds that only training uses: the shape beside another one, and the half that a shape is in."""

_MAX_COUNT = 5
"""Largest number that is the answer to a counting question."""

_NEIGHBOURS = dict(
    zip(("left of", "right of", "above", "below"), NEIGHBOURS, strict=True)
)
_OPPOSITE = {"left": "right", "right": "left", "upper": "lower", "lower": "upper"}

_WORDINGS = tomllib.loads(
    Path(__file__).with_name("wordings.toml").read_text(encoding="utf-8")
)
SEEN, UNSEEN, BRIEF = (
    {kind: tuple(texts[use]) for kind, texts in _WORDINGS.items()}
    for use in ("seen", "unseen", "brief")
)


@dataclass(frozen=True)
class Question:
    """One question; `evidence` has raster patches or tokens, the most informative ones first."""

    kind: str
    text: str
    answer: str
    evidence: tuple[int, ...]


@dataclass(frozen=True)
class _SceneFacts:
    """Draws facts about a scene of `cells` (rows, columns), from which questions are made.

    Trained weights depend on the order of draws: a fact is drawn completely before its wording.
    """

    rng: random.Random
    scene: Scene
    cells: tuple[int, int]

    def draw(self, kind: str) -> Sequence[Fact]:
        """One fact, or one for "yes" and one for "no"; none if the scene does not suit `kind`."""
        match kind:
            case "digit" | "quarter" | "half" | "grounding":
                return self.draw_attribute(kind)
            case "colour" | "shape":
                return self.draw_carrier(kind)
            case "text":
                return self.draw_sign()
            case "count" | "counting":
                return self.draw_group(kind)
            case "relation" | "beside":
                return self.draw_neighbour(kind)
            case "existence":
                return self.draw_existence()
            case _:
                return self.draw_claim(kind)

    def draw_attribute(self, kind: str) -> Sequence[Fact]:
        """The digit on a named shape, or the quarter, half, or row and column that it is in."""
        thing = self.rng.choice(self.scene.things)
        quarter = self._sides(thing)
        rows, columns = self.cells
        # As many rows and columns as there are cells on the shorter side.
        grid = min(self.cells)
        row = thing.row * grid // rows + 1
        column = thing.column * grid // columns + 1
        answers = {
            "digit": str(thing.digit),
            "quarter": " ".join(quarter),
            "half": quarter[1],
            "grounding": f"row {row} column {column}",
        }
        return [(self._patches(thing), answers[kind], {"name": thing.name})]

    def draw_carrier(self, kind: str) -> Sequence[Fact]:
        """The colour or the form of the only shape with a given digit."""
        digits = [thing.digit for thing in self.scene.things]
        unique = [t for t in self.scene.things if digits.count(t.digit) == 1]
        if not unique:
            return []
        thing = self.rng.choice(unique)
        answer = COLOURS[thing.colour] if kind == "colour" else SHAPES[thing.shape]
        return [(self._patches(thing), answer, {"digit": thing.digit})]

    def draw_sign(self) -> Sequence[Fact]:
        """The number on a named sign."""
        if not self.scene.signs:
            return []
        sign = self.rng.choice(self.scene.signs)
        return [(self._patches(sign), sign.text, {"name": sign.name})]

    def draw_group(self, kind: str) -> Sequence[Fact]:
        """How many shapes have a colour or a form; each count that occurs is equally likely."""
        things = self.scene.things
        groups: list[tuple[list[Thing], str]] = []
        for index, colour in enumerate(COLOURS):
            members = [thing for thing in things if thing.colour == index]
            groups.append((members, f"{colour} shapes"))
        for index, shape in enumerate(SHAPES):
            members = [thing for thing in things if thing.shape == index]
            groups.append(
                (members, f"{shape}es" if shape.endswith("s") else f"{shape}s")
            )
        sizes = {len(group) for group, _ in groups if len(group) <= _MAX_COUNT}
        size = self.rng.choice(sorted(sizes))
        group, plural = self.rng.choice([row for row in groups if len(row[0]) == size])
        if kind == "count":
            return [(self._patches(*group), str(size), {"plural": plural})]
        near = [n for n in (size - 1, size + 1) if 0 <= n <= _MAX_COUNT]
        wrong = self.rng.choice(near)
        return self.affirm_and_deny(
            group,
            {"number": size, "plural": plural},
            {"number": wrong, "plural": plural},
        )

    def draw_neighbour(self, kind: str) -> Sequence[Fact]:
        """The digit on the shape beside a named shape."""
        neighbours = []
        for anchor in self.scene.things:
            for relation, step in _NEIGHBOURS.items():
                target = self.scene.neighbour(anchor, *step)
                if target is not None:
                    neighbours.append((anchor, relation, target))
        if not neighbours:
            return []
        anchor, relation, target = self.rng.choice(neighbours)
        # The answer of "beside" is the neighbour's name, then its digit: the two steps of a
        # relation.
        name = f"{target.name} " if kind == "beside" else ""
        slots = {"name": anchor.name, "relation": relation}
        return [(self._patches(target, anchor), f"{name}{target.digit}", slots)]

    def draw_existence(self) -> Sequence[Fact]:
        """A name that a shape of the scene has ("yes"), and a name that none has ("no").

        The latter usually has the colour of one shape and the form of another.
        """
        things = self.scene.things
        thing = self.rng.choice(things)
        taken = {(other.colour, other.shape) for other in things}
        colours = sorted({colour for colour, _ in taken})
        shapes = sorted({shape for _, shape in taken})
        names = [pair for pair in product(colours, shapes) if pair not in taken]
        if not names or self.rng.random() < 0.2:
            every = product(range(len(COLOURS)), range(len(SHAPES)))
            names = [pair for pair in every if pair not in taken]
        colour, shape = self.rng.choice(names)
        absent = replace(thing, colour=colour, shape=shape)
        return [
            (self._patches(thing), "yes", {"a_name": thing.name_with_article}),
            ((), "no", {"a_name": absent.name_with_article}),
        ]

    def draw_claim(self, kind: str) -> Sequence[Fact]:
        """A right and a wrong claim on the digit of a shape, or on the half that it is in."""
        thing = self.rng.choice(self.scene.things)
        name = thing.name
        if kind == "position":
            side = self.rng.choice(self._sides(thing))
            return self.affirm_and_deny(
                [thing],
                {"name": name, "side": side},
                {"name": name, "side": _OPPOSITE[side]},
            )
        digits = list(range(10))
        if self.rng.random() < 0.5:
            digits = [other.digit for other in self.scene.things]
        wrong = [digit for digit in digits if digit != thing.digit]
        return self.affirm_and_deny(
            [thing],
            {"name": name, "digit": thing.digit},
            {"name": name, "digit": self.rng.choice(wrong or [9 - thing.digit])},
        )

    def affirm_and_deny(
        self, parts: Sequence[Thing], true_slots: _Slots, false_slots: _Slots
    ) -> Sequence[Fact]:
        evidence = self._patches(*parts)
        return [(evidence, "yes", true_slots), (evidence, "no", false_slots)]

    def _patches(self, *parts: Thing | Sign) -> list[int]:
        """Patches of all parts: middles of shapes and whole signs first, then other patches."""
        ranked = [
            (rank > 0 and isinstance(part, Thing), index, rank, patch)
            for index, part in enumerate(parts)
            for rank, patch in enumerate(self.scene.patches[part])
        ]
        return [patch for *_, patch in sorted(ranked)]

    def _sides(self, thing: Thing) -> tuple[str, str]:
        """The vertical and the horizontal half of the picture that a shape is in."""
        rows, columns = self.cells
        return (
            "upper" if thing.row < rows // 2 else "lower",
            "left" if thing.column < columns // 2 else "right",
        )


@dataclass(frozen=True)
class Questions:
    """Random questions about a page, a clip, or a scene of `cells` (rows, columns).

    `wordings` has the texts of every kind, with slots.
    """

    rng: random.Random
    content: Scene | Page | Clip
    cells: tuple[int, int]
    wordings: Mapping[str, Sequence[str]]

    def draw_texts(
        self, weights: Mapping[str, int], number: int, form: str
    ) -> list[Question]:
        """Draw `number` questions or phrases for training, only one of each yes/no pair.

        A phrase asks the same as a question in a few words: its answer is a fifth of its tokens,
        that of a question a twentieth. So a small model learns from phrases first to find what is
        named, which takes it longest. `weights` are relative frequencies of kinds; `form` is the
        text, with a slot for the question.
        """
        texts: list[Question] = []
        while len(texts) < number:
            kind = self.rng.choices(list(weights), list(weights.values()))[0]
            group = self.generate(kind)
            if group:
                question = group[0] if kind in _PHRASES else self.rng.choice(group)
                texts.append(
                    replace(question, text=form.format(question=question.text))
                )
        return texts

    def generate(self, kind: str) -> list[Question]:
        """One open question, or a yes/no pair; none if the picture lacks what `kind` is about."""
        facts: Iterable[Fact]
        match self.content:
            case Clip():
                facts = [self.content.ask(kind, self.rng)]
            case Page():
                facts = self._page_facts(kind)
            case Scene():
                facts = _SceneFacts(self.rng, self.content, self.cells).draw(kind)
        questions = []
        for evidence, answer, slots in facts:
            # A draw from a single wording would still advance the generator, on which trained
            # weights depend.
            wording = _PHRASES.get(kind) or self.rng.choice(self.wordings[kind])
            text = wording.format(**slots)
            questions.append(Question(kind, text, answer, tuple(evidence)))
        return questions

    def _page_facts(self, kind: str) -> Iterator[Fact]:
        assert isinstance(self.content, Page)
        page = self.content
        rng = self.rng

        def places(*parts: Number | Word) -> Sequence[int]:
            """Tokens of all parts, then of the words that label them."""
            numbers = [part for part in parts if isinstance(part, Number)]
            names = [name for n in numbers for name in (n.label, n.head)]
            named = [*parts, *filter(None, names)]
            tokens = [page.size.token(part.row, part.column) for part in named]
            return list(dict.fromkeys(tokens))

        match kind, page.style:
            case "value", "list":
                number = rng.choice(page.numbers)
                yield places(number), str(number.value), {"word": number.name}
            case "word", "list":
                number = rng.choice(page.numbers)
                yield places(number), number.name, {"number": number.value}
            case "cell", "table":
                number = rng.choice(page.numbers)
                assert number.head is not None
                slots = {"label": number.name, "head": number.head.text}
                yield places(number), str(number.value), slots
            case "compare", "list":
                number, other = rng.sample(page.numbers, 2)
                if number.value // 10 != other.value // 10:
                    larger = max(number, other, key=lambda named: named.value)
                    slots = {"first": number.name, "second": other.name}
                    yield places(number, other), larger.name, slots
            case "find", _:
                word = rng.choice(page.words)
                texts = {shown.text for shown in page.words}
                absent = rng.choice([text for text in WORDS if text not in texts])
                yield places(word), "yes", {"word": word.text}
                yield (), "no", {"word": absent}
