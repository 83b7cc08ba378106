"""Observer of an engine in this process: rows that it keeps, positions that its model receives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vllm_autoprune.serving.models import pruned_model
from vllm_autoprune.serving.shared.plan import ItemPlan
from vllm_autoprune.serving.shared.served_state import ServedState
from vllm_autoprune.serving.worker.batch import prune_images
from vllm_autoprune.serving.worker.features import ImageFeatures


class EngineObserver:
    """Positions, kept rows and features of images since they were last read."""

    def __init__(self) -> None:
        self._positions: list[Tensor] = []
        self.kept_rows: list[list[int]] = []
        self.features: list[ImageFeatures] = []

    def record_positions(self, layer: nn.Module) -> None:
        """Record the positions that the language model's first layer receives.

        The layer and not the model, because vLLM calls the model without running its hooks.
        """
        layer.register_forward_pre_hook(self._append_positions, with_kwargs=True)

    def _append_positions(
        self, layer: nn.Module, arguments: Sequence[Tensor], keywords: Mapping[str, Tensor]
    ) -> None:
        positions = keywords["positions"] if "positions" in keywords else arguments[0]
        self._positions.append(positions.clone())

    def take_positions(self, length: int, last: bool = False) -> list[list[int]]:
        """Take positions of the first or last ``length`` tokens, one row for each axis."""
        joined = torch.cat(self._positions, dim=-1)
        self._positions.clear()
        axes = joined.reshape(-1, joined.shape[-1])
        return [list(map(int, row)) for row in (axes[:, -length:] if last else axes[:, :length])]

    @contextmanager
    def recording_rows(self) -> Iterator[None]:
        """Record the features of images, and which of its unpruned rows each row of one is."""

        def prune_and_record(
            served: ServedState,
            plans: Sequence[ItemPlan],
            images: Sequence[ImageFeatures],
            *rest: object,
        ) -> list[Tensor]:
            selected = prune_images(served, plans, images, *rest)  # type: ignore[arg-type]
            for image, rows in zip(images, selected, strict=True):
                same = (rows[:, None] == image.rows()[None]).all(dim=2).to(torch.int8)
                place = torch.where(same.any(dim=1), same.argmax(dim=1), -1)
                self.kept_rows.append(list(map(int, place)))
                self.features.append(image)
            return selected

        pruned_model.prune_images = prune_and_record  # type: ignore[attr-defined, assignment]
        try:
            yield
        finally:
            pruned_model.prune_images = prune_images  # type: ignore[attr-defined]
