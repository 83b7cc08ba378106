"""Forward hooks that read what enters a patch merger, as one row and two norms a token.

A merger makes one token of the patches of a cell. Its input, several times as many numbers as its
output, is reduced within the hook and not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class MergerHook:
    """Forward hooks on a patch merger, in place while :meth:`recording` only.

    ``merger`` is called with patches ``(P, ..., C)``, ``patches`` of each token one behind another,
    or with tokens ``(..., patches * C)`` where they are ``joined`` before. ``scored`` is the module
    before which norms are taken, called with patches of the same order.
    """

    def __init__(
        self, merger: nn.Module, patches: int, scored: nn.Module, *, joined: bool = False
    ) -> None:
        self._merger = merger
        self._scored = scored
        self._patches = patches
        self._joined = joined
        self._rows: Tensor | None = None
        self._norms: Tensor | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Read the calls within, of which the last one counts; other calls cost nothing."""
        handles = (
            self._merger.register_forward_pre_hook(self._store_rows),
            self._scored.register_forward_pre_hook(self._store_norms),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self) -> tuple[Tensor, Tensor]:
        """Return, and drop, what entered the merger, float32.

        Rows ``(N, C)``, the mean of each token's patches, and norms ``(N, 2)``: sum of absolute
        values and Euclidean, the mean over its patches; of its one row where they are joined.
        """
        assert self._rows is not None and self._norms is not None, "the merger has not run"
        rows, norms = self._rows, self._norms
        self._rows = self._norms = None
        return rows, norms

    def _store_rows(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._rows = self._cells(inputs[0]).mean(dim=1, dtype=torch.float32)

    def _store_norms(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        cells = self._cells(inputs[0])
        whole = cells.flatten(1)[:, None] if self._joined else cells
        orders = (1, 2)
        norms = [
            torch.linalg.vector_norm(whole, order, dim=2, dtype=torch.float32) for order in orders
        ]
        self._norms = torch.stack(norms, dim=2).mean(dim=1)

    def _cells(self, inputs: Tensor) -> Tensor:
        """``(N, patches, C)``."""
        width = inputs.shape[-1] // (self._patches if self._joined else 1)
        return inputs.reshape(-1, self._patches, width)
