"""The picture at the end of the demo: one scene, the patches that each configuration keeps.

The patches are recomputed: the checkpoint is opened with transformers, and the server's own code
chooses the tokens. Its inputs equal the server's up to the rounding in other kernels, which may
exchange patches of nearly equal rank. Answers are those of the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

from benchmarks.demo.measure import FULL, Answers, Configuration, Keep, Settings
from benchmarks.yardsticks.examples import Example, as_picture, is_right
from vllm_autoprune import load_state, materialize, refine
from vllm_autoprune.checkpoint import LlavaVision
from vllm_autoprune.explain import trace_images
from vllm_autoprune.picture import Colour, Panel, draw_panel
from vllm_autoprune.serving.plan import hash_picture, make_feature_key
from vllm_autoprune.serving.settings import read_text_tower
from vllm_autoprune.serving.worker.selection import select_at_random
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens

NAMES: Mapping[Keep, str] = {
    "full": "full",
    "random": "random keep",
    "resized": "resize control",
    "reference": "base policy",
    "state": "shipped state",
}
SHOWN = (FULL, *(Configuration(keep, 8) for keep in ("random", "reference", "state")))

PATCH_SIDE = 42
"""Pixels of a patch in the picture."""
EVIDENCE: Colour = (255, 196, 0)
_PAPER, _TEXT, _QUIET = (255, 255, 255), (32, 36, 44), (104, 110, 122)
_RIGHT, _WRONG = (21, 128, 61), (190, 30, 45)
_GAP, _TITLE, _LABEL = 28, 46, 35


def _choose_example(examples: Sequence[Example], answers: Answers) -> int:
    """The first question that a random keep fails and the others answer.

    Where there is none: the first that the full model answers, or the first of all.
    """
    contrasting, answered = [], []
    for number, example in enumerate(examples):
        right = [is_right(answers[shown][number].text, example.answer) for shown in SHOWN]
        if right == [True, False, True, True] and example.kind in ("digit", "colour", "shape"):
            contrasting.append(number)
        if right[0]:
            answered.append(number)
    return next(iter((*contrasting, *answered)), 0)


@torch.no_grad()
def select_patches(
    tokens: VisualTokens, image: Image.Image, state: str, configuration: Configuration
) -> Panel:
    """What a server keeps of an image, for a question that its tokens were encoded with."""
    name, budget = NAMES[configuration.keep], configuration.budget
    if budget is None:
        return Panel(name, f"{tokens.count} tokens")
    detail, policy = f"{budget} tokens", materialize(load_state(state), budget)
    if configuration.keep == "random":
        key = make_feature_key(hash_picture(image))
        picks = select_at_random(budget, tokens, [key]).indices[0].tolist()
        return Panel(name, detail, lit=tuple(sorted(picks)))
    if configuration.keep == "reference":
        policy = materialize(load_state(state).without_exchange(), budget)
    (trace,) = trace_images(policy, tokens, refine(policy, tokens))
    return Panel(name, detail, lit=trace.kept, owners=trace.owners)


def draw_example(
    settings: Settings, examples: Sequence[Example], answers: Answers
) -> dict[str, object]:
    """Draw one question into ``kept.png``; its path, question and answers."""
    number = _choose_example(examples, answers)
    example = examples[number]
    image, evidence = as_picture(example.image), example.evidence
    tower = read_text_tower(str(settings.text_tower))
    tokens = LlavaVision(settings.model, tower, settings.dtype).encode(image, example.question)
    grid = tokens.grid
    side, top = grid.width * PATCH_SIDE, _GAP + _TITLE + 28 + _LABEL + 16
    width, height = _GAP + len(SHOWN) * (side + _GAP), top + side + 3 * _LABEL + 4 * _GAP
    sheet = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(sheet)

    def write(x: int, y: int, *words: tuple[str, Colour]) -> None:
        font, offset = ImageFont.load_default(_LABEL), float(x)
        for text, colour in words:
            pen.text((offset, y), text, colour, font)
            offset += pen.textlength(text, font)

    title = ImageFont.load_default(_TITLE)
    pen.text((_GAP, _GAP - 6), f"\u201c{example.question}\u201d", _TEXT, title)
    served = {shown.label: answers[shown][number].text.strip() for shown in SHOWN}
    large = image.resize((side, side), Image.Resampling.NEAREST)
    merged = False
    for place, shown in enumerate(SHOWN):
        x, answer = _GAP + place * (side + _GAP), served[shown.label]
        panel = select_patches(tokens, image, settings.state, shown)
        merged = merged or bool(panel.owners)
        write(x, top - 16 - _LABEL, (f"{panel.title}  ", _TEXT), (panel.detail, _QUIET))
        scene = draw_panel(large, panel, grid, PATCH_SIDE)
        sheet.paste(outline_patches(scene, evidence, grid), (x, top))
        colour = _RIGHT if is_right(answer, example.answer) else _WRONG
        write(x, top + side + 16, ("answer: ", _QUIET), (answer or "(nothing)", colour))
    legend = "white: kept patch; yellow: patches that hold the answer"
    legend += "; other colours: merged into the framed patch" if merged else ""
    write(_GAP, top + side + 2 * _LABEL + _GAP, (legend, _QUIET))
    path, here = settings.out / "kept.png", Path.cwd()
    sheet.save(path, optimize=True)
    return {
        "path": str(path.relative_to(here) if path.is_relative_to(here) else path),
        "question": example.question,
        "expected": example.answer,
        "served": served,
    }


def outline_patches(scene: Image.Image, patches: Sequence[int], grid: Grid) -> Image.Image:
    """A copy of the scene with the border of a set of patches, without the lines between them."""
    mask = Image.new("L", scene.size)
    pen = ImageDraw.Draw(mask)
    for patch in patches:
        row, column = divmod(patch, grid.width)
        x, y = column * PATCH_SIDE, row * PATCH_SIDE
        pen.rectangle((x, y, x + PATCH_SIDE - 1, y + PATCH_SIDE - 1), 255)
    # Pixels near the border of the set, on both sides.
    wide, narrow = mask.filter(ImageFilter.MaxFilter(7)), mask.filter(ImageFilter.MinFilter(7))
    outlined = scene.copy()
    outlined.paste(EVIDENCE, mask=ImageChops.subtract(wide, narrow))
    return outlined
