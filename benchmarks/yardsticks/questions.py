"""Questions about scenes and pages, with reference answers and the tokens that hold the evidence.

Every kind of question has wordings for training, unseen paraphrases for testing, and phrases of as
few words as possible, from which language models learn first.
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

Model = Literal["minillava", "miniqwen", "clips"]
"""Whose questions; those about clips are for any model that takes videos."""

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
        "scenes": (
            "digit",
            "colour",
            "shape",
            "count",
            "quarter",
            "existence",
            "reading",
        ),
        "pages": ("value", "word", "cell", "compare", "find"),
    },
    "clips": {"clips": ("moves", "where", "appears", "shows", "passes", "still")},
}
"""Kinds that are reported together; every kind of a model is in exactly one category."""

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
"""Kinds of the training alone: a shape beside another one, and a half of the picture."""

_MAX_COUNT = 5
"""The largest number that is ever asked for."""

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
    """One question; `evidence` lists raster patches or tokens, the most informative first."""

    kind: str
    text: str
    answer: str
    evidence: tuple[int, ...]


@dataclass(frozen=True)
class Questions:
    """Random questions about a page, or about a scene of `cells` (rows, columns).

    `wordings` are texts of every kind, with slots.
    """

    rng: random.Random
    content: Scene | Page | Clip
    cells: tuple[int, int]
    wordings: Mapping[str, Sequence[str]]

    def draw_texts(
        self, weights: Mapping[str, int], number: int, form: str
    ) -> list[Question]:
        """Draw questions of a training, or phrases; one of each pair, with its text in a form.

        A phrase asks the same as a question in a few words. A fifth of its tokens are answer, of a
        question's one in twenty, and finding what is named is what a small model takes longest to
        learn. `weights` are relative frequencies of kinds; `form` has a slot for the question.
        """
        texts: list[Question] = []
        while len(texts) < number:
            kind = self.rng.choices(list(weights), list(weights.values()))[0]
            if group := self.generate(kind):
                question = group[0] if kind in _PHRASES else self.rng.choice(group)
                texts.append(
                    replace(question, text=form.format(question=question.text))
                )
        return texts

    def generate(self, kind: str) -> list[Question]:
        """One open question, or a yes/no pair; none if the picture has nothing to ask about."""
        facts: Iterable[Fact] = ()
        match self.content:
            case Clip():
                facts = [self.content.ask(kind, self.rng)]
            case Page():
                facts = self._page_facts(kind)
            case Scene():
                facts = self._scene_facts(kind)
        questions = []
        for evidence, answer, slots in facts:
            # A draw from one wording would advance the generator, on which trained weights depend.
            wording = _PHRASES.get(kind) or self.rng.choice(self.wordings[kind])
            text = wording.format(**slots)
            questions.append(Question(kind, text, answer, tuple(evidence)))
        return questions

    def _scene_facts(self, kind: str) -> Iterator[Fact]:  # noqa: C901, PLR0915
        assert isinstance(self.content, Scene)
        scene = self.content
        rng = self.rng
        things = self.content.things
        digits = [thing.digit for thing in things]

        def patches(*parts: Thing | Sign) -> list[int]:
            """Patches of all parts: the whole of every sign and the middle of every shape first."""
            ranked = [
                (0 if place == 0 or isinstance(part, Sign) else 1, index, place, patch)
                for index, part in enumerate(parts)
                for place, patch in enumerate(scene.patches[part])
            ]
            return [patch for *_, patch in sorted(ranked)]

        def sides(thing: Thing) -> tuple[str, str]:
            """The halves of the picture that a shape is in."""
            rows, columns = self.cells
            return (
                "upper" if thing.row < rows // 2 else "lower",
                "left" if thing.column < columns // 2 else "right",
            )

        match kind:
            case "digit" | "quarter" | "half":
                thing = rng.choice(things)
                quarter = sides(thing)
                answers = {"digit": str(thing.digit), "quarter": " ".join(quarter)}
                yield (
                    patches(thing),
                    answers.get(kind, quarter[1]),
                    {"name": thing.name},
                )
            case "colour" | "shape":
                if unique := [
                    thing for thing in things if digits.count(thing.digit) == 1
                ]:
                    thing = rng.choice(unique)
                    answer = (
                        COLOURS[thing.colour]
                        if kind == "colour"
                        else SHAPES[thing.shape]
                    )
                    yield patches(thing), answer, {"digit": thing.digit}
            case "text":
                if scene.signs:
                    sign = rng.choice(scene.signs)
                    yield patches(sign), sign.text, {"name": sign.name}
            case "count":
                group, plural = self._pick_group(things)
                yield patches(*group), str(len(group)), {"plural": plural}
            case "relation" | "beside":
                neighbours = [
                    (anchor, relation, target)
                    for anchor in things
                    for relation, step in _NEIGHBOURS.items()
                    if (target := scene.neighbour(anchor, *step)) is not None
                ]
                if neighbours:
                    anchor, relation, target = rng.choice(neighbours)
                    # Beside: the neighbour's name and then its digit, the steps of a relation.
                    name = f"{target.name} " if kind == "beside" else ""
                    slots = {"name": anchor.name, "relation": relation}
                    yield patches(target, anchor), f"{name}{target.digit}", slots
            case "existence":
                thing = rng.choice(things)
                # A name that no shape has; usually its colour and its form both occur.
                taken = {(thing.colour, thing.shape) for thing in things}
                colours, shapes = (
                    sorted(set(part)) for part in zip(*taken, strict=True)
                )
                names = [pair for pair in product(colours, shapes) if pair not in taken]
                if not names or rng.random() < 0.2:
                    every = product(range(len(COLOURS)), range(len(SHAPES)))
                    names = [pair for pair in every if pair not in taken]
                colour, shape = rng.choice(names)
                absent = replace(thing, colour=colour, shape=shape)
                yield patches(thing), "yes", {"a_name": thing.name_with_article}
                yield (), "no", {"a_name": absent.name_with_article}
            case "reading":
                thing = rng.choice(things)
                likely = digits if rng.random() < 0.5 else list(range(10))
                others = [digit for digit in likely if digit != thing.digit] or [
                    9 - thing.digit
                ]
                wrong = rng.choice(
                    others
                )  # before the draw of a wording, as for the weights
                yield patches(thing), "yes", {"name": thing.name, "digit": thing.digit}
                yield patches(thing), "no", {"name": thing.name, "digit": wrong}
            case "position":
                thing = rng.choice(things)
                side = rng.choice(sides(thing))
                yield patches(thing), "yes", {"name": thing.name, "side": side}
                yield (
                    patches(thing),
                    "no",
                    {"name": thing.name, "side": _OPPOSITE[side]},
                )
            case "counting":
                group, plural = self._pick_group(things)
                count = len(group)
                near = rng.choice(
                    [n for n in (count - 1, count + 1) if 0 <= n <= _MAX_COUNT]
                )
                yield patches(*group), "yes", {"number": count, "plural": plural}
                yield patches(*group), "no", {"number": near, "plural": plural}

    def _pick_group(self, things: Sequence[Thing]) -> tuple[list[Thing], str]:
        """All shapes of one colour or form, and their name; sizes that occur are equally likely."""
        plurals = [
            f"{shape}es" if shape.endswith("s") else f"{shape}s" for shape in SHAPES
        ]
        groups = [
            *(
                ([t for t in things if t.colour == n], f"{c} shapes")
                for n, c in enumerate(COLOURS)
            ),
            *(
                ([t for t in things if t.shape == n], name)
                for n, name in enumerate(plurals)
            ),
        ]
        sizes = {len(group) for group, _ in groups if len(group) <= _MAX_COUNT}
        size = self.rng.choice(sorted(sizes))
        return self.rng.choice([group for group in groups if len(group[0]) == size])

    def _page_facts(self, kind: str) -> Iterator[Fact]:
        assert isinstance(self.content, Page)
        page = self.content
        rng = self.rng

        def places(*parts: Number | Word) -> Sequence[int]:
            """Tokens of all parts, then of the words that name them."""
            numbers = [part for part in parts if isinstance(part, Number)]
            names = [
                word
                for number in numbers
                for word in (number.label, number.head)
                if word
            ]
            columns = page.size.columns
            tokens = [part.row * columns + part.column for part in (*parts, *names)]
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
                word, texts = rng.choice(page.words), {word.text for word in page.words}
                absent = rng.choice([text for text in WORDS if text not in texts])
                yield places(word), "yes", {"word": word.text}
                yield (), "no", {"word": absent}
