"""Questions about scenes and pages, with answers and the tokens that hold the evidence."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.minillava.layout import Thing
from benchmarks.minillava.questions import Question, QuestionGenerator
from benchmarks.miniqwen.pages import WORDS, Number, Page, Word
from benchmarks.miniqwen.render import scene_cells
from benchmarks.miniqwen.sizes import Size


@dataclass(frozen=True)
class SceneQuestions(QuestionGenerator):
    """mini-LLaVA's questions about a scene on a rectangle of cells."""

    size: Size

    def _sides(self, thing: Thing) -> tuple[str, str]:
        rows, columns = scene_cells(self.size)
        return (
            "upper" if thing.row < rows // 2 else "lower",
            "left" if thing.column < columns // 2 else "right",
        )


@dataclass(frozen=True)
class PageQuestions:
    """Random questions about one page; `wordings` has the templates of every kind."""

    rng: random.Random
    page: Page
    wordings: Mapping[str, Sequence[str]]

    def generate(self, kind: str) -> list[Question] | None:
        """One open question, or a yes/no pair; None if the page has nothing to ask about."""
        page, rng = self.page, self.rng
        table = page.style == "table"
        match kind:
            case "value" | "word" if not table:
                number = rng.choice(page.numbers)
                if kind == "word":
                    text = self._word(number)
                    return [self._question(kind, (number,), text, number=number.value)]
                slots = {"word": self._word(number)}
                return [self._question(kind, (number,), str(number.value), **slots)]
            case "cell" if table:
                number = rng.choice(page.numbers)
                assert number.head is not None
                slots = {"label": self._word(number), "head": number.head.text}
                return [self._question(kind, (number,), str(number.value), **slots)]
            case "compare" if not table:
                one, other = rng.sample(page.numbers, 2)
                if one.value // 10 == other.value // 10:
                    return None
                larger = max(one, other, key=lambda number: number.value)
                slots = {"first": self._word(one), "second": self._word(other)}
                return [self._question(kind, (one, other), self._word(larger), **slots)]
            case "find":
                word = rng.choice(page.words)
                shown = {one.word for one in page.words}
                absent = rng.choice([one for i, one in enumerate(WORDS) if i not in shown])
                yes = self._question(kind, (word,), "yes", word=word.text)
                return [yes, self._question(kind, (), "no", word=absent)]
        return None

    @staticmethod
    def _word(number: Number) -> str:
        assert number.label is not None
        return number.label.text

    def _question(
        self, kind: str, parts: Sequence[Number | Word], answer: str, **slots: str | int
    ) -> Question:
        text = self.rng.choice(self.wordings[kind]).format(**slots)
        return Question(kind, text, answer, self._evidence(parts))

    def _evidence(self, parts: Sequence[Number | Word]) -> tuple[int, ...]:
        """Tokens of all parts, then of the words that name them."""
        columns = self.page.size.columns
        names = [
            word
            for part in parts
            if isinstance(part, Number)
            for word in (part.label, part.head)
            if word is not None
        ]
        return tuple(dict.fromkeys(one.row * columns + one.column for one in (*parts, *names)))
