"""Positions with one axis: kept tokens stand at their positions in the unpruned prompt.

Runners keep two rows of positions: the position of each token, and the position at which the rows
of its image begin, so that placing a token repeatedly has the same result. For a token without a
row the second number is negative, and encodes the position at which decoding continues::

    whole     [text 0 1][image 2 3 4 5 6 7 8 9][text 10 11]
    pruned    [text 0 1][      4     7       ][text 10 11]
    second   [    -13..][      2     2       ][    -13   ]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from vllm_autoprune.serving.models.placed_model import PlacedModel, match_items
from vllm_autoprune.serving.plan import ItemPlan
from vllm_autoprune.serving.worker.rows import decode_offsets, match_rows

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange


class PrunedLine(PlacedModel):
    """Mixin for stock classes whose positions have one axis."""

    autoprune_overrides: ClassVar[tuple[str, ...]] = ("forward",)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        *args: object,
        **kwargs: object,
    ) -> Any:
        """As stock, with the first row of positions only."""
        if positions.dim() == 2:
            positions = positions[0]
        return super().forward(input_ids, positions, *args, **kwargs)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Positions of the prompt with whole images; no stock class here has this method."""
        if self.autoprune is None:  # without a tower there are no images
            return self.autoprune_consecutive(len(input_tokens)), 0
        return super().get_mrope_input_positions(input_tokens, mm_features)

    def autoprune_consecutive(self, length: int) -> Tensor:
        """Positions ``(2, L)`` of tokens that follow each other."""
        return torch.stack(
            [torch.arange(length), torch.full((length,), _mark_end(length))]
        )

    def autoprune_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """Positions ``(2, L)`` of the prompt with whole images."""
        plans = {
            i: self.autoprune_read_plan(feature)
            for i, feature in enumerate(mm_features)
        }
        places = [feature.mm_position for feature in mm_features]
        return lay_on_line(len(input_tokens), places, plans)

    def autoprune_place(
        self, ids: Tensor, positions: Tensor, channels: Sequence[Tensor], computed: int
    ) -> Tensor:
        """Set the positions of the image tokens of one prefill step in ``(2, L)``."""
        (offsets,), is_set = decode_offsets(
            [part.to(positions.device) for part in channels]
        )
        selected, row = match_rows(positions[1] >= 0, computed, len(is_set))
        placed = torch.where(
            selected & is_set[row], positions[1] + offsets[row], positions[0]
        )
        return torch.stack([placed, positions[1]])

    def autoprune_delta(self, positions: Tensor) -> int:
        """The delta of the prompt's positions, from the mark of tokens without rows."""
        # Model Runner V1 asks in every step of a request; most prompts begin or end with text.
        mark = min(int(positions[1, 0]), int(positions[1, -1]))
        if mark >= 0:
            mark = int(positions[1].min())
        end = int(positions[0].max()) + 1 if mark >= 0 else _mark_end(mark)
        return end - positions.shape[1]


def _mark_end(end: int) -> int:
    """Second number of tokens without rows, which encodes the position where decoding continues.

    It is its own inverse.
    """
    return -1 - end


def lay_on_line(
    length: int,
    places: Sequence[PlaceholderRange],
    plans: Mapping[int, ItemPlan | None],
) -> tuple[Tensor, int]:
    """Positions ``(2, L)`` of a prompt of L tokens with whole images, and their delta.

    The delta is added to the index of a generated token to get its position. ``places`` are the
    placeholders of the prompt's items. Until it is known which tokens are kept, all rows of a
    placed item stand at the position where their image begins.
    """
    positions = torch.arange(length)
    beside = torch.full((length,), -1)
    order = sorted(range(len(places)), key=lambda i: places[i].offset)
    placed = {
        number: plan
        for number, i in enumerate(order)
        if (plan := plans[i]) is not None and plan.moves
    }
    firsts = match_items(placed)
    starts = dict[int, int]()
    surplus = 0
    for number, i in enumerate(order):
        at = _find_rows(places[i])
        plan = placed.get(number)
        if plan is None:
            beside[at] = positions[at]
            continue
        start = int(positions[at[0]])
        span = plan.tokens + len(plan.text)
        if number in firsts:
            start = starts[firsts[number]]
            span = 0
        starts[number] = start
        positions[at] = beside[at] = start
        positions[int(at[-1]) + 1 :] += span - len(at)
        surplus += span - len(at)
    beside = beside.where(beside >= 0, _mark_end(length + surplus))
    return torch.stack([positions, beside]), surplus


def _find_rows(place: PlaceholderRange) -> Tensor:
    """The prompt tokens ``(K,)`` that are rows of an item, without its text."""
    rows = torch.arange(place.offset, place.offset + place.length)
    return rows if place.is_embed is None else rows[place.is_embed]
