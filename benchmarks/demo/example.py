"""The one picture that the demo ends with: chosen, explained, checked against the server, drawn.

Knows nothing about how servers are run.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from benchmarks.demo import picture
from benchmarks.demo.configurations import FULL, NAMES, Configuration
from benchmarks.demo.explain import Explainer
from benchmarks.demo.measure import Measured, Questions, Setting
from benchmarks.minillava.split import Example, png, scores

BUDGET = 8
SHOWN = (
    FULL,
    Configuration("random", BUDGET),
    Configuration("reference", BUDGET),
    Configuration("state", BUDGET),
)


@dataclass(frozen=True)
class Drawn:
    """Where the picture lies, what it is about, and answers served and recomputed."""

    path: str
    question: str
    expected: str
    served: dict[str, str]
    offline: dict[str, str]

    @property
    def agrees(self) -> bool:
        """The recomputation behind the picture said what the server said."""
        return self.served == self.offline


def choose(examples: Sequence[Example], measured: Measured) -> int:
    """The first question that a random keep fails and the others answer.

    Where there is none: the first that the full model answers, or the first of all.
    """
    telling, answered = [], []
    for number, example in enumerate(examples):
        right = [_right(example, measured.answer(c, number)) for c in SHOWN]
        if right == [True, False, True, True] and example.kind in ("digit", "colour", "shape"):
            telling.append(number)
        if right[0]:
            answered.append(number)
    return next(iter((*telling, *answered)), 0)


def draw_example(setting: Setting, questions: Questions, measured: Measured) -> Drawn:
    """Explain one question and write ``kept.png``."""
    number = choose(questions.examples, measured)
    example = questions.examples[number]
    image = Image.open(io.BytesIO(png(example.image))).convert("RGB")
    explainer = Explainer(setting.model, setting.text_tower, setting.state)
    found = [explainer.explain(image, example.question, c) for c in SHOWN]
    panels = [
        picture.Panel(
            title=NAMES[item.configuration.keep],
            detail=f"{len(item.kept)} tokens",
            kept=None if item.configuration == FULL else item.kept,
            answer=item.answer,
            right=_right(example, item.answer),
        )
        for item in found
    ]
    path = setting.out / "kept.png"
    picture.draw(image, example.question, panels, example.evidence).save(path, optimize=True)
    return Drawn(
        path=_shown(path),
        question=example.question,
        expected=example.answer,
        served={c.label: measured.answer(c, number).strip() for c in SHOWN},
        offline={item.configuration.label: item.answer for item in found},
    )


def _right(example: Example, answer: str) -> bool:
    return scores([example], [answer]).accuracy == 1.0


def _shown(path: Path) -> str:
    """Relative to where the demo was started, if it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
