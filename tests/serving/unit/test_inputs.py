"""Check of a plan against its item's tensors, for requests that another process has rendered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_autoprune import RequestError
from vllm_autoprune.serving.inputs import VIDEO_TILES, check_inputs
from vllm_autoprune.serving.plan import NO_KEY, ItemPlan

IMAGE_PLAN = ItemPlan(8, NO_KEY, tokens=49)
GRID = {
    "image_grid_thw": torch.tensor([1, 14, 14]),
    "pixel_values": torch.zeros(196, 12),
}

FRAMES = [(0, 5), (6, 5), (12, 5), (18, 5), (24, 5)]
VIDEO_PLAN = ItemPlan(8, NO_KEY, tokens=24, frames=4, text=tuple(FRAMES))
VIDEO = {
    "video_grid_thw": torch.tensor([4, 4, 6]),
    "pixel_values_videos": torch.zeros(96, 12),
    "timestamps": [0.5, 1.5, 2.5, 3.5],
}

TILES = {"num_patches": torch.tensor(5), "pixel_values": torch.zeros(5, 3, 8, 8)}
TILES["pixel_attention_mask"] = torch.ones(5, 8, 8, dtype=torch.int64)
TILES_PLAN = ItemPlan(8, NO_KEY, tokens=45, text=((0, 5), (9, 5), (45, 5)))

MARKED = {"grids": torch.tensor([[1, 14, 14]]), "pixel_values": torch.zeros(196, 12)}
MARKED_PLAN = ItemPlan(8, NO_KEY, tokens=49, text=((0, 5), (49, 6)))
WHOLE_PLAN = replace(MARKED_PLAN, budget=49)

SIZED = {
    "image_sizes": torch.tensor([224, 168]),
    "pixel_values": torch.zeros(5, 3, 56, 56),
}

PLACES = {
    "pixel_position_ids": torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1], [-1, -1]]),
    "pixel_values": torch.zeros(5, 48),
}


def grid(*sides: int, modality: str = "image") -> dict[str, torch.Tensor]:
    return {f"{modality}_grid_thw": torch.tensor(sides)}


def places(*pairs: tuple[int, int]) -> dict[str, torch.Tensor]:
    return {"pixel_position_ids": torch.tensor(pairs)}


def text(*at: int) -> tuple[tuple[int, int], ...]:
    return tuple((before, 5) for before in at)


@pytest.mark.parametrize(
    ("plan", "modality", "fields"),
    [
        (IMAGE_PLAN, "image", GRID),
        (VIDEO_PLAN, "video", VIDEO),
        (TILES_PLAN, "image", TILES),
        (MARKED_PLAN, "image", MARKED),
        (WHOLE_PLAN, "image", MARKED),
        (IMAGE_PLAN, "image", SIZED),
        (IMAGE_PLAN, "image", PLACES),
    ],
)
def test_what_fits_is_accepted(
    plan: ItemPlan, modality: str, fields: dict[str, Any]
) -> None:
    check_inputs(plan, modality, fields, None)


@pytest.mark.parametrize(
    ("plan", "fields", "changes", "problem"),
    [
        *(
            (IMAGE_PLAN, GRID, grid(*sides), "image_grid_thw")
            for sides in (
                (1, 1, 196),
                (1, 28, 7),
                (1, 14, 12),
                (0, 14, 14),
                (1, -14, -14),
                (4, 7, 7),
                (4, 14, 14),
                (1, 14),
                (1, 2**32, 2**32),
                (2**62, 2, 2),
            )
        ),
        (
            IMAGE_PLAN,
            GRID,
            {"image_grid_thw": torch.tensor([1.0, 14.0, 14.0])},
            "image_grid_thw",
        ),
        (IMAGE_PLAN, GRID, {"image_grid_thw": [1, 14, 14]}, "image_grid_thw"),
        (IMAGE_PLAN, GRID, {"image_grid_thw": "14"}, "no tensor of numbers"),
        (
            IMAGE_PLAN,
            GRID,
            {"more": torch.zeros(2, device="meta")},
            "no tensor of numbers",
        ),
        (
            IMAGE_PLAN,
            GRID,
            {"more": torch.zeros(2, dtype=torch.complex64)},
            "no tensor of numbers",
        ),
        (IMAGE_PLAN, GRID, {"pixel_values": None}, "no tensor of numbers"),
        (IMAGE_PLAN, GRID, {"pixel_values": [1.0]}, "no rows of pixels"),
        (IMAGE_PLAN, GRID, {"pixel_values": torch.zeros(0, 12)}, "no rows of pixels"),
        (IMAGE_PLAN, GRID, {"pixel_values": torch.zeros(196)}, "no rows of pixels"),
        (
            IMAGE_PLAN,
            GRID,
            {"pixel_values": torch.zeros(196, 12).long()},
            "pixels of torch.int64",
        ),
        (
            IMAGE_PLAN,
            GRID,
            {"pixel_values": torch.full((196, 12), torch.inf)},
            "not finite",
        ),
        (IMAGE_PLAN, GRID, {"pixel_values": torch.zeros(192, 12)}, "196 patches"),
        (replace(IMAGE_PLAN, tokens=48), GRID, {}, "N = 48, and its item has 49"),
        (
            VIDEO_PLAN,
            VIDEO,
            grid(4, 4, 6, modality="video") | {"pixel_values_videos": None},
            "no ten",
        ),
        (
            VIDEO_PLAN,
            VIDEO,
            grid(5, 4, 6, modality="video"),
            "T = 4, and its video has 5",
        ),
        (VIDEO_PLAN, VIDEO, grid(4, 3, 8, modality="video"), "video_grid_thw"),
        (
            replace(VIDEO_PLAN, text=text(0, 10**6)),
            VIDEO,
            {},
            "behind token 1000000 of N = 24",
        ),
        (
            replace(VIDEO_PLAN, text=text(0, 6, 12)),
            VIDEO,
            {},
            "not between its T = 4 frames",
        ),
        (
            replace(VIDEO_PLAN, text=text(0, 6, 7, 12, 18)),
            VIDEO,
            {},
            "not between its T = 4 frames",
        ),
        (
            replace(VIDEO_PLAN, budget=24),
            VIDEO,
            {},
            "has text as whole, K = 24 of N = 24",
        ),
        *(
            (
                VIDEO_PLAN,
                VIDEO,
                {"second_per_grid_ts": torch.tensor(seconds)},
                "second_per_grid_ts",
            )
            for seconds in (-1.0, 1e9, float("nan"), float("inf"))
        ),
        (MARKED_PLAN, MARKED, {"grids": torch.tensor([1, 14, 14])}, "not .1, 3. whole"),
        (MARKED_PLAN, MARKED, {"grids": torch.tensor([[1, 13, 14]])}, "no tokens can"),
        (replace(WHOLE_PLAN, text=text(0, 7, 49)), MARKED, {}, "K = 49 of N = 49"),
        (TILES_PLAN, TILES, {"num_patches": torch.tensor(4)}, "num_patches"),
        (TILES_PLAN, TILES, {"num_patches": torch.tensor([5])}, "num_patches"),
        (
            TILES_PLAN,
            TILES,
            {"pixel_attention_mask": torch.ones(4, 8, 8)},
            "pixel_attention_mask",
        ),
        (replace(TILES_PLAN, text=text(46)), TILES, {}, "behind token 46 of N = 45"),
        *(
            (IMAGE_PLAN, SIZED, {"image_sizes": torch.tensor(size)}, "image_sizes")
            for size in ([224], [0, 224], [-1, -1], [2**40, 1], [224.0, 168.0])
        ),
        *(
            (IMAGE_PLAN, PLACES, places(*pairs), "pixel_position_ids")
            for pairs in (
                ((0, 0), (1, 0), (0, 1), (1, 1)),
                ((0, 0), (1, 0), (0, 1), (0, 1), (-1, -1)),
                ((0, 0), (1, 0), (0, 1), (10**6, 10**6), (-1, -1)),
                ((0, 0), (1, 0), (0, 1), (-2, 1), (-1, -1)),
                ((-1, -1),) * 5,
            )
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    plan: ItemPlan, fields: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    modality = "video" if plan.frames else "image"
    with pytest.raises(RequestError, match=problem):
        check_inputs(plan, modality, {**fields, **changes}, None)


def test_an_item_has_pixels_of_its_modality_alone() -> None:
    video = {
        name: value for name, value in VIDEO.items() if name != "pixel_values_videos"
    }
    for plan, modality, fields in (
        (VIDEO_PLAN, "video", video),
        (VIDEO_PLAN, "video", {**video, **GRID}),
        (VIDEO_PLAN, "video", {**VIDEO, **GRID}),
        (IMAGE_PLAN, "image", VIDEO),
        (IMAGE_PLAN, "image", {VIDEO_TILES: torch.tensor(3)}),
        (IMAGE_PLAN, "audio", {}),
    ):
        with pytest.raises(RequestError, match=f"is of '{modality}' with the pixels"):
            check_inputs(plan, modality, fields, None)
