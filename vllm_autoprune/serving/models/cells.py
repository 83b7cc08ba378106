"""A vision tower that encodes only some cells of an image, at their positions in the whole image.

vLLM's towers of this kind take everything that depends on a grid as ``encoder_metadata``, and
everything else from the number of rows. So kept cells are encoded by passing their part of the
metadata of the whole images, and no forward is patched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import MMEncoderAttention

from vllm_autoprune.ops.rowwise import upload
from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.models.cut_tower import Cut, CutTower

_BY_PATCH = ("pos_embeds", "rotary_pos_emb_cos", "rotary_pos_emb_sin")
"""Metadata with one row per patch, in which the patches of a cell are consecutive."""

Metadata = dict[str, Tensor | None]


class CellGrid(list[int]):
    """The grid of an image and its kept cells ``(M,)``, of which some leave the tower by ``cut``.

    As a list it is a grid of M cells: vLLM distributes images over data-parallel ranks by the
    number of their patches, and passes their grids on unchanged.
    """

    def __init__(
        self, grid: Sequence[int], kept: Tensor, merge: int, cut: Cut | None = None
    ) -> None:
        super().__init__([1, merge, merge * len(kept)])
        self.grid = list(grid)
        self.kept = kept
        self.cut = cut


@depends_on(
    "vllm.model_executor.layers.attention:MMEncoderAttention",
    "compute_max_seqlen",
    "maybe_compute_seq_lens",
    "maybe_recompute_cu_seqlens",
)
class CellTower:
    """Replacement of vLLM's tower that is called with pixel rows and grids of kept cells."""

    def __init__(self, tower: Any) -> None:
        self._tower = tower
        self.spatial_merge_size: int = tower.spatial_merge_size
        self.out_hidden_size: int = getattr(tower, "out_hidden_size", 0)
        self.order: Tensor | None = None
        """Raster order of the tokens within the tower at the last call; None if the tower uses that
        order."""
        self.cut: CutTower | None = None
        """Cells that have left the tower at the last call; None if none have."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the tower."""
        parameters: Iterator[nn.Parameter] = self._tower.parameters()
        return parameters

    def __call__(self, pixels: Tensor, grids: Sequence[CellGrid]) -> Tensor:
        """Rows ``(M, D)`` of the kept cells of all images, in raster order.

        Cells that leave the tower have none.
        """
        metadata = self.metadata(grids)
        self.order = metadata.get("reverse_indices")
        encode = partial(self._tower, pixels, None, encoder_metadata=metadata)
        self.cut = None
        cuts = [grid.cut for grid in grids]
        if any(cuts):
            counts = [len(grid.kept) for grid in grids]
            self.cut = CutTower(self._tower, counts, cuts, self._describe_sequences)
            return self.cut.run(encode)
        rows: Tensor = encode()
        return rows

    def metadata(self, grids: Sequence[CellGrid]) -> Metadata:
        """The tower's own metadata of the whole images, reduced to their kept cells."""
        tower = self._tower
        unit = self.spatial_merge_size**2
        full: Metadata = tower.prepare_encoder_metadata([grid.grid for grid in grids])
        sizes = [prod(grid.grid) // unit for grid in grids]
        starts = accumulate([0, *sizes[:-1]])
        # Indices of kept cells among the cells of all images, in the order of the tower.
        cells = torch.cat(
            [grid.kept + start for grid, start in zip(grids, starts, strict=True)]
        )
        counts = [unit * len(grid.kept) for grid in grids]
        if "window_index" in full:
            metadata, cells = self._cut_windows(grids, cells, sum(sizes))
            metadata |= self._sequences(counts, "_full")
        else:
            metadata = self._describe_sequences(counts)
        patches = upload(
            (cells[:, None] * unit + torch.arange(unit)).flatten(), tower.device
        )
        by_patch = {name: full[name] for name in _BY_PATCH if name in full}
        return metadata | {n: v[patches] for n, v in by_patch.items() if v is not None}

    def _describe_sequences(self, counts: Sequence[int]) -> Metadata:
        """Metadata of sequences with these patch counts, in a tower without windows."""
        tower = self._tower
        if not hasattr(tower, "compute_attn_mask_seqlen"):
            return self._sequences(counts)
        # Qwen2-VL's tower
        edges = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        longest = tower.compute_attn_mask_seqlen(edges)
        return {"cu_seqlens": upload(edges, tower.device), "max_seqlen": longest}

    def _sequences(self, counts: Sequence[int], suffix: str = "") -> Metadata:
        """Metadata of sequences with these patch counts, in the form of the attention backend."""
        tower = self._tower
        kind = MMEncoderAttention
        backend = tower.attn_backend
        device = tower.device
        edges = numpy.array([0, *accumulate(counts)], dtype=numpy.int32)
        padded = getattr(tower, "fp8_padded_hidden_size", None)  # GLM's tower has none
        sizes = tower.hidden_size, tower.tp_size, device, padded
        name = "cu_window_seqlens" if suffix == "_window" else "cu_seqlens"
        longest = torch.tensor(
            kind.compute_max_seqlen(backend, edges), dtype=torch.int32
        )
        return {
            name: kind.maybe_recompute_cu_seqlens(backend, edges, *sizes),
            f"max_seqlen{suffix}": longest,
            f"sequence_lengths{suffix}": kind.maybe_compute_seq_lens(
                backend, edges, device
            ),
        }

    def _cut_windows(
        self, grids: Sequence[CellGrid], cells: Tensor, total: int
    ) -> tuple[Metadata, Tensor]:
        """Windows without their dropped cells (Qwen2.5-VL), leaving out empty windows.

        Also returns the place of each kept cell in the window order of whole images, by which the
        tower indexes its rotary embeddings.
        """
        tower = self._tower
        unit = self.spatial_merge_size**2
        kept = torch.zeros(total, dtype=torch.bool)
        kept[cells] = True
        windows = []
        edges = [torch.zeros(1, dtype=torch.int64)]
        start = 0
        for grid in grids:
            _, _, window, ends, _ = tower.get_rope_by_thw(*grid.grid)
            windows.append(window + start)
            edges.append(ends // unit + start)
            start += len(window)
        window = torch.cat(windows)  # for whole images: the cell at each place
        places = kept[window].nonzero()[:, 0]
        before = torch.cat([torch.zeros(1, dtype=torch.int64), kept[window].cumsum(0)])
        counts = before[torch.cat(edges)].diff()
        index = (kept.cumsum(0) - 1)[window[places]]
        windows_left = [unit * count for count in counts.tolist() if count]
        metadata = self._sequences(windows_left, "_window")
        metadata["window_index"] = upload(index, tower.device)
        metadata["reverse_indices"] = upload(index.argsort(), tower.device)
        return metadata, places


for _path in (
    "qwen2_vl:Qwen2VisionTransformer",
    "qwen2_5_vl:Qwen2_5_VisionTransformer",
    "qwen3_vl:Qwen3_VisionTransformer",
    "glm4_1v:Glm4vVisionTransformer",
):
    _place = f"vllm.model_executor.models.{_path}"
    depends_on(_place, "prepare_encoder_metadata", "forward")(CellTower)
