"""Held-out splits: examples, their images as PNG, scores of answers, and the checkpoint folders.

Search, validation and test are drawn from disjoint ranges of scene seeds, which training never
uses; only the test split has unseen wordings and arrangements.
"""

from __future__ import annotations

import base64
import hashlib
import io
import random
import re
from collections.abc import Mapping, Sequence
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
from benchmarks.minillava.questions import Question, QuestionGenerator
from benchmarks.minillava.render import Scene, render
from benchmarks.minillava.wordings import CATEGORIES, KINDS, SEEN, UNSEEN

CHECKPOINT = Path(__file__).resolve().parent / "checkpoint"
LLAVA = CHECKPOINT / "llava"
CLIP = CHECKPOINT / "clip"

Split = Literal["search", "validation", "test"]
MAX_SCENES = 5000

# How often each kind is tried for one scene; a scene without signs has no number to read.
_ATTEMPTS = dict.fromkeys(KINDS, 1) | {"relation": 3, "count": 2, "text": 2}


@dataclass(frozen=True)
class Example:
    """One question about one image of a held-out split."""

    image_id: int
    image: Tensor  # (3, H, W) uint8
    question: str
    answer: str
    kind: str
    pair: int | None  # the same number for both questions of a yes/no pair
    evidence: tuple[int, ...]  # raster patch indices, the most informative first
    unseen_wording: bool = False
    unseen_style: bool = False


@dataclass(frozen=True)
class Scores:
    """Shares between 0 and 1; accuracy+ is the share of yes/no pairs with both answers right."""

    accuracy: float
    accuracy_plus: float
    by_kind: dict[str, float]
    by_category: dict[str, float]


def draw_scene(seed: int, unseen: bool, canvas: Canvas) -> tuple[Tensor, Scene]:
    """The image and the content of one scene, in an arrangement of training or an unseen one."""
    rng = random.Random(seed)
    style = rng.choice(UNSEEN_STYLES if unseen else TRAINING_STYLES)
    drawn = render([draw_layout(rng, style, canvas)], canvas, seed)
    return drawn.images[0], drawn.scenes[0]


def _draw_questions(
    rng: random.Random, scene: Scene, canvas: Canvas, unseen: bool
) -> list[list[Question]]:
    """Single questions and yes/no pairs about one scene, without repetitions of a text."""
    generator = QuestionGenerator(rng, scene, canvas, UNSEEN if unseen else SEEN)
    groups = [generator.generate(kind) for kind in KINDS for _ in range(_ATTEMPTS[kind])]
    unique = {group[0].text: group for group in groups if group is not None}
    return list(unique.values())


def draw_examples(split: Split, scenes: int = 200, canvas: Canvas | None = None) -> list[Example]:
    """Draw about eighteen questions about each scene; fewer scenes give a prefix of more.

    In the test split, one fourth of the scenes has an arrangement, and another fourth has wordings,
    that training never uses.
    """
    if not 0 < scenes <= MAX_SCENES:
        raise ValueError(f"scenes must lie in 1..{MAX_SCENES}, got {scenes}")
    canvas = canvas or Canvas()
    examples: list[Example] = []
    pairs = 0
    for image_id in range(scenes):
        seed = SEEDS[split][image_id]
        turn = image_id % 4 if split == "test" else 0
        unseen_style, unseen_wording = turn == 1, turn == 3
        image, scene = draw_scene(seed, unseen_style, canvas)
        for group in _draw_questions(random.Random(seed + 1), scene, canvas, unseen_wording):
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


def weights_digest(checkpoint: Path) -> str:
    """First twelve digits of the SHA-256 over the weights in ``llava`` and ``clip``."""
    digest = hashlib.sha256()
    for name in ("llava", "clip"):
        for path in sorted((checkpoint / name).glob("*.safetensors")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def png(image: Tensor) -> bytes:
    """A (3, H, W) uint8 image as the content of a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(buffer, format="PNG")
    return buffer.getvalue()


def png_url(image: Tensor) -> str:
    """A (3, H, W) uint8 image as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def is_right(answer: str, reference: str) -> bool:
    """Whether an answer starts with the words of the reference, ignoring case and punctuation."""
    expected = reference.lower().split()
    return re.findall(r"[a-z0-9]+", answer.lower())[: len(expected)] == expected


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0


def grade_answers(examples: Sequence[Example], answers: Sequence[str]) -> Scores:
    """Score one answer per example; kinds and categories without questions are left out."""
    if len(examples) != len(answers):
        raise ValueError(f"{len(examples)} examples but {len(answers)} answers")
    pairs = zip(examples, answers, strict=True)
    return aggregate(examples, [is_right(answer, one.answer) for one, answer in pairs])


def aggregate(
    examples: Sequence[Example],
    rights: Sequence[bool],
    groups: Mapping[str, Sequence[str]] = CATEGORIES,
) -> Scores:
    """Scores of questions of which it is known whether they were answered right.

    `groups` are the kinds of every category.
    """
    kinds: dict[str, list[bool]] = {}
    pairs: dict[int, list[bool]] = {}
    for example, right in zip(examples, rights, strict=True):
        kinds.setdefault(example.kind, []).append(right)
        if example.pair is not None:
            pairs.setdefault(example.pair, []).append(right)
    categories = {
        name: [right for kind in members for right in kinds.get(kind, ())]
        for name, members in groups.items()
    }
    order = [kind for members in groups.values() for kind in members]
    return Scores(
        accuracy=_mean([right for rights in kinds.values() for right in rights]),
        accuracy_plus=_mean([all(pair) for pair in pairs.values()]),
        by_kind={kind: _mean(kinds[kind]) for kind in order if kind in kinds},
        by_category={name: _mean(rights) for name, rights in categories.items() if rights},
    )
