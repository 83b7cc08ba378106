"""Cells of images that leave a vision tower with full attention after part of its layers.

vLLM's blocks take hidden states, rotary embeddings and sequence lengths. These are replaced on
their way into the first layer that only the remaining cells pass, and into every layer after it. No
forward is copied. How many cells stay is known before, so nothing waits for the device.

Blocks of a class that vLLM can compile never run forward hooks, so they are wrapped for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from vllm_autoprune.tpdsl.tower import Criterion, keep_cells

CRITERIA: tuple[Criterion, ...] = get_args(Criterion)

_ROTARY = ("rotary_pos_emb_cos", "rotary_pos_emb_sin")

Metadata = Mapping[str, Tensor | None]


class Cut(NamedTuple):
    """Cells of one image that leave the tower, as in :data:`.inputs.CUT_FIELD`."""

    remaining: int
    layer: int
    criterion: int

    @property
    def name(self) -> Criterion:
        """The criterion by name."""
        return CRITERIA[self.criterion]


class CutTower:
    """One call of a tower, of whose images some lose cells on the way.

    ``counts`` are the cells with which each image starts, and ``cuts`` what it loses.
    ``describe_sequences`` makes the tower's metadata of sequences with these patch counts.
    """

    def __init__(
        self,
        tower: Any,
        counts: Sequence[int],
        cuts: Sequence[Cut | None],
        describe_sequences: Callable[[Sequence[int]], Metadata],
    ) -> None:
        self._tower = tower
        self._unit = int(tower.spatial_merge_size) ** 2
        self._describe_sequences = describe_sequences
        self._cuts = cuts
        self._metadata: dict[str, Tensor | None] = {}
        self._levels: Sequence[nn.Module] = getattr(tower, "deepstack_merger_list", ())
        self._encoded = sum(counts)
        self.counts = list(counts)
        """Number of cells of each image that have not left."""
        self.cells: Tensor | None = None
        """Index, among the cells that all images start with, of each that has not left, ascending;
        None before the first cut."""

    def run(self, encode: Callable[[], Tensor]) -> Tensor:
        """Rows ``(M, D)`` of the remaining cells by ``encode``, a call of the tower."""
        with self._wrapping():
            rows = encode()
        if self.cells is None or not self._levels:
            return rows
        return rows[self.cells]

    @contextmanager
    def _wrapping(self) -> Iterator[None]:
        """Wrap the layers and mergers of the tower for the time of a call."""
        start = min(cut.layer for cut in self._cuts if cut is not None)
        wrapped: list[tuple[Any, Callable[..., Tensor]]] = [
            (block, partial(self._enter, layer))
            for layer, block in enumerate(self._tower.blocks)
            if layer >= start
        ]
        if self._levels:
            mergers = (self._tower.merger, *self._levels)
            wrapped += [(merger, self._spread) for merger in mergers]
        try:
            for module, wrapper in wrapped:
                # On the object, where both torch and vLLM's own __call__ look it up.
                module.forward = partial(wrapper, module.forward)
            yield
        finally:
            for module, _ in wrapped:
                vars(module).pop("forward", None)

    def _enter(
        self,
        layer: int,
        forward: Callable[..., Tensor],
        hidden: Tensor,
        **named: Tensor | None,
    ) -> Tensor:
        """The output of a block, of the remaining cells alone."""
        if any(cut is not None and cut.layer == layer for cut in self._cuts):
            hidden = self._drop_cells(layer, hidden, {**named, **self._metadata})
        return forward(hidden, **{**named, **self._metadata})

    def _drop_cells(self, layer: int, hidden: Tensor, named: Metadata) -> Tensor:
        """Hidden states of the cells that stay; sets what else of them the blocks read."""
        cells = self._choose(layer, hidden)
        self.cells = cells if self.cells is None else self.cells[cells]
        unit = torch.arange(self._unit, device=cells.device)
        patches = (cells[:, None] * self._unit + unit).flatten()
        lengths = [count * self._unit for count in self.counts]
        metadata = {**self._describe_sequences(lengths)}
        for name in _ROTARY:
            table = named[name]
            assert table is not None
            metadata[name] = table[patches]
        self._metadata = {n: v for n, v in metadata.items() if n in named}
        return hidden[patches]

    def _choose(self, layer: int, hidden: Tensor) -> Tensor:
        """Indices of the cells that stay, and their new number in each image.

        Images are ranked one by one, so that none depends on those beside it.
        """
        states = hidden.reshape(-1, self._unit, hidden.shape[-1])
        states = states.mean(dim=1, dtype=torch.float32)
        starts = [0, *accumulate(self.counts)]
        parts = []
        for i, of_image in enumerate(states.split(self.counts)):
            cut = self._cuts[i]
            if cut is not None and cut.layer == layer:
                kept = keep_cells(of_image, cut.remaining, cut.name)
            else:
                kept = torch.arange(len(of_image), device=hidden.device)
            self.counts[i] = len(kept)
            parts.append(kept + starts[i])
        return torch.cat(parts)

    def _spread(self, forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """A merger's rows at the indices of their cells, zeros between.

        The tower joins the rows of all mergers, and those before the cut have rows of all cells.
        """
        rows = forward(hidden)
        if self.cells is None:
            return rows
        spread = rows.new_zeros(self._encoded, rows.shape[1])
        return spread.index_copy_(0, self.cells, rows)
