"""Held-out splits of both models: examples, their images, scores of answers, and the weights.

Search, validation and test are drawn from disjoint ranges of seeds, which training never uses; only
the test split has unseen wordings, arrangements and sizes.
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
from typing import Literal, get_args

from PIL import Image
from torch import Tensor

from benchmarks.yardsticks import clips, pages, scenes
from benchmarks.yardsticks.questions import (
    CATEGORIES,
    KINDS,
    SEEN,
    UNSEEN,
    Model,
    Question,
    Questions,
)

_WEIGHTS = Path(__file__).resolve().parent / "weights"
CHECKPOINTS: Mapping[Model, Path] = {name: _WEIGHTS / name for name in get_args(Model)}
LLAVA = CHECKPOINTS["minillava"] / "llava"
CLIP = CHECKPOINTS["minillava"] / "clip"

PROMPT: Mapping[Model, tuple[str, str, str]] = {
    "minillava": ("USER: ", "<image>", "\n{question} ASSISTANT:"),
    "miniqwen": (
        "<|im_start|>user\n<|vision_start|>",
        "<|image_pad|>",
        "<|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n",
    ),
}
"""The chat templates' prompt of one question about one image: before, at and behind the image."""

IMAGE_TOKEN = 4
"""The id of mini-LLaVA's image token."""

MAX_ANSWER_TOKENS = 6
"""More than the longest answer and its end token."""

Split = Literal["search", "validation", "test"]

# torch's CPU generator keeps the low 32 bits of a seed, so all ranges stay below 2**32.
SEEDS: Mapping[str, range] = {
    "train": range(0, 2**31),
    "search": range(2**31, 2**31 + 2**20),
    "validation": range(2**31 + 2**20, 2**31 + 2**21),
    "test": range(2**31 + 2**21, 2**31 + 2**22),
}

# How often a kind is tried for one picture; the other kinds are tried once. A scene without signs
# has no number to read.
_ATTEMPTS: Mapping[Model, Mapping[str, int]] = {
    "minillava": {"relation": 3, "count": 2, "text": 2},
    "miniqwen": {
        "count": 2,
        "digit": 2,
        "value": 3,
        "word": 3,
        "cell": 4,
        "compare": 4,
        "find": 2,
    },
    "clips": {"appears": 2, "shows": 2},
}


@dataclass(frozen=True)
class Example:
    """One question about one image, or one clip, of a held-out split."""

    image_id: int
    image: Tensor  # (3, H, W) uint8, of a clip (T, 3, H, W)
    question: str
    answer: str
    kind: str
    pair: int | None  # the same number for both questions of a yes/no pair
    evidence: tuple[int, ...]  # raster indices of tokens, the most informative first

    @property
    def is_clip(self) -> bool:
        """Whether it is about a clip."""
        return self.image.dim() == 4

    @property
    def png(self) -> bytes:
        """The image as the content of a PNG file."""
        buffer = io.BytesIO()
        as_picture(self.image).save(buffer, format="PNG")
        return buffer.getvalue()

    @property
    def png_url(self) -> str:
        """The image as a data URL."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"

    def is_right(self, answer: str) -> bool:
        """Whether an answer starts with the reference's words, ignoring case and punctuation."""
        expected = self.answer.lower().split()
        return re.findall(r"[a-z0-9]+", answer.lower())[: len(expected)] == expected


def draw_examples(
    split: Split,
    images: int = 200,
    model: Model = "minillava",
    *,
    clean: bool = False,
    brief_frames: int | None = None,
) -> list[Example]:
    """Draw 18 questions about each image of mini-LLaVA, 10 of mini-Qwen3-VL, 7 about each clip.

    With fewer images, the examples are the first ones of a larger draw. ``clean`` images have no
    grain, as documents have none. In the test split, one image in four has an arrangement, size or
    number of frames that training never uses, and another one in four has wordings that training
    never uses. With ``brief_frames`` every clip has so many frames, and each visitor is there for a
    single one.
    """
    examples: list[Example] = []
    pairs = 0
    attempts = _ATTEMPTS[model]
    for image_id in range(images):
        quarter = 0  # 1: of unseen layouts, 3: of unseen wordings
        if split == "test":
            # mini-Qwen3-VL's scenes and pages alternate.
            quarter = (image_id // 2 if model == "miniqwen" else image_id) % 4
        seed = SEEDS[split][image_id]
        rng = random.Random(seed)
        content: scenes.Scene | pages.Page | clips.Clip
        if model == "minillava":
            styles = scenes.UNSEEN_STYLES if quarter == 1 else scenes.TRAINING_STYLES
            drawn = scenes.Scene.draw(rng, rng.choice(styles))
            pixels, (content,) = scenes.render_scenes(
                [drawn], scenes.CELLS, seed, clean=clean
            )
            cells = (scenes.CELLS, scenes.CELLS)
            kinds = KINDS
        elif model == "clips":
            count = clips.UNSEEN_FRAMES if quarter == 1 else clips.FRAMES
            frames = brief_frames or rng.choice(count)
            brief = brief_frames is not None
            clip = clips.Clip.draw(rng, frames, brief=brief)
            pictures, content = clip.render(seed, clean=clean)
            pixels = pictures[None]
            cells = clips.SIZE.cells
            kinds = CATEGORIES[model]["clips"]
        else:
            sizes = pages.UNSEEN_SIZES if quarter == 1 else pages.SIZES
            size = random.Random(seed + 2).choice(sizes)
            cells = size.cells
            kinds = CATEGORIES[model]["pages" if image_id % 2 else "scenes"]
            if image_id % 2:
                content = pages.Page.draw(rng, rng.choice(pages.PAGE_STYLES), size)
                pixels, _ = pages.render_pages([content], seed, clean=clean)
            else:
                drawn = size.draw_scene(rng)
                pixels, (content,) = size.render_scenes([drawn], seed, clean=clean)
        wordings = UNSEEN if quarter == 3 else SEEN
        source = Questions(random.Random(seed + 1), content, cells, wordings)
        groups = [
            source.generate(kind)
            for kind in kinds
            for _ in range(attempts.get(kind, 1))
        ]
        # Of two groups with one text the last stays.
        group_by_text = {group[0].text: group for group in groups if group}
        for group in group_by_text.values():
            pair = None
            if len(group) == 2:
                pair = pairs
                pairs += 1
            examples += [
                Example(image_id, pixels[0], q.text, q.answer, q.kind, pair, q.evidence)
                for q in group
            ]
    return examples


def keep_first(
    rng: random.Random, evidence: Sequence[int], budget: int, count: int
) -> list[int]:
    """`budget` of `count` raster tokens, ascending: the evidence first, the others at random."""
    order = dict.fromkeys((*evidence, *rng.sample(range(count), count)))
    return sorted([*order][:budget])


def keep_evidence(
    rng: random.Random, questions: Sequence[Question], budget: int, count: int
) -> list[int]:
    """`budget` of `count` tokens, ascending: all evidence of a question or none, then at random."""
    evidence = list[int]()
    for question in questions:
        extended = list(dict.fromkeys((*evidence, *question.evidence)))
        evidence = extended if len(extended) <= budget else evidence
    return keep_first(rng, evidence, budget, count)


def format_prompt(question: str, model: Model = "minillava") -> str:
    """The prompt of one question about one image, with a single image token."""
    return "".join(PROMPT[model]).format(question=question)


def as_picture(image: Tensor) -> Image.Image:
    """A (3, H, W) uint8 image for processors and engines."""
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def weights_digest(checkpoint: Path) -> str:
    """First twelve digits of the SHA-256 over the weights of a folder, ``llava`` and ``clip``."""
    digest = hashlib.sha256()
    for name in (".", "llava", "clip"):
        for path in sorted((checkpoint / name).glob("*.safetensors")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
