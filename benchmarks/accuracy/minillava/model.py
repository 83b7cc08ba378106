"""The mini-LLaVA under test, and the questions of its test split, which no search uses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.yardsticks.examples import CHECKPOINTS, draw_examples, png_url, weights_digest
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.journal import MME, Question
from vllm_autoprune.evaluation.questions import PreparedQuestion

EMBEDDED = "embedded"
_REQUESTS = 60_000
"""Requests for the default number of scenes: half an hour at 35 requests per second."""
_QUESTIONS_PER_SCENE = 18
"""Approximately; scenes without signs have fewer."""


@dataclass(frozen=True)
class MiniLlava:
    """A checkpoint: a folder with the model ``llava`` and the text tower ``clip``."""

    name: str
    folder: Path

    @property
    def llava(self) -> Path:
        """The folder of the served model."""
        return self.folder / "llava"

    @property
    def text_tower(self) -> Path:
        """The folder of the text tower."""
        return self.folder / "clip"

    @cached_property
    def tokens(self) -> int:
        """N, the number of visual tokens of an image."""
        config = json.loads((self.llava / "config.json").read_text())
        return int(config["image_seq_length"])

    @cached_property
    def digest(self) -> str:
        """Short digest of all weights."""
        return weights_digest(self.folder)


def default_scenes(cases: int) -> int:
    """The number of scenes, at least 8, that take about half an hour in so many cases."""
    return max(8, _REQUESTS // (max(cases, 1) * _QUESTIONS_PER_SCENE))


def find_model(name: str) -> MiniLlava:
    """The model ``embedded``, or the one in a folder; raises :class:`ConfigError`."""
    folder = CHECKPOINTS["minillava"] if name == EMBEDDED else Path(name)
    for part in ("llava/config.json", "clip/config.json"):
        if not (folder / part).is_file():
            fix = f"use {EMBEDDED}, or a folder with llava/ and clip/"
            raise ConfigError("eval", [Problem(f"--model {name}", f"has no {part}", fix)])
    return MiniLlava(name if name == EMBEDDED else folder.name, folder)


def prepare_questions(scenes: int) -> Sequence[PreparedQuestion]:
    """The questions about the first scenes of the test split, scene by scene."""
    questions, images = [], dict[int, str]()
    for number, example in enumerate(draw_examples("test", scenes)):
        if example.image_id not in images:
            images[example.image_id] = png_url(example.image)
        paired = example.pair is not None
        record = Question(
            id=str(number),
            benchmark=MME if paired else example.kind,
            image=str(example.image_id),
            category=example.kind if paired else "",
            pair=str(example.pair) if paired else "",
        )
        image = images[example.image_id]
        questions.append(PreparedQuestion(record, example.question, example.answer, image))
    return questions
