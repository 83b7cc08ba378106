"""The held-out split: examples, their PNG form, the scores and the checkpoint's place.

Knows nothing about engines or policies; training never draws these seeds.
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import Tensor

from benchmarks.minillava.questions import (
    LEARNT_KINDS,
    OPEN_KINDS,
    PAIR_KINDS,
    UNLEARNT_KINDS,
    Question,
    ask_count,
    ask_open,
    ask_pair,
)
from benchmarks.minillava.scenes import EVALUATION_SEEDS, Scene, draw

__all__ = [
    "CHECKPOINT", "CLIP", "LEARNT_KINDS", "LLAVA", "UNLEARNT_KINDS",
    "Example", "Scores", "evaluation_split", "png", "scores",
]  # fmt: skip

CHECKPOINT = Path(__file__).resolve().parent / "checkpoint"
LLAVA = CHECKPOINT / "llava"
CLIP = CHECKPOINT / "clip"

_OPEN_PER_KIND = 2
_PAIRS = {"existence": 2, "reading": 1, "position": 1}


@dataclass(frozen=True)
class Example:
    """One question about one image of the held-out split."""

    image_id: int
    image: Tensor  # (3, 168, 168) uint8
    question: str
    answer: str
    kind: str
    pair: int | None  # shared by the yes and the no question of one pair
    evidence: tuple[int, ...]  # raster patch indices


@dataclass(frozen=True)
class Scores:
    """Shares between 0 and 1; accuracy over learnt kinds, accuracy+ over their pairs."""

    accuracy: float
    accuracy_plus: float
    by_kind: dict[str, float]


def _questions(rng: random.Random, scene: Scene) -> list[tuple[Question, int | None]]:
    """All questions about one scene, with the number of their pair within the scene."""
    asked: list[tuple[Question, int | None]] = []
    for kind in OPEN_KINDS:
        for thing in rng.sample(scene.things, _OPEN_PER_KIND):
            asked.append((ask_open(rng, kind, thing), None))
    pair = 0
    for kind, number in _PAIRS.items():
        for thing in rng.sample(scene.things, number):
            asked.extend((question, pair) for question in ask_pair(rng, kind, scene, thing))
            pair += 1
    asked.append((ask_count(rng, scene, rng.choice(scene.things).colour), None))
    return asked


def evaluation_split(scenes: int = 200, seed: int = 0) -> list[Example]:
    """Fifteen questions on each scene; a smaller split is a prefix of a larger one.

    `seed` chooses among disjoint splits of up to 1000 scenes, all of them held out.
    """
    if not 0 < scenes <= 1000:
        raise ValueError(f"scenes must lie in 1..1000, got {scenes}")
    examples: list[Example] = []
    pairs = sum(_PAIRS.values())
    for image_id in range(scenes):
        drawn_seed = EVALUATION_SEEDS[seed * 1000 + image_id]
        drawn = draw(drawn_seed, 1)
        rng = random.Random(drawn_seed)
        for question, pair in _questions(rng, drawn.scenes[0]):
            examples.append(
                Example(
                    image_id=image_id,
                    image=drawn.images[0],
                    question=question.text,
                    answer=question.answer,
                    kind=question.kind,
                    pair=None if pair is None else image_id * pairs + pair,
                    evidence=question.evidence,
                )
            )
    return examples


def png(image: Tensor) -> bytes:
    """The PNG file of a (3, H, W) uint8 image."""
    buffer = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(buffer, format="PNG")
    return buffer.getvalue()


def _first_word(text: str) -> str:
    words = re.findall(r"[a-z0-9]+", text.lower())
    return words[0] if words else ""


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0


def scores(examples: Sequence[Example], answers: Sequence[str]) -> Scores:
    """Compare first words, ignoring case and punctuation; one answer per example."""
    if len(examples) != len(answers):
        raise ValueError(f"{len(examples)} examples but {len(answers)} answers")
    right = [
        _first_word(answer) == _first_word(example.answer)
        for example, answer in zip(examples, answers, strict=True)
    ]
    kinds: dict[str, list[bool]] = {}
    pairs: dict[int, list[bool]] = {}
    for example, correct in zip(examples, right, strict=True):
        kinds.setdefault(example.kind, []).append(correct)
        if example.pair is not None and example.kind in PAIR_KINDS:
            pairs.setdefault(example.pair, []).append(correct)
    return Scores(
        accuracy=_mean([ok for kind in LEARNT_KINDS for ok in kinds.get(kind, ())]),
        accuracy_plus=_mean([all(both) for both in pairs.values()]),
        by_kind={kind: _mean(kinds[kind]) for kind in sorted(kinds)},
    )
