"""Models whose image is the contiguous tokens of one grid, made by a vision tower and a merger.

A family of them is a subclass of :class:`GridVision` that names what differs: the tower, its merger
and attention, the fields of inputs, and the arithmetic of its processor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from vllm.model_executor.models.vision import run_dp_sharded_mrope_vision_model

from vllm_autoprune.serving.api.layout import Placeholders, TokenCount
from vllm_autoprune.serving.api.positions import ItemFields, ItemSize
from vllm_autoprune.serving.inputs import CELLS_FIELD, count_patches
from vllm_autoprune.serving.models.cells import CellGrid, CellTower
from vllm_autoprune.serving.models.line import PrunedLine
from vllm_autoprune.serving.models.mrope import (
    VIDEO_GRIDS,
    GridLayout,
    PrunedMRope,
    position_channels,
    set_times,
)
from vllm_autoprune.serving.models.pruned_model import (
    EncoderInputs,
    ImageInputs,
    ModelImage,
    PrunedModel,
    prune_class,
)
from vllm_autoprune.serving.worker.batch import ModelParts
from vllm_autoprune.serving.worker.features import ImageFeatures, Region, Signal
from vllm_autoprune.serving.worker.tower_hooks import Merger
from vllm_autoprune.tpdsl.tokens import Grid

if TYPE_CHECKING:
    from vllm.multimodal.parse import ImageSize


_CLIPS = "pixel_values_videos"
_SECONDS = "second_per_grid_ts"
"""Fields of clips: their patches, and the time between two of their frames."""


def _frame_time(vision_config: Any, seconds: float, frame: int) -> int:
    """Position in time of a frame, where they are so many seconds apart (Qwen2-VL's kind)."""
    factor = seconds * getattr(vision_config, "tokens_per_second", 1.0)
    return int(frame * factor)


class GridVision(GridLayout):
    """Vision side of such a model. Rows are tokens of width D, then those of deepstack levels.

    Under M-RoPE the positions of tokens follow as channels of their rows.
    """

    tower_name: ClassVar[str] = "visual"
    layers = "visual.blocks"
    attention_name = "attn.attn"
    merger_name: ClassVar[str]
    """Dotted name of the module that all patches enter before they are merged."""
    joined: ClassVar[bool] = False
    """Whether the patches of a token enter it as one row."""
    cells: ClassVar[bool] = True
    """Whether the tower has the patches of a token one behind another, else in raster order."""
    merger_cells: ClassVar[bool] = True
    """Whether the merger has them so; else, too, in raster order."""
    joined_images: ClassVar[bool] = True
    """Whether the patches of all images of a call come in one tensor."""
    ordered: ClassVar[bool] = False
    """Whether rows stay in the order of their places, however their tokens were chosen."""
    resizes: ClassVar[bool] = True
    """Whether the processor shrinks images as :meth:`shrink_to_budget`."""

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images, or clips, of one call."""
        if _CLIPS in inputs:
            clip_grids = inputs[VIDEO_GRIDS]
            pixels = inputs[_CLIPS]
            assert isinstance(pixels, Tensor) and isinstance(clip_grids, Tensor)
            clips = zip(
                pixels.split(clip_grids.prod(-1).tolist()), clip_grids, strict=True
            )
            others = {name: inputs[name] for name in (_SECONDS,) if name in inputs}
            return [
                ModelImage(
                    {
                        _CLIPS: part,
                        VIDEO_GRIDS: grid,
                        **{n: o[i] for n, o in others.items()},
                    },
                    self.count(grid),
                )
                for i, (part, grid) in enumerate(clips)
            ]
        grids = self.find_grids(inputs)
        pixels = inputs["pixel_values"]
        anchors = inputs.get(
            CELLS_FIELD, [torch.zeros(0, dtype=torch.int32)] * len(grids)
        )
        patches = [count_patches(*image) for image in zip(anchors, grids, strict=True)]
        if self.joined_images:
            assert isinstance(pixels, Tensor)
            pixels = [*pixels.split(patches)]
        images = []
        for part, grid, of_image, count in zip(
            pixels, grids, anchors, patches, strict=True
        ):
            fields = {"pixel_values": part, self.grids: grid}
            if len(of_image):
                fields[CELLS_FIELD] = of_image
            images.append(ModelImage(fields, count // self.merge**2))
        return images

    def find_grids(self, inputs: EncoderInputs) -> Tensor:
        """The row of :attr:`grids` of each image."""
        grids = inputs[self.grids]
        assert isinstance(grids, Tensor)
        return grids

    def rows(
        self, pixels: Tensor | Sequence[Tensor], grids: Tensor
    ) -> Sequence[Tensor]:
        """Rows ``(N, D)`` of each image in raster order, as the stock model makes them."""
        inputs = {"pixel_values": pixels, self.grids: grids}
        checked = self._model._parse_and_validate_image_input(**inputs)
        rows: Sequence[Tensor] = self._model._process_image_input(checked)
        return rows

    def _clip_rows(self, pixels: Tensor, grids: Tensor) -> Sequence[Tensor]:
        """Rows ``(T n, D)`` of each clip, as the stock model makes them."""
        inputs = {_CLIPS: pixels, VIDEO_GRIDS: grids}
        checked = self._model._parse_and_validate_video_input(**inputs)
        rows: Sequence[Tensor] = self._model._process_video_input(checked)
        return rows

    def tower_order(self, grids: Tensor) -> Tensor | None:
        """Indices ``(N,)`` of all tokens in the tower, in raster order; None where they are so."""
        return None

    def find_merger(self) -> Merger:
        """The patch merger, before which norms are taken too."""
        module = attrgetter(self.merger_name)(self._model)
        return Merger(
            module, self.merge**2 if self.merger_cells else 1, module, self.joined
        )

    def merge_patches(self, patches: Tensor, grids: Tensor) -> Tensor:
        """What each token gets of its patches ``(P, ...)``: their mean, ``(N, ...)``."""
        merge = self.merge
        if not self.cells:
            images = zip(
                patches.split(grids.prod(-1).tolist()), grids.tolist(), strict=True
            )
            cells = [
                image.unflatten(0, (-1, merge, width // merge, merge)).transpose(1, 2)
                for image, (*_, width) in images
            ]
            patches = torch.cat([image.flatten(0, 3) for image in cells])
        return patches.unflatten(0, (-1, merge**2)).mean(dim=1)

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:  # noqa: C901
        """Encode images or clips; tokens are selected by the first D channels of each row."""
        are_clips = _CLIPS in images[0]
        grids = torch.stack(
            [image[VIDEO_GRIDS if are_clips else self.grids] for image in images]
        )
        pixels = [image[_CLIPS if are_clips else "pixel_values"] for image in images]
        anchors = [image.get(CELLS_FIELD) for image in images]
        tower_order = None
        with self.recording():
            if are_clips:
                rows = self._clip_rows(torch.cat(pixels), grids)
            elif any(of_image is not None for of_image in anchors):
                rows, tower_order = self._encode_cells(
                    torch.cat(pixels), grids, anchors
                )
            else:
                rows = self.rows(
                    torch.cat(pixels) if self.joined_images else pixels, grids
                )

        # What the hooks read, the tokens of each image in raster order.
        merge = self.merge
        patches = [len(rows_of_image) * merge**2 for rows_of_image in rows]
        signals = {signal: hook.take() for signal, hook in self.merger.items()}
        if self.attention is not None:
            frames = [prod(grid[1:]) for grid in grids.tolist() for _ in range(grid[0])]
            lengths = frames if are_clips else patches
            signals["cls_attention"] = torch.cat(
                self.attention.take().received(lengths)
            )
        for signal, part in signals.items():
            if len(part) == sum(patches):
                signals[signal] = self.merge_patches(part, grids)
        if tower_order is None and signals:
            tower_order = self.tower_order(grids)
        if tower_order is not None:
            signals = {signal: part[tower_order] for signal, part in signals.items()}
        sizes = [count // merge**2 for count in patches]
        split = {signal: part.split(sizes) for signal, part in signals.items()}

        features = []
        for i, (*times, height, width) in enumerate(grids.tolist()):
            of_grid = anchors[i]
            cells = b"" if of_grid is None else of_grid.numpy().tobytes()
            image_rows = rows[i]
            grid = Grid(height // merge, width // merge, anchors=cells)
            if are_clips:
                grid = replace(grid, tiles=times[0], clip=True)
            tokens = image_rows[:, : self._width].clone()
            channels = [image_rows[:, self._width :]]
            if isinstance(self._model, PrunedMRope) and self._model.autoprune_axes:
                at = self._frame_times(images[i], times[0]) if are_clips else [0]
                places = position_channels(grid.height, grid.width, tokens.device, at)
                channels.append(grid.at_tokens(places.T).T.to(tokens.dtype))
            of_image: dict[Signal, Tensor] = {
                s: parts[i].clone() for s, parts in split.items()
            }
            extra = torch.cat(channels, dim=1)
            order = (
                torch.arange(grid.tokens, device=tokens.device)
                if self.ordered
                else None
            )
            region = Region(grid, tokens, of_image, extra_channels=extra, order=order)
            features.append(ImageFeatures((region,)))
        return features

    def model_parts(self) -> ModelParts:
        """With the positions of frames, where text stands between them."""
        parts = super().model_parts()
        return replace(parts, set_times=set_times) if self.dates_frames else parts

    def _frame_times(self, clip: ImageInputs, frames: int) -> list[int]:
        """Position in time of each frame, as ``get_mrope_input_positions`` has them.

        Those that follow text are set when it is known.
        """
        if self.dates_frames:
            return [0] * frames
        seconds = clip[_SECONDS].item() if _SECONDS in clip else 1.0
        vision = self._model.config.vision_config
        return [_frame_time(vision, seconds, frame) for frame in range(frames)]

    def _encode_cells(
        self, pixels: Tensor, grids: Tensor, anchors: Sequence[Tensor | None]
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        """Rows ``(M, D)`` of each image, and raster order of all tokens within the tower.

        Images that are encoded whole have all of their cells.
        """
        tower = CellTower(self._model.visual)
        cells = []
        for grid, of_image in zip(grids, anchors, strict=True):
            kept = torch.arange(self.count(grid))
            if of_image is not None:
                kept = kept[of_image == kept]
            cells.append(CellGrid(grid.tolist(), kept, self.merge))
        if self._model.use_data_parallel:
            rows = run_dp_sharded_mrope_vision_model(
                tower, pixels, cells, rope_type="rope_3d"
            )
            return rows, None  # nothing is read inside of such a tower
        return tower(pixels, cells).split(
            [len(grid.kept) for grid in cells]
        ), tower.order

    # Arithmetic of the processor, in the API server.

    @staticmethod
    def count_tokens(
        info: Any, size: ImageSize, kwargs: Mapping[str, object]
    ) -> TokenCount:
        """Merged tokens of an image, resized as the processor resizes it."""
        tokens = info.get_num_image_tokens(
            image_width=size.width,
            image_height=size.height,
            image_processor=info.get_image_processor(**kwargs),
            mm_kwargs=kwargs,
        )
        return TokenCount(tokens)

    @classmethod
    def count_largest(cls, info: Any) -> TokenCount:
        """Merged tokens of the image that has most of them."""
        return TokenCount(info.get_max_image_tokens())

    @classmethod
    def measure(cls, info: Any, item: ItemFields) -> ItemSize:
        """Positions that ``get_mrope_input_positions`` gives a whole image or clip, and T.

        Those of clips that are never pruned are not counted, nor those of an item without a grid.
        """
        vision = info.get_hf_config().vision_config
        field = item.get(
            VIDEO_GRIDS if cls.video_token and VIDEO_GRIDS in item else cls.grids
        )
        grid = None if field is None else field.data
        if not isinstance(grid, Tensor) or grid.shape != (3,):
            return ItemSize()
        times, *sides = grid.tolist()
        side = max(sides) // vision.spatial_merge_size
        frames = times if VIDEO_GRIDS in item else 0
        if not info.ctx.model_config.uses_mrope:
            return ItemSize(frames=frames)
        if cls.dates_frames:
            return ItemSize(times * side, frames)
        seconds = float(item[_SECONDS].data) if _SECONDS in item else 1.0
        return ItemSize(max(_frame_time(vision, seconds, times - 1) + 1, side), frames)

    @staticmethod
    def shrink_to_budget(info: Any, size: ImageSize, budget: int) -> ImageSize:
        """The size that the processor's own arithmetic gives an image of at most K merged tokens.

        It leaves a very long and narrow image more than K tokens; the longer side of such an image
        is shortened further.
        """
        vision = info.get_hf_config().vision_config
        unit = vision.patch_size * vision.spatial_merge_size
        height, width = smart_resize(
            size.height,
            size.width,
            factor=unit,
            min_pixels=unit**2,
            max_pixels=budget * unit**2,
        )
        return type(size)(
            width=min(width, budget * unit), height=min(height, budget * unit)
        )


def prune_grid(
    stock: Any, vision: type[GridVision], merger: str = ""
) -> type[PrunedModel]:
    """The pruned form of one of vLLM's classes; ``merger`` is the class of its patch merger."""
    calls: tuple[str, ...] = ("_parse_and_validate_image_input", "_process_image_input")
    # A class has the first where it has M-RoPE, and the second where vLLM can prune its videos.
    of_mrope = ("get_mrope_input_positions", "recompute_mrope_positions")
    positions = tuple(name for name in of_mrope if hasattr(stock, name))
    placeholders = Placeholders(
        vision.count_tokens,
        vision.count_largest,
        lambda info: int(attrgetter(vision.image_token)(info.get_hf_config())),
        resize=vision.shrink_to_budget if vision.resizes else None,
        measure=vision.measure if positions else None,
    )
    if vision.video_token:
        calls += ("_parse_and_validate_video_input", "_process_video_input")
        placeholders = replace(
            placeholders,
            video_token=lambda info: int(
                attrgetter(vision.video_token)(info.get_hf_config())
            ),
        )
    mixin = PrunedMRope if positions else PrunedLine
    return prune_class(
        stock, placeholders, vision, mixin, methods=(*calls, *positions), merger=merger
    )
