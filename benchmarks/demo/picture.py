"""The picture at the end of the demo: one scene, the patches that each configuration keeps.

The patches are recomputed: the checkpoint is opened with transformers, and the server's own code
chooses the tokens. Its inputs equal the server's up to the rounding in other kernels, which may
exchange patches of nearly equal rank. Answers are those of the server.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageFont

from benchmarks.demo.measure import FULL, Answer, Configuration, Keep, Settings
from benchmarks.yardsticks.examples import Example, grade_answers, png
from vllm_autoprune import load_state, materialize, refine
from vllm_autoprune.checkpoint import LlavaVision
from vllm_autoprune.explain import trace_images
from vllm_autoprune.picture import group_colour
from vllm_autoprune.serving.plan import hash_picture, make_feature_key
from vllm_autoprune.serving.settings import read_text_tower
from vllm_autoprune.serving.worker.selection import select_at_random

NAMES: Mapping[Keep, str] = {
    "full": "full",
    "random": "random keep",
    "resized": "resize control",
    "reference": "base policy",
    "state": "shipped state",
}
BUDGET = 8
SHOWN = (
    FULL,
    Configuration("random", BUDGET),
    Configuration("reference", BUDGET),
    Configuration("state", BUDGET),
)

Colour = tuple[int, int, int]
PATCH, SCALE, GAP = 14, 3, 28
PAPER: Colour = (255, 255, 255)
TEXT: Colour = (32, 36, 44)
QUIET: Colour = (104, 110, 122)
KEPT: Colour = (255, 255, 255)
EVIDENCE: Colour = (255, 196, 0)
RIGHT: Colour = (21, 128, 61)
WRONG: Colour = (190, 30, 45)
_TITLE, _LABEL, _LEGEND = 46, 35, 30


class Explainer:
    """A checkpoint and a state, opened once, which choose patches as a server does."""

    def __init__(self, settings: Settings) -> None:
        self._state = load_state(settings.state)
        tower = read_text_tower(str(settings.text_tower))
        self._vision = LlavaVision(settings.model, tower, settings.dtype)

    @torch.no_grad()
    def select(
        self, image: Image.Image, question: str, configuration: Configuration
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Raster indices of the kept patches, and for every patch its owner.

        The owner is the kept patch that it is merged into, or -1; empty where nothing is merged.
        """
        tokens = self._vision.encode(image, question)
        budget = configuration.budget
        if budget is None:
            return tuple(range(tokens.count)), ()
        if configuration.keep == "random":
            key = make_feature_key(hash_picture(image))
            return _ascending(select_at_random(budget, tokens, [key]).indices[0]), ()
        exchanges = configuration.keep == "state"
        policy = materialize(self._state if exchanges else self._state.without_exchange(), budget)
        refined = refine(policy, tokens)
        (trace,) = trace_images(policy, tokens, refined)
        return _ascending(refined.indices[0]), trace.owners


def _ascending(indices: torch.Tensor) -> tuple[int, ...]:
    return tuple(sorted(indices.tolist()))


def choose_example(
    examples: Sequence[Example], answers: Mapping[Configuration, Sequence[Answer]]
) -> int:
    """The first question that a random keep fails and the others answer.

    Where there is none: the first that the full model answers, or the first of all.
    """
    contrasting, answered = [], []
    for number, example in enumerate(examples):
        right = [_is_right(example, answers[c][number].text) for c in SHOWN]
        if right == [True, False, True, True] and example.kind in ("digit", "colour", "shape"):
            contrasting.append(number)
        if right[0]:
            answered.append(number)
    return next(iter((*contrasting, *answered)), 0)


def _is_right(example: Example, answer: str) -> bool:
    return grade_answers([example], [answer]).accuracy == 1.0


def draw_example(
    settings: Settings,
    examples: Sequence[Example],
    answers: Mapping[Configuration, Sequence[Answer]],
) -> dict[str, object]:
    """Draw one question into ``kept.png``; its path, question and answers."""
    number = choose_example(examples, answers)
    example = examples[number]
    image = Image.open(io.BytesIO(png(example.image))).convert("RGB")
    explainer, side = Explainer(settings), image.width * SCALE
    top = GAP + _TITLE + 28 + _LABEL + 16
    height = top + side + 18 + _LABEL + 28 + _LEGEND + GAP
    sheet = Image.new("RGB", (GAP + len(SHOWN) * (side + GAP), height), PAPER)
    pen, merged = ImageDraw.Draw(sheet), False
    pen.text((GAP, GAP - 6), f"“{example.question}”", TEXT, _font(_TITLE))
    served = {c.label: answers[c][number].text.strip() for c in SHOWN}
    for place, configuration in enumerate(SHOWN):
        kept, owners = explainer.select(image, example.question, configuration)
        left, answer = GAP + place * (side + GAP), served[configuration.label]
        _write(
            pen,
            (left, top - 16 - _LABEL),
            (f"{NAMES[configuration.keep]}  ", TEXT),
            (f"{len(kept)} tokens", QUIET),
        )
        lit = None if configuration == FULL else kept
        sheet.paste(draw_scene(image, lit, example.evidence, owners), (left, top))
        colour = RIGHT if _is_right(example, answer) else WRONG
        below = (left, top + side + 16)
        _write(pen, below, ("answer: ", QUIET), (answer or "(nothing)", colour))
        merged = merged or bool(owners)
    _draw_legend(pen, GAP, top + side + 18 + _LABEL + 28, merged)
    path, here = settings.out / "kept.png", Path.cwd()
    sheet.save(path, optimize=True)
    return {
        "path": str(path.relative_to(here) if path.is_relative_to(here) else path),
        "question": example.question,
        "expected": example.answer,
        "served": served,
    }


def draw_scene(
    image: Image.Image,
    kept: Iterable[int] | None,
    evidence: Sequence[int],
    owners: Sequence[int] = (),
) -> Image.Image:
    """The enlarged scene: kept patches bright, the rest dimmed; None keeps everything.

    Merged patches have the colour of their group, and patches that hold the answer an outline.
    """
    big = image.resize((image.width * SCALE, image.height * SCALE), Image.Resampling.NEAREST)
    columns, scene, chosen = image.width // PATCH, big.copy(), set(kept or ())
    if kept is not None:
        scene = ImageEnhance.Brightness(ImageEnhance.Color(big).enhance(0.3)).enhance(0.42)
    colours = {patch: group_colour(n) for n, patch in enumerate(sorted(chosen))} if owners else {}
    for patch, owner in enumerate(owners):
        if owner >= 0:
            box = patch_box(patch, columns)
            tint = Image.new("RGB", (PATCH * SCALE, PATCH * SCALE), colours[owner])
            scene.paste(Image.blend(big.crop(box), tint, 0.5), box[:2])
    for patch in chosen:
        box = patch_box(patch, columns)
        scene.paste(big.crop(box), box[:2])
    pen = ImageDraw.Draw(scene)
    for patch in evidence:  # the border of the set, without the lines between its patches
        left, top, right, bottom = patch_box(patch, columns)
        column = patch % columns
        edges = {
            (left, top, right, top): patch - columns,
            (left, bottom, right, bottom): patch + columns,
            (left, top, left, bottom): patch - 1 if column else -1,
            (right, top, right, bottom): patch + 1 if column < columns - 1 else -1,
        }
        for line, neighbour in edges.items():
            if neighbour not in evidence:
                pen.line(line, fill=EVIDENCE, width=7)
    for patch in chosen:
        left, top, right, bottom = patch_box(patch, columns)
        colour, width = colours.get(patch, KEPT), 6 if patch in colours else 3
        pen.rectangle((left, top, right - 1, bottom - 1), outline=colour, width=width)
    return scene


def patch_box(patch: int, columns: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a raster patch in the enlarged scene."""
    row, column = divmod(patch, columns)
    size = PATCH * SCALE
    return column * size, row * size, (column + 1) * size, (row + 1) * size


def _write(
    pen: ImageDraw.ImageDraw, place: tuple[float, float], *words: tuple[str, Colour]
) -> None:
    left, top = place
    for text, colour in words:
        pen.text((left, top), text, colour, _font(_LABEL))
        left += pen.textlength(text, _font(_LABEL))


def _draw_legend(pen: ImageDraw.ImageDraw, left: int, top: int, merged: bool) -> None:
    size, step = 36, 12
    entries = [(KEPT, "kept patch"), (EVIDENCE, "patches that hold the answer")]
    if merged:
        entries.append((group_colour(0), "merged into the framed patch of its colour"))
    for colour, words in entries:
        pen.rectangle((left, top, left + size, top + size), fill=TEXT)
        pen.rectangle((left + 6, top + 6, left + size - 6, top + size - 6), QUIET, colour, 4)
        left += size + step
        pen.text((left, top + 1), words, QUIET, _font(_LEGEND))
        left += int(pen.textlength(words, _font(_LEGEND))) + 3 * step


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
