"""What an engine of this process does: rows that are kept, positions that its model is given.

Knows nothing about what is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

from vllm_autoprune.serving.shared.plan import ItemPlan
from vllm_autoprune.serving.worker.batch import SelectionContext, prune_images
from vllm_autoprune.serving.worker.features import ImageFeatures


class Witness:
    """Everything seen since it was last asked."""

    def __init__(self) -> None:
        self._positions: list[Tensor] = []
        self.places: list[list[int]] = []

    def attend(self, layer: nn.Module) -> None:
        """Note the positions that a language model's first layer is given.

        The layer, because vLLM calls the model itself around its hooks.
        """
        layer.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, layer: nn.Module, given: Sequence[Tensor], named: Mapping[str, Tensor]) -> None:
        positions = named["positions"] if "positions" in named else given[0]
        self._positions.append(positions.clone())

    def positions(self, length: int, last: bool = False) -> list[list[int]]:
        """Of the first or last ``length`` tokens computed, one row an axis; forgets them."""
        joined = torch.cat(self._positions, dim=-1)
        self._positions.clear()
        axes = joined.reshape(-1, joined.shape[-1])
        return [list(map(int, row)) for row in (axes[:, -length:] if last else axes[:, :length])]

    @contextmanager
    def of_rows(self) -> Iterator[None]:
        """Note, for every image, which of its unpruned rows each row is."""

        def noted(
            context: SelectionContext,
            plans: Sequence[ItemPlan],
            images: Sequence[ImageFeatures],
        ) -> list[Tensor]:
            made = prune_images(context, plans, images)
            for image, rows in zip(images, made, strict=True):
                same = (rows[:, None] == image.rows()[None]).all(dim=2).to(torch.int8)
                place = torch.where(same.any(dim=1), same.argmax(dim=1), -1)
                self.places.append(list(map(int, place)))
            return made

        with patch("vllm_autoprune.serving.models.pruned_model.prune_images", noted):
            yield
