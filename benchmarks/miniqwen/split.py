"""Held-out splits: examples, and the checkpoint folder.

Search, validation and test are drawn from disjoint ranges of seeds, which training never uses; only
the test split has unseen wordings and sizes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from torch import Tensor

from benchmarks.minillava.layout import SEEDS, Canvas
from benchmarks.minillava.questions import Question
from benchmarks.minillava.render import Scene
from benchmarks.minillava.split import Example, Scores, Split, is_right
from benchmarks.minillava.split import aggregate as aggregate_groups
from benchmarks.miniqwen.pages import PAGE_STYLES, Page, draw_page
from benchmarks.miniqwen.questions import PageQuestions, SceneQuestions
from benchmarks.miniqwen.render import render_pages, render_scenes
from benchmarks.miniqwen.scenes import draw_scene
from benchmarks.miniqwen.sizes import SIZES, TOKEN, UNSEEN_SIZES, Size
from benchmarks.miniqwen.wordings import CATEGORIES, SEEN, UNSEEN

CHECKPOINT = Path(__file__).resolve().parent / "checkpoint"
MAX_IMAGES = 5000

# How often a kind is tried for one picture; the other kinds are tried once.
_ATTEMPTS = {"count": 2, "digit": 2, "value": 3, "word": 3, "cell": 4, "compare": 4, "find": 2}


def weights_digest(checkpoint: Path) -> str:
    """First twelve digits of the SHA-256 of the weights."""
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()[:12]


def convert_image(image: Tensor) -> Image.Image:
    """A (3, H, W) uint8 image for processors and engines."""
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def image_size(image: Tensor) -> Size:
    """The size in tokens of an image (3, H, W) that the processor does not resize."""
    return Size(image.shape[1] // TOKEN, image.shape[2] // TOKEN)


def _draw_questions(
    rng: random.Random, content: Scene | Page, size: Size, unseen: bool
) -> list[list[Question]]:
    """Single questions and yes/no pairs about one picture, without repetitions of a text."""
    wordings = UNSEEN if unseen else SEEN
    if isinstance(content, Page):
        generate = PageQuestions(rng, content, wordings).generate
    else:
        generate = SceneQuestions(rng, content, Canvas(), wordings, size).generate
    category = "pages" if isinstance(content, Page) else "scenes"
    kinds = CATEGORIES[category]
    groups = [generate(kind) for kind in kinds for _ in range(_ATTEMPTS.get(kind, 1))]
    unique = {group[0].text: group for group in groups if group is not None}
    return list(unique.values())


def _draw_picture(seed: int, page: bool, size: Size) -> tuple[Tensor, Scene | Page]:
    rng = random.Random(seed)
    if page:
        content = draw_page(rng, rng.choice(PAGE_STYLES), size)
        images, _ = render_pages([content], seed)
        return images[0], content
    images, scenes = render_scenes([draw_scene(rng, size)], size, seed)
    return images[0], scenes[0]


def draw_examples(split: Split, images: int = 200) -> list[Example]:
    """Draw about ten questions about each image; a smaller draw is the start of a larger one.

    Scenes and pages alternate. In the test split, a fourth of the images has a size that training
    never uses, and for another fourth the questions have wordings that it never uses.
    """
    if not 0 < images <= MAX_IMAGES:
        raise ValueError(f"images must lie in 1..{MAX_IMAGES}, got {images}")
    examples: list[Example] = []
    pairs = 0
    for image_id in range(images):
        seed = SEEDS[split][image_id]
        turn = image_id // 2 % 4 if split == "test" else 0
        unseen_size, unseen_wording = turn == 1, turn == 3
        size = random.Random(seed + 2).choice(UNSEEN_SIZES if unseen_size else SIZES)
        image, content = _draw_picture(seed, bool(image_id % 2), size)
        for group in _draw_questions(random.Random(seed + 1), content, size, unseen_wording):
            pair = pairs if len(group) == 2 else None
            pairs += len(group) == 2
            examples += [
                Example(
                    image_id, image, question.text, question.answer, question.kind, pair,
                    question.evidence, unseen_wording, unseen_size,
                )
                for question in group
            ]  # fmt: skip
    return examples


def aggregate(examples: Sequence[Example], rights: Sequence[bool]) -> Scores:
    """Scores of questions of which it is known whether they were answered right."""
    return aggregate_groups(examples, rights, CATEGORIES)


def grade_answers(examples: Sequence[Example], answers: Sequence[str]) -> Scores:
    """Score one answer per example; kinds without questions are left out."""
    pairs = zip(examples, answers, strict=True)
    return aggregate(examples, [is_right(answer, one.answer) for one, answer in pairs])
