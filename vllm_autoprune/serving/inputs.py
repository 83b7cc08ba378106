"""Tensors of an item beside its plan: names of their fields, and the check of a plan against them.

A server's own processor makes both. But vLLM's ``/inference/v1/generate`` takes them from its
client, and a tower or vLLM's own batching ends the engine over tensors that do not fit each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import Tensor

from vllm_autoprune.errors import RequestError
from vllm_autoprune.serving.plan import (
    MAX_CLIP_TOKENS,
    RENDERED,
    ItemPlan,
    plan_error,
    refuse,
)

CELLS_FIELD = "autoprune_cells"
"""Name of the field with an image's anchors ``(N,)`` (:mod:`vllm_autoprune.tpdsl.cells`), of which
cells were dropped; absent or empty where it is whole."""

PIXELS = "pixel_"
"""Beginning of the names of fields that go to the device, with what a tower reads of an item. All
others stay on the CPU, and say how many pixels there are and where."""

VIDEO_PIXELS = "pixel_values_videos"
VIDEO_FIELDS = (VIDEO_PIXELS, "pixel_values_flat_video")
"""Pixels of a video, by frame where all have the same size; the second is InternVL's."""

VIDEO_TILES = "video_num_patches"
"""How many frames each of InternVL's videos has ``(B,)``, on the CPU."""

CELL = 2
"""Patches on each side of a token, in every model with a grid of patches."""

IMAGE_GRID = "image_grid_thw"
VIDEO_GRID = "video_grid_thw"
"""Patches of an item ``(3,)`` in time, height and width."""

_GRIDS = {"image": IMAGE_GRID, "video": VIDEO_GRID}

_TILE_COUNTS = ("num_patches", "image_num_patches", VIDEO_TILES)
"""How many tiles an item has, one in each row of its pixels."""

_SIZE = "image_sizes"
"""Height and width of a picture before it was cut into tiles."""

PATCH_PLACES = "pixel_position_ids"
"""Column and row of each patch, -1 of those that fill up."""

FRAME_SECONDS = "second_per_grid_ts"
"""Seconds between two frames of a video."""

_MOST_SECONDS = 3600.0
_MAX_SIDE = 1 << 16
"""Bounds of what multiplies a position, or the size of a grid."""

_WHOLE_NUMBERS = (torch.int32, torch.int64)
_NUMBERS = (
    torch.bool,
    torch.uint8,
    *_WHOLE_NUMBERS,
    torch.float16,
    torch.bfloat16,
    torch.float32,
)
_MOST_DIMENSIONS = 5

Fields = Mapping[str, object]
"""What an item has beside its plan, by name."""


def check_inputs(
    plan: ItemPlan, modality: str, fields: Fields, frame: tuple[int, int] | None
) -> None:
    """Raise :class:`RequestError` unless a plan is of this item, whose tensors fit each other.

    ``frame`` has the tokens of a frame and the rows behind the last, where no size changes them.
    """
    for name, value in fields.items():
        if not _is_numeric(value):
            raise _input_error(name, "is no tensor of numbers on the CPU")
    pixels = _find_pixels(modality, fields)
    for name, check in _CHECKS.items():
        if name in fields and not check(fields[name], len(pixels)):
            raise _input_error(name, f"does not fit the {len(pixels)} rows of pixels")
    tokens = _count_clip(plan, modality, fields, pixels, frame)
    tokens = _count_grid(modality, fields, pixels) if tokens is None else tokens
    if tokens not in (None, plan.tokens):
        raise plan_error(f"has N = {plan.tokens}, and its item has {tokens}")
    _check_text(plan, frame)
    anchors = fields.get(CELLS_FIELD)
    if plan.keep == "resized" and isinstance(anchors, Tensor) and len(anchors):
        raise cells_error("are dropped of an image that is resized")


def _is_numeric(value: object) -> bool:
    """Whether a value is a tensor of numbers in the host's memory, or a list of numbers."""
    if isinstance(value, Tensor):
        on_host = value.device.type == "cpu" and value.layout == torch.strided
        return on_host and value.dtype in _NUMBERS and value.dim() <= _MOST_DIMENSIONS
    return isinstance(value, list) and all(
        isinstance(entry, int | float) for entry in value
    )


def _find_pixels(modality: str, fields: Fields) -> Tensor:
    """The pixels of an item, of which there is one tensor of its modality."""
    names = [name for name in fields if name.startswith("pixel_values")]
    if len(names) != 1 or (names[0] in VIDEO_FIELDS) != (modality == "video"):
        raise plan_error(
            f"is of {modality!r} with the pixels {', '.join(names) or 'of nothing'}"
        )
    pixels = fields[names[0]]
    if not isinstance(pixels, Tensor) or pixels.dim() < 2 or pixels.numel() == 0:
        raise _input_error(names[0], "has no rows of pixels")
    if not pixels.is_floating_point() and pixels.dtype != torch.uint8:
        raise _input_error(names[0], f"has pixels of {pixels.dtype}")
    if not bool(
        pixels.isfinite().all()
    ):  # rows of an image that is kept whole would not be, too
        raise _input_error(names[0], "has pixels that are not finite")
    for name, other in fields.items():
        of_pixels = name.startswith(PIXELS) and name != names[0]
        if of_pixels and not (
            isinstance(other, Tensor) and other.shape[:1] == pixels.shape[:1]
        ):
            raise _input_error(name, f"does not fit the {len(pixels)} rows of pixels")
    return pixels


def _count_clip(
    plan: ItemPlan,
    modality: str,
    fields: Fields,
    pixels: Tensor,
    frame: tuple[int, int] | None,
) -> int | None:
    """N of a clip whose frames have equally many tokens; None for others, and for images."""
    if (plan.frames > 0) != (modality == "video"):
        raise plan_error(f"has T = {plan.frames}, and its item is {modality!r}")
    if not plan.frames:
        return None
    grid = fields.get(VIDEO_GRID)
    if frame is None:
        frames = (
            int(grid[0])
            if isinstance(grid, Tensor) and grid.dim() == 1 and len(grid)
            else 0
        )
    else:
        frames = len(pixels) if pixels.dim() == 4 else 0
    if frames != plan.frames:
        raise plan_error(f"has T = {plan.frames}, and its clip has {frames}")
    return None if frame is None else frames * frame[0] + frame[1]


def _count_grid(modality: str, fields: Fields, pixels: Tensor) -> int | None:
    """N of an item with a grid of patches, which are its rows of pixels; None without one."""
    name = _GRIDS.get(modality, "")
    anchors = fields.get(CELLS_FIELD, torch.zeros(0, dtype=torch.int32))
    if name not in fields:
        if CELLS_FIELD in fields:
            raise cells_error("are not those of the image's grid and rows of pixels")
        return None
    grid = fields[name]
    if not isinstance(grid, Tensor) or (grid.dtype, grid.shape) != (torch.int64, (3,)):
        raise _input_error(name, "is not (3,) whole numbers")
    times, *sides = grid.tolist()
    is_whole = min(times, *sides) > 0 and not any(side % CELL for side in sides)
    if not is_whole or (times > 1 and modality == "image"):
        raise _input_error(name, f"is {grid.tolist()}, of which no tokens can be made")
    if prod(grid.tolist()) > MAX_CLIP_TOKENS * CELL**2:
        raise _input_error(name, f"is {grid.tolist()}, which is too large")
    if not _are_anchors(anchors, times * prod(sides) // CELL**2):
        raise cells_error("are not those of the image's grid and rows of pixels")
    assert isinstance(anchors, Tensor)
    patches = count_patches(anchors, grid)
    if patches != len(pixels):
        raise _input_error(
            name, f"is of {patches} patches, and there are {len(pixels)}"
        )
    return patches // CELL**2


def _check_text(plan: ItemPlan, frame: tuple[int, int] | None) -> None:
    """Raise unless text stands between tokens that there are, and between the frames of a clip."""
    if not plan.text:
        return
    if plan.part != "whole" or plan.keeps_all:
        raise plan_error(
            f"has text as {plan.part}, K = {plan.budget} of N = {plan.tokens}"
        )
    places = {before for before, _ in plan.text}
    if max(places) > plan.tokens:
        raise plan_error(f"has text behind token {max(places)} of N = {plan.tokens}")
    if not plan.frames:
        return
    in_frames = plan.tokens - (0 if frame is None else frame[1])
    edges = {in_frames // plan.frames * number for number in range(plan.frames + 1)}
    if not edges - {0, in_frames} <= places <= edges:
        raise plan_error(f"has text that is not between its T = {plan.frames} frames")


# Values of fields, each by itself or by the number of rows of pixels.


def _are_sides(value: object, rows: int) -> bool:
    if (
        not isinstance(value, Tensor)
        or value.dtype not in _WHOLE_NUMBERS
        or value.shape != (2,)
    ):
        return False
    return bool(((value > 0) & (value <= _MAX_SIDE)).all())


def _are_places(value: object, rows: int) -> bool:
    """Whether patches fill a rectangle, each place once."""
    if (
        not isinstance(value, Tensor)
        or value.dtype != torch.int64
        or value.shape != (rows, 2)
    ):
        return False
    columns, lines = value[(value != -1).any(dim=1)].unbind(dim=1)
    if len(columns) == 0 or int(value.min()) < -1 or int(value.max()) >= _MAX_SIDE:
        return False
    width = int(columns.max()) + 1
    height = int(lines.max()) + 1
    places = columns + lines * width
    return min(int(columns.min()), int(lines.min())) >= 0 and bool(
        len(places) == width * height == len(places.unique())
    )


def _is_count(value: object, rows: int) -> bool:
    if not isinstance(value, Tensor) or value.dtype not in _WHOLE_NUMBERS:
        return False
    return value.dim() == 0 and int(value) == rows


def _is_interval(value: object, rows: int) -> bool:
    if (
        not isinstance(value, Tensor)
        or value.numel() != 1
        or not value.is_floating_point()
    ):
        return False
    seconds = value.item()
    return math.isfinite(seconds) and 0 <= seconds <= _MOST_SECONDS


_CHECKS: Mapping[str, Callable[[object, int], bool]] = {
    **dict.fromkeys(_TILE_COUNTS, _is_count),
    _SIZE: _are_sides,
    PATCH_PLACES: _are_places,
    FRAME_SECONDS: _is_interval,
}
"""Check of a field's value, by name."""


def _input_error(name: str, what: str) -> RequestError:
    """Error for a tensor that this server refuses."""
    return refuse(name, what, RENDERED)


# Cells of an image that were dropped before the vision tower.


def count_patches(anchors: Tensor, grid: Tensor) -> int:
    """Rows of pixels of an image with a grid of patches and these anchors ``(N,)``, or none."""
    patches = int(grid.prod())
    return (
        patches // len(anchors) * int(_find_kept(anchors).sum())
        if len(anchors)
        else patches
    )


def _are_anchors(anchors: object, tokens: int) -> bool:
    """Whether anchors are none, or of so many tokens, each one that is kept."""
    if not isinstance(anchors, Tensor) or (anchors.dtype, anchors.dim()) != (
        torch.int32,
        1,
    ):
        return False
    if len(anchors) == 0:
        return True
    places = torch.arange(len(anchors))
    in_range = len(anchors) == tokens and bool(
        ((anchors >= 0) & (anchors <= places)).all()
    )
    return in_range and bool(_find_kept(anchors)[anchors.long()].all())


def _find_kept(anchors: Tensor) -> Tensor:
    return anchors == torch.arange(len(anchors), dtype=anchors.dtype)


def cells_error(what: str) -> RequestError:
    """Error for cells that this server refuses."""
    return refuse(CELLS_FIELD, what, RENDERED)
