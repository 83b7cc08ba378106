"""The picture at the end of the demo: one example, its kept tokens and its answers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from benchmarks.demo import picture
from benchmarks.demo.configurations import FULL, NAMES, Configuration
from benchmarks.demo.explain import Explainer
from benchmarks.demo.measure import Measured, Questions, Settings
from benchmarks.minillava.split import Example, png, scores

BUDGET = 8
SHOWN = (
    FULL,
    Configuration("random", BUDGET),
    Configuration("reference", BUDGET),
    Configuration("state", BUDGET),
)


@dataclass(frozen=True)
class ExamplePicture:
    """Path and question of the picture, with answers as served and as recomputed."""

    path: str
    question: str
    expected: str
    served: dict[str, str]
    offline: dict[str, str]

    @property
    def agrees(self) -> bool:
        """Whether the recomputed answers equal those of the server."""
        return self.served == self.offline


def choose_example(examples: Sequence[Example], measured: Measured) -> int:
    """The first question that a random keep fails and the others answer.

    Where there is none: the first that the full model answers, or the first of all.
    """
    contrasting, answered = [], []
    for number, example in enumerate(examples):
        right = [_is_right(example, measured.answer(c, number)) for c in SHOWN]
        if right == [True, False, True, True] and example.kind in ("digit", "colour", "shape"):
            contrasting.append(number)
        if right[0]:
            answered.append(number)
    return next(iter((*contrasting, *answered)), 0)


def draw_example(settings: Settings, questions: Questions, measured: Measured) -> ExamplePicture:
    """Recompute the kept tokens of one question and write ``kept.png``."""
    number = choose_example(questions.examples, measured)
    example = questions.examples[number]
    image = Image.open(io.BytesIO(png(example.image))).convert("RGB")
    explainer = Explainer(settings.model, settings.text_tower, settings.state)
    explanations = [explainer.explain(image, example.question, c) for c in SHOWN]
    panels = [
        picture.Panel(
            title=NAMES[item.configuration.keep],
            detail=f"{len(item.kept)} tokens",
            kept=None if item.configuration == FULL else item.kept,
            answer=item.answer,
            right=_is_right(example, item.answer),
        )
        for item in explanations
    ]
    path = settings.out / "kept.png"
    picture.draw(image, example.question, panels, example.evidence).save(path, optimize=True)
    return ExamplePicture(
        path=_shorten(path),
        question=example.question,
        expected=example.answer,
        served={c.label: measured.answer(c, number).strip() for c in SHOWN},
        offline={item.configuration.label: item.answer for item in explanations},
    )


def _is_right(example: Example, answer: str) -> bool:
    return scores([example], [answer]).accuracy == 1.0


def _shorten(path: Path) -> str:
    """Relative to the working directory, if it is below that."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
