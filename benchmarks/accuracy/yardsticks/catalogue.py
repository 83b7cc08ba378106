"""The yardsticks by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.accuracy.yardsticks.yardstick import Yardstick

YARDSTICKS = ("minillava", "miniqwen")


def open_yardstick(name: str, checkpoint: Path | None = None) -> Yardstick:
    """A yardstick with the committed checkpoint, or with another training of its model."""
    # Imported here, because transformers takes seconds to load.
    if name == "minillava":
        from benchmarks.accuracy.yardsticks.minillava import MiniLlava

        return MiniLlava() if checkpoint is None else MiniLlava(checkpoint)
    from benchmarks.accuracy.yardsticks.miniqwen import MiniQwen

    return MiniQwen() if checkpoint is None else MiniQwen(checkpoint)
