"""Tensors of an item beside its plan: names of their fields, and the check of a plan against them.

A server's own processor makes both. But vLLM's ``/inference/v1/generate`` takes them from its
client, and tensors that do not fit each other would end the engine, in a tower or in vLLM's own
batching.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TypeGuard

import torch
from torch import Tensor

from vllm_autoprune.serving.plan import (
    MAX_VIDEO_TOKENS,
    ItemPlan,
    plan_error,
)

CUT_FIELD = "autoprune_tower"
"""Name of the input ``(3,)`` of an image that loses cells inside the tower: the number that stay,
the first layer that only these pass, and the index of the criterion. Made in a worker."""

CELLS_FIELD = "autoprune_cells"
"""Name of the field with the anchors ``(N,)`` (:mod:`vllm_autoprune.tpdsl.cells`) of an image whose
cells were dropped; absent or empty for an image that is whole."""

CROP_PIXELS = "patch_pixel_values"
"""Field with the pixels ``(M, 3, H, W)`` of an image's tiles, for models in which those of the
whole image ``(3, H, W)`` have another size and are a field of their own."""

PIXELS = ("pixel_", CROP_PIXELS)
"""Prefixes of the names of fields that are moved to the device and that a tower reads. All other
fields stay on the CPU, and say how many pixels there are and where."""

VIDEO_PIXELS = "pixel_values_videos"
VIDEO_FIELDS = (VIDEO_PIXELS, "pixel_values_flat_video")
"""Fields with the pixels of a video, by frame if all frames have the same size; the second is
InternVL's."""

VIDEO_TILES = "video_num_patches"
"""Field with the number of frames of each of InternVL's videos ``(B,)``, on the CPU."""

CELL = 2
"""Side, in patches, of the square that becomes one token, in every model with a grid of patches."""

IMAGE_GRID = "image_grid_thw"
VIDEO_GRID = "video_grid_thw"
"""Field with the number of patches ``(3,)`` of an item in time, height and width."""

IMAGE_GRIDS = "grids"
"""The same ``(1, 3)``, of an image of Ovis."""

IMAGE_MARKS = "indicator_tokens"
"""Field with the ids of the rows that begin and end an image of Ovis, which plans have too."""

_GRIDS = {"image": (IMAGE_GRID, IMAGE_GRIDS), "video": (VIDEO_GRID,)}

_TILE_COUNTS = ("num_patches", "image_num_patches", "patches_per_image", VIDEO_TILES)
"""Fields with the number of tiles of an item; each tile is one row of its pixels."""

_SIZE = "image_sizes"
"""Field with height and width of a picture before it was cut into tiles."""

TILE_SHAPES = "spatial_shapes"
"""Field with height and width, in patches, of each tile."""

_LINE_ENDS = "patch_newline_mask"
"""Field that says of each tile whether a newline follows it."""

BY_TILE = (TILE_SHAPES, _LINE_ENDS)
"""Fields on the CPU with a row for each tile."""

PATCH_PLACES = "pixel_position_ids"
"""Field with column and row of each patch, which are -1 for padding."""

FRAME_SECONDS = "second_per_grid_ts"
"""Field with the seconds between two frames of a video."""

_MOST_SECONDS = 3600.0
_MAX_SIDE = 1 << 16
"""Bound of numbers that multiply a position or the size of a grid."""

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
"""The fields of an item beside its plan, by name."""


def check_inputs(
    plan: ItemPlan, modality: str, fields: Fields, frame: tuple[int, int] | None
) -> None:
    """Raise :class:`RequestError` unless a plan fits this item, and its tensors fit each other.

    ``frame`` has the number of tokens of a frame and of rows after the last frame, for models whose
    frames always have the same size.
    """
    for name, value in fields.items():
        if not _is_numeric(value):
            raise plan_error("is no tensor of numbers on the CPU", name)
    pixels = _find_pixels(modality, fields)
    tiles = pixels if CROP_PIXELS not in fields else _check_crops(pixels, fields)
    for name, check in _CHECKS.items():
        if name in fields and not check(fields[name], len(tiles)):
            raise plan_error(f"does not fit the {len(tiles)} rows of pixels", name)
    tokens = _count_video(plan, modality, fields, pixels, frame)
    tokens = _count_grid(modality, fields, pixels) if tokens is None else tokens
    planned = plan.tokens if plan.tower is None else plan.tower.encoded
    if tokens not in (None, planned):
        raise plan_error(f"has N = {planned}, and its item has {tokens}")
    _check_text(plan, frame)
    anchors = fields.get(CELLS_FIELD)
    if plan.keep == "resized" and isinstance(anchors, Tensor) and len(anchors):
        raise plan_error("are dropped of an image that is resized", CELLS_FIELD)


def _is_numeric(value: object) -> bool:
    """Whether a value is a numeric tensor in the host's memory, or a list of numbers."""
    if isinstance(value, Tensor):
        on_host = value.device.type == "cpu" and value.layout == torch.strided
        return on_host and value.dtype in _NUMBERS and value.dim() <= _MOST_DIMENSIONS
    return isinstance(value, list) and all(
        isinstance(entry, int | float) for entry in value
    )


def _find_pixels(modality: str, fields: Fields) -> Tensor:
    """The pixels of an item, the only pixel tensor of its modality."""
    names = [name for name in fields if name.startswith("pixel_values")]
    if len(names) != 1 or (names[0] in VIDEO_FIELDS) != (modality == "video"):
        raise plan_error(
            f"is of {modality!r} with the pixels {', '.join(names) or 'of nothing'}"
        )
    pixels = fields[names[0]]
    if not isinstance(pixels, Tensor) or pixels.dim() < 2 or pixels.numel() == 0:
        raise plan_error("has no rows of pixels", names[0])
    _check_pixels(names[0], pixels)
    for name, value in fields.items():
        if name == CROP_PIXELS or not name.startswith(PIXELS):
            continue
        if not isinstance(value, Tensor) or value.shape[:1] != pixels.shape[:1]:
            raise plan_error(f"does not fit the {len(pixels)} rows of pixels", name)
    return pixels


def _check_pixels(name: str, pixels: Tensor) -> None:
    """Raise unless pixels are finite numbers of a type that towers take."""
    if not pixels.is_floating_point() and pixels.dtype != torch.uint8:
        raise plan_error(f"has pixels of {pixels.dtype}", name)
    # Otherwise the rows of an image that is kept whole would not be finite either.
    if not bool(pixels.isfinite().all()):
        raise plan_error("has pixels that are not finite", name)


def _check_crops(pixels: Tensor, fields: Fields) -> Tensor:
    """The pixels ``(M, 3, H, W)`` of an image's tiles; M is 0 where only the whole is shown."""
    crops = fields[CROP_PIXELS]
    if not isinstance(crops, Tensor) or crops.dim() != 4 or pixels.dim() != 3:
        raise plan_error("has no tiles beside a whole image", CROP_PIXELS)
    _check_pixels(CROP_PIXELS, crops)
    return crops


def _count_video(
    plan: ItemPlan,
    modality: str,
    fields: Fields,
    pixels: Tensor,
    frame: tuple[int, int] | None,
) -> int | None:
    """N of a video whose frames have equally many tokens; None for other videos and for images."""
    if (plan.frames > 0) != (modality == "video"):
        raise plan_error(f"has T = {plan.frames}, and its item is {modality!r}")
    if not plan.frames:
        return None
    grid = fields.get(VIDEO_GRID)
    frames = 0
    if frame is not None:
        if pixels.dim() == 4:
            frames = len(pixels)
    elif isinstance(grid, Tensor) and grid.dim() == 1 and len(grid):
        frames = int(grid[0])
    if frames != plan.frames:
        raise plan_error(f"has T = {plan.frames}, and its video has {frames}")
    return None if frame is None else frames * frame[0] + frame[1]


def _count_grid(modality: str, fields: Fields, pixels: Tensor) -> int | None:
    """N of an item with a grid of patches, which must match its pixel rows; else None."""
    name = next((n for n in _GRIDS.get(modality, ()) if n in fields), "")
    anchors = fields.get(CELLS_FIELD, torch.zeros(0, dtype=torch.int32))
    if not name:
        if CELLS_FIELD in fields:
            raise plan_error(
                "are not those of the image's grid and rows of pixels", CELLS_FIELD
            )
        return None
    grid = fields[name]
    shape = (1, 3) if name == IMAGE_GRIDS else (3,)
    if not _has_form(grid, (torch.int64,), shape):
        raise plan_error(f"is not {shape} whole numbers", name)
    grid = grid.flatten()
    times, *sides = grid.tolist()
    is_whole = min(times, *sides) > 0 and not any(side % CELL for side in sides)
    if not is_whole or (times > 1 and modality == "image"):
        raise plan_error(f"is {grid.tolist()}, of which no tokens can be made", name)
    if prod(grid.tolist()) > MAX_VIDEO_TOKENS * CELL**2:
        raise plan_error(f"is {grid.tolist()}, which is too large", name)
    if not _are_anchors(anchors, times * prod(sides) // CELL**2):
        raise plan_error(
            "are not those of the image's grid and rows of pixels", CELLS_FIELD
        )
    assert isinstance(anchors, Tensor)
    patches = count_patches(anchors, grid)
    if patches != len(pixels):
        raise plan_error(f"is of {patches} patches, and there are {len(pixels)}", name)
    return patches // CELL**2


def _check_text(plan: ItemPlan, frame: tuple[int, int] | None) -> None:
    """Raise unless a plan's text stands between existing tokens, and between video frames."""
    if not plan.text:
        return
    places = {position for position, _ in plan.text}
    # vLLM embeds the text of a whole item, but not the rows that begin and end an image.
    is_marks = not plan.frames and places <= {0, plan.tokens}
    if plan.part != "whole" or (plan.keeps_all and not is_marks):
        raise plan_error(
            f"has text as {plan.part}, K = {plan.budget} of N = {plan.tokens}"
        )
    if max(places) > plan.tokens:
        raise plan_error(f"has text behind token {max(places)} of N = {plan.tokens}")
    if not plan.frames:
        return
    in_frames = plan.tokens - (0 if frame is None else frame[1])
    edges = {in_frames // plan.frames * number for number in range(plan.frames + 1)}
    if not edges - {0, in_frames} <= places <= edges:
        raise plan_error(f"has text that is not between its T = {plan.frames} frames")


# Checks of field values, alone or against the number of pixel rows.


def _has_form(
    value: object, dtypes: Sequence[torch.dtype], shape: tuple[int, ...]
) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype in dtypes and value.shape == shape


def _are_sides(value: object, rows: int) -> bool:
    if not _has_form(value, _WHOLE_NUMBERS, (2,)):
        return False
    return bool(((value > 0) & (value <= _MAX_SIDE)).all())


def _are_shapes(value: object, rows: int) -> bool:
    if not _has_form(value, _WHOLE_NUMBERS, (rows, 2)):
        return False
    is_sound = (value > 0) & (value <= _MAX_SIDE) & (value % CELL == 0)
    return bool(is_sound.all())


def _are_places(value: object, rows: int) -> bool:
    """Whether patches fill a rectangle, with each place taken once."""
    if not _has_form(value, (torch.int64,), (rows, 2)):
        return False
    columns, lines = value[(value != -1).any(dim=1)].unbind(dim=1)
    if len(columns) == 0 or int(value.min()) < -1 or int(value.max()) >= _MAX_SIDE:
        return False
    if min(int(columns.min()), int(lines.min())) < 0:
        return False
    width = int(columns.max()) + 1
    height = int(lines.max()) + 1
    places = columns + lines * width
    return len(places) == width * height == len(places.unique())


def _are_flags(value: object, rows: int) -> bool:
    return _has_form(value, (torch.bool,), (rows,))


def _is_count(value: object, rows: int) -> bool:
    return _has_form(value, _WHOLE_NUMBERS, ()) and int(value) == rows


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
    TILE_SHAPES: _are_shapes,
    _LINE_ENDS: _are_flags,
    PATCH_PLACES: _are_places,
    FRAME_SECONDS: _is_interval,
}
"""Check of a field's value, by the field's name."""


# Cells of an image that were dropped before the vision tower.


def count_patches(anchors: Tensor, grid: Tensor) -> int:
    """Number of pixel rows of an image with a grid of patches and these anchors ``(N,)``.

    If ``anchors`` is empty, no cell was dropped.
    """
    patches = int(grid.prod())
    if len(anchors) == 0:
        return patches
    return patches // len(anchors) * int(_find_kept(anchors).sum())


def _are_anchors(anchors: object, tokens: int) -> bool:
    """Whether anchors are empty, or of ``tokens`` cells that all point to a kept cell."""
    if _has_form(anchors, (torch.int32,), (0,)):
        return True
    if not _has_form(anchors, (torch.int32,), (tokens,)):
        return False
    in_range = (anchors >= 0) & (anchors <= torch.arange(tokens))
    return bool(in_range.all()) and bool(_find_kept(anchors)[anchors.long()].all())


def _find_kept(anchors: Tensor) -> Tensor:
    return anchors == torch.arange(len(anchors), dtype=anchors.dtype)
