"""VisionZip: keep the tokens that [CLS] attends to, and merge the rest into evenly spaced ones.

Source: Yang et al., "VisionZip" (CVPR 2025), and its published code, which adds the mean of the
merged tokens to their target where the paper averages all of them.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vllm_autoprune.base_policies.tile_merging import TileRows, merge_by_tile, native_by_tile
from vllm_autoprune.errors import SelectionError
from vllm_autoprune.ops.rowwise import (
    gather_rows,
    indices_from_mask,
    mask_from_indices,
    rank_descending,
)
from vllm_autoprune.ops.similarity import matmul_each
from vllm_autoprune.tpdsl.base_policy import (
    PolicyParams,
    PublishedSelection,
    ReferenceSelection,
    base_policy,
)
from vllm_autoprune.tpdsl.tokens import TileGroup, VisualTokens


class _VisionZipParams(PolicyParams):
    """Parameters of VisionZip."""

    contextual: int | None = Field(
        None,
        ge=0,
        le=640,
        description="rows per tile that others are merged into; null: 10 of 64, at least one",
    )
    patch_only: bool = Field(
        True, description="keep one more patch instead of the [CLS] row of the published code"
    )

    def split(self, budget: int) -> tuple[int, int]:
        """Number of dominant (at least one) and contextual rows of a tile with this budget."""
        wanted = max(1, 10 * budget // 64) if self.contextual is None else self.contextual
        contextual = min(wanted, budget - 1)
        return budget - contextual, contextual


def _native(params: _VisionZipParams, tokens: VisualTokens, budget: int) -> PublishedSelection:
    """Per tile: [CLS] row, dominant patches in raster order, contextual rows."""
    share = budget // tokens.grid.tiles
    dominant, contextual = params.split(share)
    group = TileGroup(0, tokens.grid.tiles, share)
    top, targets, merged = _zip(tokens, group, dominant - 1, contextual)
    cls = _cls(tokens, group)
    patches = tokens.by_tile(tokens.require_tower().patches)

    def run(tile: int) -> tuple[Tensor, Tensor]:
        kept = top[tile].sort().values
        indices = torch.cat([kept.new_full((1,), -1), kept, targets[tile]])
        return indices, torch.cat([cls[tile], patches[tile, kept], merged[tile]])

    return native_by_tile(tokens, run)


@base_policy(_VisionZipParams, needs=frozenset({"cls_attention", "tower"}), native=_native)
def visionzip(params: _VisionZipParams, tokens: VisualTokens, budget: int) -> ReferenceSelection:
    """Patches with most attention from [CLS], then evenly spaced ones with the rest merged in."""

    def run(group: TileGroup) -> TileRows:
        dominant, contextual = params.split(group.share)
        # With a single dominant row, keep a patch: [CLS] alone would leave no token.
        by_cls = not params.patch_only and dominant > 1
        top, targets, merged = _zip(tokens, group, dominant - by_cls, contextual)
        extra = _cls(tokens, group) if by_cls else merged[:, :0]
        return TileRows(torch.cat([top, targets], dim=1), merged, extra)

    return merge_by_tile(tokens, budget, run)


def _zip(
    tokens: VisualTokens, group: TileGroup, dominant: int, contextual: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Dominant picks ``(R, dominant)``, contextual targets ``(R, contextual)`` and their rows.

    Computed in the dtype of the tower, as published: in half precision ties between targets are
    common, and the first target wins.
    """
    tower = tokens.require_tower()
    patches = group.of(tower.patches, tokens)
    top = rank_descending(group.of(tokens.require_cls_attention(), tokens))[:, :dominant]
    kept = mask_from_indices(top, patches.shape[1])
    remaining = patches.shape[1] - dominant
    if contextual == 0:
        return top, top[:, :0], patches[:, :0]
    step = max(1, remaining // contextual)
    targets = indices_from_mask(~kept, remaining)[:, : contextual * step : step]
    sources = indices_from_mask(
        ~(kept | mask_from_indices(targets, patches.shape[1])), remaining - contextual
    )

    keys = group.of(tower.keys, tokens)
    unit = keys / keys.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(keys.dtype).tiny)
    towards = gather_rows(unit, targets).transpose(1, 2)
    nearest = matmul_each(gather_rows(unit, sources), towards).argmax(dim=2)
    members = torch.zeros(*nearest.shape, contextual, dtype=patches.dtype, device=patches.device)
    members.scatter_(2, nearest[:, :, None], 1.0)
    total = matmul_each(members.transpose(1, 2), gather_rows(patches, sources))
    mean = total / members.sum(dim=1).clamp_min(1)[:, :, None]
    return top, targets, gather_rows(patches, targets) + mean


def _cls(tokens: VisualTokens, group: TileGroup) -> Tensor:
    """[CLS] row of each tile ``(R, 1, Dv)``; raises :class:`SelectionError` if there is none."""
    cls = tokens.require_tower().cls
    if cls is None:
        raise SelectionError("this vision tower has no [CLS] token: use VisionZip with patch_only")
    return cls.narrow(1, group.start, group.tiles).flatten(0, 1)[:, None]
