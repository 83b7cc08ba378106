"""Models that make of an image the contiguous tokens of one grid, with a vision tower and a merger.

Each family of such models is a subclass of :class:`GridVision` that names the differences: the
tower, its merger and attention, the fields of inputs, and the arithmetic of its processor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from vllm.model_executor.models.vision import run_dp_sharded_mrope_vision_model

from vllm_autoprune.serving.api.placeholders import Placeholders, TokenCount
from vllm_autoprune.serving.api.positions import ItemFields, ItemSize
from vllm_autoprune.serving.inputs import (
    CELLS_FIELD,
    CUT_FIELD,
    FRAME_SECONDS,
    VIDEO_GRID,
    VIDEO_PIXELS,
    count_patches,
)
from vllm_autoprune.serving.models.cells import CellGrid, CellTower
from vllm_autoprune.serving.models.cut_tower import Cut
from vllm_autoprune.serving.models.line import PrunedLine
from vllm_autoprune.serving.models.mrope import (
    GridLayout,
    PrunedMRope,
    position_channels,
    set_times,
)
from vllm_autoprune.serving.models.pruned_model import PrunedModel, prune_class
from vllm_autoprune.serving.models.vision import EncoderInputs, ImageInputs, ModelImage
from vllm_autoprune.serving.worker.batch import ModelParts
from vllm_autoprune.serving.worker.features import (
    ImageFeatures,
    Region,
    Signal,
    Signals,
)
from vllm_autoprune.serving.worker.tower_hooks import Merger
from vllm_autoprune.tpdsl.tokens import Grid

if TYPE_CHECKING:
    from vllm.multimodal.parse import ImageSize


def _frame_time(vision_config: Any, seconds: float, frame: int) -> int:
    """Position in time of a frame, with ``seconds`` between frames, in models like Qwen2-VL."""
    factor = seconds * getattr(vision_config, "tokens_per_second", 1.0)
    return int(frame * factor)


class _EncodedCells(NamedTuple):
    """What a tower makes of the cells of images or videos."""

    rows: Sequence[Tensor]
    """Rows ``(M, D)`` of each."""
    order: Tensor | None = None
    """Raster order of all tokens within the tower; None if unknown, or the same."""
    remaining: Tensor | None = None
    """Indices, among all cells of all images, of those that have not left the tower; None if none
    have left."""
    counts: Sequence[int] = ()
    """Number of cells with which each image starts, if some have left."""

    def split_places(self) -> list[Tensor | None]:
        """:attr:`remaining` of each image, among its own cells; None for one that keeps all."""
        if self.remaining is None:
            return [None] * len(self.rows)
        parts = self.remaining.split([len(rows) for rows in self.rows])
        starts = accumulate([0, *self.counts])
        return [
            part - start if len(part) < count else None
            for part, start, count in zip(parts, starts, self.counts, strict=False)
        ]


class GridVision(GridLayout):
    """Vision side of such a model. A row holds D channels of its token, then the deepstack levels.

    Under M-RoPE, channels with the token's position follow.
    """

    tower_name: ClassVar[str] = "visual"
    layers = "visual.blocks"
    attention_name = "attn.attn"
    merger_name: ClassVar[str]
    """Dotted name of the module that all patches enter before they are merged."""
    joined: ClassVar[bool] = False
    """Whether the patches of a token enter that module as one row."""
    cells: ClassVar[bool] = True
    """Whether the patches of a token are consecutive in the tower; otherwise they are in raster
    order."""
    merger_cells: ClassVar[bool] = True
    """Whether the patches of a token are consecutive in the merger; otherwise in raster order."""
    joined_images: ClassVar[bool] = True
    """Whether the patches of all images of a call come in one tensor."""
    ordered: ClassVar[bool] = False
    """Whether rows stay in the order of their places, in whatever order tokens were chosen."""
    resizes: ClassVar[bool] = True
    """Whether the processor shrinks images as :meth:`shrink_to_budget` computes."""

    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images, or videos, of one call."""
        if VIDEO_PIXELS in inputs:
            return self._split_videos(inputs)
        grids = self.find_grids(inputs)
        pixels = inputs["pixel_values"]
        no_anchors = torch.zeros(0, dtype=torch.int32)
        anchors = inputs.get(CELLS_FIELD, [no_anchors] * len(grids))
        patches = [count_patches(*image) for image in zip(anchors, grids, strict=True)]
        if self.joined_images:
            assert isinstance(pixels, Tensor)
            pixels = [*pixels.split(patches)]
        images = []
        for i, count in enumerate(patches):
            fields = {"pixel_values": pixels[i], self.grids: grids[i]}
            if len(anchors[i]):
                fields[CELLS_FIELD] = anchors[i]
            images.append(ModelImage(fields, count // self.merge**2))
        return images

    def _split_videos(self, inputs: EncoderInputs) -> list[ModelImage]:
        pixels = inputs[VIDEO_PIXELS]
        grids = inputs[VIDEO_GRID]
        assert isinstance(pixels, Tensor) and isinstance(grids, Tensor)
        videos = []
        for i, part in enumerate(pixels.split(grids.prod(-1).tolist())):
            fields = {VIDEO_PIXELS: part, VIDEO_GRID: grids[i]}
            if FRAME_SECONDS in inputs:
                fields[FRAME_SECONDS] = inputs[FRAME_SECONDS][i]
            videos.append(ModelImage(fields, self.count(grids[i])))
        return videos

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
        if self.graphs is not None and self.graphs.is_captured():
            return self.graphs.execute(inputs)
        checked = self._model._parse_and_validate_image_input(**inputs)
        rows: Sequence[Tensor] = self._model._process_image_input(checked)
        return rows

    def tower_order(self, grids: Tensor) -> Tensor | None:
        """Indices ``(N,)`` in the tower of tokens in raster order; None if that is its order."""
        return None

    def find_merger(self) -> Merger:
        """The patch merger, before which norms are taken too."""
        module = attrgetter(self.merger_name)(self._model)
        return Merger(
            module, self.merge**2 if self.merger_cells else 1, module, self.joined
        )

    def merge_patches(self, patches: Tensor, grids: Tensor) -> Tensor:
        """Mean of the patches of each token, ``(P, ...) -> (N, ...)``."""
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

    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images or videos; tokens are selected by the first D channels of each row."""
        are_videos = VIDEO_PIXELS in images[0]
        name = VIDEO_GRID if are_videos else self.grids
        grids = torch.stack([image[name] for image in images])
        with self.recording():
            encoded = self._run_tower(images, grids)
        rows = encoded.rows
        lengths = [len(part) * self.merge**2 for part in rows]
        if are_videos:  # each frame is a sequence of its own
            frames = grids[:, 1:].prod(dim=1).repeat_interleave(grids[:, 0])
            lengths = frames.tolist()
        signals = self._take_signals(grids, lengths, encoded)
        counts = [len(part) for part in rows]
        split = {signal: part.split(counts) for signal, part in signals.items()}
        places = encoded.split_places()
        features = []
        for i, (image, grid_of_image) in enumerate(
            zip(images, grids.tolist(), strict=True)
        ):
            # Copied, because a view would keep the whole batch alive in the cache.
            of_image: dict[Signal, Tensor] = {
                signal: parts[i].clone() for signal, parts in split.items()
            }
            region = self._make_region(
                image, grid_of_image, rows[i], of_image, places[i]
            )
            features.append(ImageFeatures((region,)))
        return features

    def _run_tower(self, images: Sequence[ImageInputs], grids: Tensor) -> _EncodedCells:
        """Rows ``(N, D)`` of each image or video, and the tower's order of tokens, if known."""
        if VIDEO_PIXELS in images[0]:
            pixels = torch.cat([image[VIDEO_PIXELS] for image in images])
            inputs = {VIDEO_PIXELS: pixels, VIDEO_GRID: grids}
            checked = self._model._parse_and_validate_video_input(**inputs)
            return _EncodedCells(self._model._process_video_input(checked))
        parts = [image["pixel_values"] for image in images]
        anchors = [image.get(CELLS_FIELD) for image in images]
        cuts = [
            Cut(*image[CUT_FIELD].tolist()) if CUT_FIELD in image else None
            for image in images
        ]
        if any(of_image is not None for of_image in (*anchors, *cuts)):
            return self._encode_cells(torch.cat(parts), grids, anchors, cuts)
        rows = self.rows(torch.cat(parts) if self.joined_images else parts, grids)
        return _EncodedCells(rows)

    def _take_signals(
        self, grids: Tensor, lengths: Sequence[int], encoded: _EncodedCells
    ) -> dict[Signal, Tensor]:
        """What the hooks have read of all tokens, in raster order.

        ``lengths`` are the numbers of patches of each sequence in the tower's attention.
        """
        signals = {signal: hook.take() for signal, hook in self.merger.items()}
        if self.attention is not None:
            received = self.attention.take().received(lengths)
            signals["cls_attention"] = torch.cat(received)
        if not signals:
            return signals
        for signal, part in signals.items():
            if len(part) == sum(lengths):
                signals[signal] = self.merge_patches(part, grids)
        remaining = encoded.remaining
        for signal, part in signals.items():
            # Read at a layer before cells left the tower.
            if remaining is not None and len(part) > len(remaining):
                signals[signal] = part[remaining]
        order = encoded.order
        order = self.tower_order(grids) if order is None else order
        if order is None:
            return signals
        return {signal: part[order] for signal, part in signals.items()}

    def _make_region(
        self,
        image: ImageInputs,
        grid_of_patches: Sequence[int],
        rows: Tensor,
        signals: Signals,
        remaining: Tensor | None,
    ) -> Region:
        """The tokens of one image or video ``(N, D + E)``, with their positions under M-RoPE.

        ``remaining`` ``(N,)`` are the cells that have not left the tower, if some have.
        """
        *frames, height, width = grid_of_patches
        anchors = image.get(CELLS_FIELD)
        grid = Grid(
            height // self.merge,
            width // self.merge,
            anchors=b"" if anchors is None else anchors.numpy().tobytes(),
            remaining=0 if remaining is None else len(remaining),
        )
        if VIDEO_PIXELS in image:
            grid = replace(grid, tiles=frames[0], video=True)
        channels = [rows[:, self._width :]]
        if isinstance(self._model, PrunedMRope) and self._model.autoprune_axes:
            times = self._frame_times(image, grid.tiles)
            places = position_channels(grid.height, grid.width, rows.device, times)
            places = grid.at_encoded(places.T).T
            places = places if remaining is None else places[remaining]
            channels.append(places.to(rows.dtype))
        return Region(
            grid,
            rows[:, : self._width].clone(),
            signals,
            extra_channels=torch.cat(channels, dim=1),
            order=torch.arange(grid.tokens, device=rows.device)
            if self.ordered
            else None,
            places=remaining,
        )

    def model_parts(self) -> ModelParts:
        """Parts of the model that policies read, with frame positions if text separates frames."""
        parts = super().model_parts()
        return replace(parts, set_times=set_times) if self.dates_frames else parts

    def _frame_times(self, image: ImageInputs, frames: int) -> list[int]:
        """Position in time of each frame, as ``get_mrope_input_positions`` computes it.

        Positions of frames after text are set later, when the text is known. An image is one frame.
        """
        if self.dates_frames:
            return [0] * frames
        seconds = image[FRAME_SECONDS].item() if FRAME_SECONDS in image else 1.0
        vision = self._model.config.vision_config
        return [_frame_time(vision, seconds, frame) for frame in range(frames)]

    def _encode_cells(
        self,
        pixels: Tensor,
        grids: Tensor,
        anchors: Sequence[Tensor | None],
        cuts: Sequence[Cut | None],
    ) -> _EncodedCells:
        """Rows ``(M, D)`` of each image, and the raster order of all tokens within the tower.

        For an image that is encoded whole, all cells are kept.
        """
        tower = CellTower(self._model.visual)
        cells = []
        for grid, of_image, cut in zip(grids, anchors, cuts, strict=True):
            kept = torch.arange(self.count(grid))
            if of_image is not None:
                kept = kept[of_image == kept]
            cells.append(CellGrid(grid.tolist(), kept, self.merge, cut))
        if self._model.use_data_parallel:
            rows = run_dp_sharded_mrope_vision_model(
                tower, pixels, cells, rope_type="rope_3d"
            )
            return _EncodedCells(rows)  # policies read nothing inside such a tower
        rows = tower(pixels, cells)
        counts = [len(grid.kept) for grid in cells]
        if tower.cut is None:
            return _EncodedCells(rows.split(counts), tower.order)
        parts = rows.split(tower.cut.counts)
        return _EncodedCells(parts, tower.order, tower.cut.cells, counts)

    # Arithmetic of the processor, used in the API server.

    @staticmethod
    def count_tokens(
        info: Any, size: ImageSize, kwargs: Mapping[str, object]
    ) -> TokenCount:
        """Number of merged tokens of an image, resized as the processor resizes it."""
        tokens = info.get_num_image_tokens(
            image_width=size.width,
            image_height=size.height,
            image_processor=info.get_image_processor(**kwargs),
            mm_kwargs=kwargs,
        )
        return TokenCount(tokens)

    @classmethod
    def count_largest(cls, info: Any) -> TokenCount:
        """Number of merged tokens of the image that has most of them."""
        return TokenCount(info.get_max_image_tokens())

    @classmethod
    def measure(cls, info: Any, item: ItemFields) -> ItemSize:
        """The span of a whole image or video, and the number of a video's frames.

        The span is the number of positions that ``get_mrope_input_positions`` gives. It is None for
        videos that are never pruned, and for an item without a grid.
        """
        vision = info.get_hf_config().vision_config
        field = item.get(
            VIDEO_GRID if cls.video_token and VIDEO_GRID in item else cls.grids
        )
        grid = None if field is None else field.data
        if not isinstance(grid, Tensor) or grid.shape != (3,):
            return ItemSize()
        times, *sides = grid.tolist()
        side = max(sides) // vision.spatial_merge_size
        frames = times if VIDEO_GRID in item else 0
        if not info.ctx.model_config.uses_mrope:
            return ItemSize(frames=frames)
        if cls.dates_frames:
            return ItemSize(times * side, frames)
        seconds = float(item[FRAME_SECONDS].data) if FRAME_SECONDS in item else 1.0
        return ItemSize(max(_frame_time(vision, seconds, times - 1) + 1, side), frames)

    @staticmethod
    def shrink_to_budget(info: Any, size: ImageSize, budget: int) -> ImageSize:
        """Largest size of an image with at most K merged tokens, by the processor's arithmetic.

        That arithmetic leaves a very long and narrow image more than K tokens; the longer side of
        such an image is then shortened further.
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
    stock: Any, vision: type[GridVision], merger: str = "", *, mrope: bool = True
) -> type[PrunedModel]:
    """The pruned form of one of vLLM's classes; ``merger`` is the class of its patch merger.

    ``mrope`` is False if no checkpoint of a class that can have M-RoPE has it.
    """
    calls: tuple[str, ...] = ("_parse_and_validate_image_input", "_process_image_input")
    # A class has the first method if it has M-RoPE, and the second if vLLM can prune its videos.
    of_mrope = ("get_mrope_input_positions", "recompute_mrope_positions")
    positions = tuple(name for name in of_mrope if mrope and hasattr(stock, name))
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
