"""Small vision-language models on which policies differ, and the questions that show it.

mini-LLaVA answers questions about scenes on a fixed grid of tokens. mini-Qwen3-VL takes pictures of
any size, so that pruning can be compared with resizing; further training taught it to watch clips.
``train_minillava``, ``train_miniqwen`` and ``train_clips`` made the weights. ``train_miniintern``
and ``train_minigemma`` train models that see square tiles and have no weights here yet.
``examples`` draws the held-out questions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.yardsticks.yardstick import Yardstick

YARDSTICKS = ("minillava", "miniqwen")


def open_yardstick(name: str, checkpoint: Path | None = None) -> Yardstick:
    """Open a yardstick with the committed checkpoint, or with another training of its model.

    mini-InternVL (``miniintern``) and mini-Gemma (``minigemma``) need a checkpoint.
    """
    # Imported here, because importing transformers takes seconds.
    if name == "minillava":
        from benchmarks.yardsticks.minillava import MiniLlava

        return MiniLlava(checkpoint)
    if name == "miniintern":
        from benchmarks.yardsticks.miniintern import MiniIntern

        return MiniIntern(checkpoint)
    if name == "minigemma":
        from benchmarks.yardsticks.minigemma import MiniGemma

        return MiniGemma(checkpoint)
    from benchmarks.yardsticks.miniqwen import MiniQwen

    return MiniQwen(checkpoint)
