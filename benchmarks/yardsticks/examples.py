"""Held-out splits of all models: examples, their images, scores of answers, and the weights.

Search, validation and test are drawn from disjoint ranges of seeds, which training never uses. Only
the test split has wordings, arrangements, sizes and numbers of frames that training never uses.
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
from typing import Literal, NamedTuple, get_args

from PIL import Image
from torch import Tensor

from benchmarks.yardsticks import clips, pages, scenes, tiles
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
    "miniintern": (
        "<|im_start|>user\n",
        "<IMG_CONTEXT>",
        "{question}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "minigemma": (
        "<start_of_turn>user\n",
        "<start_of_image>",
        "{question}<end_of_turn>\n<start_of_turn>model\n",
    ),
}
"""Prompt of one question about one image, as of chat templates: before, at and after the image."""

# Texts that a processor writes before and after the tokens of an image.
_AROUND: Mapping[Model, tuple[str, str]] = {
    "miniintern": ("<img>", "</img>"),
    "minigemma": ("\n\n<start_of_image>", "<end_of_image>\n\n"),
}

# Sizes of pictures of models that see square tiles.
_TILED_SIZES: Mapping[Model, Sequence[tiles.TiledSize]] = {
    "miniintern": tiles.SIZES,
    "minigemma": (tiles.SQUARE,),
}

IMAGE_TOKEN = 4
"""The id of mini-LLaVA's image token."""

MAX_ANSWER_TOKENS = 6
"""Limit that is larger than the longest answer with its end token."""

Split = Literal["search", "validation", "test"]

# torch's CPU generator keeps the low 32 bits of a seed, so all ranges stay below 2**32.
SEEDS: Mapping[str, range] = {
    "train": range(0, 2**31),
    "search": range(2**31, 2**31 + 2**20),
    "validation": range(2**31 + 2**20, 2**31 + 2**21),
    "test": range(2**31 + 2**21, 2**31 + 2**22),
}

# How often a question of a kind is drawn for one picture; other kinds are drawn once. A draw may
# give none, as in a scene without signs, which has no number to read.
_ATTEMPTS_OF_TILED = {
    "digit": 2,
    "grounding": 3,
    "value": 3,
    "word": 2,
    "cell": 4,
    "compare": 3,
    "find": 2,
}
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
    "miniintern": _ATTEMPTS_OF_TILED,
    "minigemma": _ATTEMPTS_OF_TILED,
    "clips": {"appears": 2, "shows": 2},
}


@dataclass(frozen=True)
class Example:
    """One question about one image, or one clip, of a held-out split."""

    image_id: int
    image: Tensor  # (3, H, W) uint8; of a clip (T, 3, H, W)
    question: str
    answer: str
    kind: str
    pair: int | None  # the same number for both questions of a yes/no pair
    evidence: tuple[int, ...]  # raster indices of tokens, the most informative first

    @property
    def is_clip(self) -> bool:
        """Whether the image is a clip."""
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


class _Picture(NamedTuple):
    """A scene, page or clip, and the kinds of question to ask about it."""

    image: Tensor
    """(3, H, W) uint8; of a clip (T, 3, H, W)."""
    content: scenes.Scene | pages.Page | clips.Clip
    cells: tuple[int, int]
    kinds: Sequence[str]


def _draw_scene(seed: int, *, unseen: bool, clean: bool) -> _Picture:
    """Draw a scene for mini-LLaVA, in an arrangement of the test split alone if ``unseen``."""
    rng = random.Random(seed)
    styles = scenes.UNSEEN_STYLES if unseen else scenes.TRAINING_STYLES
    scene = scenes.Scene.draw(rng, rng.choice(styles))
    images, (scene,) = scenes.render_scenes([scene], scenes.CELLS, seed, clean=clean)
    return _Picture(images[0], scene, (scenes.CELLS, scenes.CELLS), KINDS)


def _draw_clip(
    seed: int, *, unseen: bool, clean: bool, brief_frames: int | None
) -> _Picture:
    """Draw a clip, with a number of frames of the test split alone if ``unseen``."""
    rng = random.Random(seed)
    choices = clips.UNSEEN_FRAMES if unseen else clips.FRAMES
    frames = brief_frames or rng.choice(choices)
    clip = clips.Clip.draw(rng, frames, brief=brief_frames is not None)
    images, clip = clip.render(seed, clean=clean)
    return _Picture(images, clip, clips.SIZE.cells, CATEGORIES["clips"]["clips"])


def _draw_picture(
    seed: int,
    model: Model,
    category: Literal["scenes", "pages"],
    *,
    unseen: bool,
    clean: bool,
) -> _Picture:
    """Draw a scene or page; if ``unseen``, as only the test split has it.

    That is a size for mini-Qwen3-VL, and for the others a scene with shapes at the border only.
    """
    sizes: Sequence[pages.Size] = pages.UNSEEN_SIZES if unseen else pages.SIZES
    sizes = _TILED_SIZES.get(model, sizes)
    kinds = CATEGORIES[model][category]
    if category == "scenes":
        kinds += CATEGORIES[model].get("grounding", ())
    # The generator of the size is independent of what the picture draws (seed) or is asked (+ 1).
    size = random.Random(seed + 2).choice(sizes)
    rng = random.Random(seed)
    content: scenes.Scene | pages.Page
    if category == "pages":
        content = size.draw_page(rng, rng.choice(pages.PAGE_STYLES))
        images, _ = pages.render_pages([content], seed, clean=clean)
    else:
        scene = size.draw_scene(rng, ring=unseen and model in _TILED_SIZES)
        images, (content,) = size.render_scenes([scene], seed, clean=clean)
    return _Picture(images[0], content, size.cells, kinds)


def draw_examples(
    split: Split,
    images: int = 200,
    model: Model = "minillava",
    *,
    clean: bool = False,
    brief_frames: int | None = None,
) -> list[Example]:
    """Draw ``images`` pictures or clips of a split, and questions of every kind about each.

    A picture of mini-LLaVA has 15 to 19 questions, a scene or page of the others 5 to 14, and a
    clip 6 to 8. With fewer images, the examples are the first ones of a larger draw. ``clean``
    images have no grain, and ``clean`` pages no photograph behind the text, as documents have
    neither. In the test split, one image in four (of models that see tiles, one scene in four) has
    an arrangement, size or number of frames that training never uses, and another one in four has
    wordings that training never uses. With ``brief_frames`` every clip has that many frames, and a
    shape that comes and goes again is there for a single one.
    """
    examples: list[Example] = []
    next_pair = 0
    attempts = _ATTEMPTS[model]
    for image_id in range(images):
        # Scenes and pages alternate, so they are numbered separately.
        number = image_id // 2 if "pages" in CATEGORIES[model] else image_id
        unseen = split == "test" and number % 4 == 1
        unseen_wordings = split == "test" and number % 4 == 3
        seed = SEEDS[split][image_id]
        if model == "minillava":
            picture = _draw_scene(seed, unseen=unseen, clean=clean)
        elif model == "clips":
            picture = _draw_clip(
                seed, unseen=unseen, clean=clean, brief_frames=brief_frames
            )
        else:
            category: Literal["scenes", "pages"] = "pages" if image_id % 2 else "scenes"
            picture = _draw_picture(seed, model, category, unseen=unseen, clean=clean)
        # A generator of its own keeps the questions independent of how the picture is drawn.
        questions = Questions(
            random.Random(seed + 1),
            picture.content,
            picture.cells,
            UNSEEN if unseen_wordings else SEEN,
        )
        # A group is one open question, or the two questions of a yes/no pair.
        groups = [
            questions.generate(kind)
            for kind in picture.kinds
            for _ in range(attempts.get(kind, 1))
        ]
        # If several groups begin with the same text, only the last one is asked.
        group_by_text = {group[0].text: group for group in groups if group}
        for group in group_by_text.values():
            pair = None
            if len(group) == 2:
                pair = next_pair
                next_pair += 1
            examples += [
                Example(
                    image_id,
                    picture.image,
                    question.text,
                    question.answer,
                    question.kind,
                    pair,
                    question.evidence,
                )
                for question in group
            ]
    return examples


def keep_first(
    rng: random.Random, evidence: Sequence[int], budget: int, count: int
) -> list[int]:
    """Select `budget` of `count` raster tokens, ascending: first evidence, then random ones."""
    order = dict.fromkeys((*evidence, *rng.sample(range(count), count)))
    return sorted([*order][:budget])


def keep_evidence(
    rng: random.Random, questions: Sequence[Question], budget: int, count: int
) -> list[int]:
    """Select `budget` of `count` raster tokens: evidence, then random ones until it is full.

    They are returned in ascending order. The evidence of a question is selected only if all of it
    fits into the budget.
    """
    evidence = list[int]()
    for question in questions:
        extended = list(dict.fromkeys((*evidence, *question.evidence)))
        evidence = extended if len(extended) <= budget else evidence
    return keep_first(rng, evidence, budget, count)


def format_prompt(question: str, model: Model = "minillava") -> str:
    """The prompt of one question about one image, with a single image token."""
    return "".join(PROMPT[model]).format(question=question)


def split_prompt(model: Model) -> tuple[str, str]:
    """Texts before and after the tokens of an image; the latter has a slot for the question."""
    before, _, behind = PROMPT[model]
    start, end = _AROUND.get(model, ("", ""))
    return before + start, end + behind


def as_picture(image: Tensor) -> Image.Image:
    """Convert a (3, H, W) uint8 image to the type that processors and engines take."""
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def weights_digest(checkpoint: Path) -> str:
    """First 12 digits of the SHA-256 of all weights in a folder, its ``llava`` and ``clip``."""
    digest = hashlib.sha256()
    for name in (".", "llava", "clip"):
        for path in sorted((checkpoint / name).glob("*.safetensors")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
