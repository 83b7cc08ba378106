"""Training scenes: their seeds, layouts for the first stages, and dense labels per patch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.minillava.layout import (
    CELL_PATCHES,
    COLOURS,
    NEIGHBOURS,
    SEEDS,
    SHAPES,
    TRAINING_STYLES,
    Canvas,
    Layout,
    Thing,
    draw_layout,
)
from benchmarks.minillava.render import Batch, Scene, render

UNLABELLED = -1
_FIELDS = ("kind", "colour", "shape", "digit", "row", "column", "slot", "length", "centre")


def training_seed(seed: int, stage: int, step: int, rank: int) -> int:
    """The scene seed of one training batch; it always lies in the training range."""
    scene_seed = (((seed % 128) * 8 + stage) * 2**17 + step) * 2 + rank
    assert scene_seed in SEEDS["train"]
    return scene_seed


def unify_names(rng: random.Random, layout: Layout) -> Layout:
    """Give the first shapes of a layout one form, or one colour, and drop the others.

    Only the other word of a name then tells two shapes apart. Without such scenes a small model
    learns to find a shape by the last word of its name, is right half of the time, and stays there.
    """
    if rng.random() < 0.5:
        colours = rng.sample(range(len(COLOURS)), len(COLOURS))
        shape = rng.randrange(len(SHAPES))
        names = [(colour, shape) for colour in colours]
    else:
        colour = rng.randrange(len(COLOURS))
        names = [(colour, shape) for shape in rng.sample(range(len(SHAPES)), len(SHAPES))]
    things = tuple(
        replace(thing, colour=colour, shape=shape)
        for thing, (colour, shape) in zip(layout.things, names, strict=False)
    )
    return replace(layout, things=things)


def training_scenes(seed: int, size: int, canvas: Canvas, max_shapes: int | None = None) -> Batch:
    """Draw and render scenes in the arrangements of the training split.

    `max_shapes` makes them easier: each scene keeps at most so many shapes, and every second one
    on average has a single form or a single colour.
    """
    rng = random.Random(seed)
    layouts = [draw_layout(rng, rng.choice(TRAINING_STYLES), canvas) for _ in range(size)]
    if max_shapes is not None:
        layouts = [replace(layout, things=layout.things[:max_shapes]) for layout in layouts]
        layouts = [unify_names(rng, one) if rng.random() < 0.5 else one for one in layouts]
    return render(layouts, canvas, seed)


@dataclass(frozen=True)
class Labels:
    """Dense targets (B, N) int64 for every patch; -1 where a target does not apply.

    kind: 0 background, 1 shape, 2 sign; row and column in cells; slot: position within the number;
    length: digits of the number minus two; centre: 1 on the middle patch of a shape, 0 on its
    others; digit: on a sign's patches and on the middle patch of a shape only, so that no other
    patch learns to repeat it; near (B, N, 4, 2): colour and form of the shapes on the left, on the
    right, above and below, `len(COLOURS)` and `len(SHAPES)` where there is none.
    """

    kind: Tensor
    colour: Tensor
    shape: Tensor
    digit: Tensor
    row: Tensor
    column: Tensor
    slot: Tensor
    length: Tensor
    centre: Tensor
    near: Tensor


def label_patches(scenes: Sequence[Scene], canvas: Canvas) -> Labels:
    """The dense targets of scenes."""
    size = (len(_FIELDS) + 2 * len(NEIGHBOURS), len(scenes) * canvas.patches)
    flat = torch.full(size, UNLABELLED)
    flat[0] = 0
    patches: list[int] = []
    columns: list[list[int]] = []
    for index, scene in enumerate(scenes):
        for patch, column in (*_shape_labels(scene), *_sign_labels(scene)):
            patches.append(index * canvas.patches + patch)
            columns.append(column)
    flat[:, patches] = torch.tensor(columns).T
    parts = flat.view(-1, len(scenes), canvas.patches)
    near = parts[len(_FIELDS) :].permute(1, 2, 0).unflatten(2, (len(NEIGHBOURS), 2))
    return Labels(near=near, **dict(zip(_FIELDS, parts, strict=False)))


def _shape_labels(scene: Scene) -> Iterator[tuple[int, list[int]]]:
    """(raster patch, its labels) of all shapes: `_FIELDS`, then the neighbours."""
    for thing, patches in zip(scene.layout.things, scene.thing_patches, strict=True):
        near = _neighbour_labels(scene.layout, thing)
        for place, patch in enumerate(patches):
            middle = place == 0
            digit = thing.digit if middle else UNLABELLED
            labels = [1, thing.colour, thing.shape, digit, thing.row, thing.column, -1, -1]
            yield patch, [*labels, int(middle), *near]


def _neighbour_labels(layout: Layout, thing: Thing) -> list[int]:
    labels: list[int] = []
    for step in NEIGHBOURS:
        other = layout.neighbour(thing, *step)
        labels += (len(COLOURS), len(SHAPES)) if other is None else (other.colour, other.shape)
    return labels


def _sign_labels(scene: Scene) -> Iterator[tuple[int, list[int]]]:
    for sign, patches in zip(scene.layout.signs, scene.sign_patches, strict=True):
        cell = (sign.row // CELL_PATCHES, sign.column // CELL_PATCHES)
        for slot, (patch, digit) in enumerate(zip(patches, sign.number, strict=True)):
            labels = [2, sign.colour, -1, digit, *cell, slot, len(sign.number) - 2, -1]
            yield patch, [*labels, *[-1] * 2 * len(NEIGHBOURS)]
