"""The held-out splits: examples, their PNG form, the scores and the checkpoint's place.

Knows nothing about engines or policies. Search, validation and test are drawn from seeds that
neither training nor one another can draw; only test has unseen wordings and arrangements.
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image
from torch import Tensor

from benchmarks.minillava.layout import (
    SEEDS,
    TRAINING_STYLES,
    UNSEEN_STYLES,
    Canvas,
    draw_layout,
)
from benchmarks.minillava.questions import Asker, Question
from benchmarks.minillava.render import Scene, render
from benchmarks.minillava.wordings import CATEGORIES, KINDS, SEEN, UNSEEN

CHECKPOINT = Path(__file__).resolve().parent / "checkpoint"
LLAVA = CHECKPOINT / "llava"
CLIP = CHECKPOINT / "clip"

Split = Literal["search", "validation", "test"]
LONGEST_SPLIT = 5000

# How often a kind is asked about one scene; a scene without signs has no number to read.
_ASKED = dict.fromkeys(KINDS, 1) | {"relation": 3, "count": 2, "text": 2}


@dataclass(frozen=True)
class Example:
    """One question about one image of a held-out split."""

    image_id: int
    image: Tensor  # (3, H, W) uint8
    question: str
    answer: str
    kind: str
    pair: int | None  # shared by the yes and the no question of one pair
    evidence: tuple[int, ...]  # raster patch indices, what tells most first
    unseen_wording: bool = False
    unseen_style: bool = False


@dataclass(frozen=True)
class Scores:
    """Shares between 0 and 1; accuracy+ counts a pair where both answers are right."""

    accuracy: float
    accuracy_plus: float
    by_kind: dict[str, float]
    by_category: dict[str, float]


def _draw(seed: int, unseen: bool, canvas: Canvas) -> tuple[Tensor, Scene]:
    rng = random.Random(seed)
    style = rng.choice(UNSEEN_STYLES if unseen else TRAINING_STYLES)
    drawn = render([draw_layout(rng, style, canvas)], canvas, seed)
    return drawn.images[0], drawn.scenes[0]


def _ask(rng: random.Random, scene: Scene, canvas: Canvas, unseen: bool) -> list[list[Question]]:
    """Lone questions and pairs about one scene; the same text is asked once."""
    asker = Asker(rng, scene, canvas, UNSEEN if unseen else SEEN)
    groups = [asker.ask(kind) for kind in KINDS for _ in range(_ASKED[kind])]
    found = {group[0].text: group for group in groups if group is not None}
    return list(found.values())


def held_out(split: Split, scenes: int = 200, canvas: Canvas | None = None) -> list[Example]:
    """About eighteen questions on each scene; a smaller split is a prefix of a larger one.

    In the test split every fourth scene is of an arrangement, and another fourth in wordings,
    that training never draws.
    """
    if not 0 < scenes <= LONGEST_SPLIT:
        raise ValueError(f"scenes must lie in 1..{LONGEST_SPLIT}, got {scenes}")
    canvas = canvas or Canvas()
    examples: list[Example] = []
    pairs = 0
    for image_id in range(scenes):
        seed = SEEDS[split][image_id]
        turn = image_id % 4 if split == "test" else 0
        unseen_style, unseen_wording = turn == 1, turn == 3
        image, scene = _draw(seed, unseen_style, canvas)
        for group in _ask(random.Random(seed + 1), scene, canvas, unseen_wording):
            pair = pairs if len(group) == 2 else None
            pairs += len(group) == 2
            examples += [
                Example(
                    image_id, image, question.text, question.answer, question.kind, pair,
                    question.evidence, unseen_wording, unseen_style,
                )
                for question in group
            ]  # fmt: skip
    return examples


def png(image: Tensor) -> bytes:
    """The PNG file of a (3, H, W) uint8 image."""
    buffer = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(buffer, format="PNG")
    return buffer.getvalue()


def is_right(answer: str, wanted: str) -> bool:
    """Whether an answer starts with the wanted words, ignoring case and punctuation."""
    expected = wanted.lower().split()
    return re.findall(r"[a-z0-9]+", answer.lower())[: len(expected)] == expected


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0


def scores(examples: Sequence[Example], answers: Sequence[str]) -> Scores:
    """Scores of one answer an example; a kind or category that is not asked is left out."""
    if len(examples) != len(answers):
        raise ValueError(f"{len(examples)} examples but {len(answers)} answers")
    kinds: dict[str, list[bool]] = {}
    pairs: dict[int, list[bool]] = {}
    for example, answer in zip(examples, answers, strict=True):
        right = is_right(answer, example.answer)
        kinds.setdefault(example.kind, []).append(right)
        if example.pair is not None:
            pairs.setdefault(example.pair, []).append(right)
    categories = {
        name: [right for kind in members for right in kinds.get(kind, ())]
        for name, members in CATEGORIES.items()
    }
    return Scores(
        accuracy=_mean([right for rights in kinds.values() for right in rights]),
        accuracy_plus=_mean([all(both) for both in pairs.values()]),
        by_kind={kind: _mean(kinds[kind]) for kind in KINDS if kind in kinds},
        by_category={name: _mean(rights) for name, rights in categories.items() if rights},
    )
