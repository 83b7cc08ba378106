"""Small vision-language models on which policies differ, and the questions that show it.

mini-LLaVA answers questions about scenes on a fixed grid of tokens. mini-Qwen3-VL takes pictures of
any size, so that pruning can be compared with resizing; further training taught it to watch clips.
No search may see mini-InternVL, which has tiles, and mini-Gemma, which pools its tokens, so that
they show what carries over. ``train_minillava``, ``train_miniqwen``, ``train_clips``,
``train_miniintern`` and ``train_minigemma`` made the weights. ``examples`` draws the held-out
questions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.yardsticks.yardstick import Yardstick

SEARCHED = ("minillava", "miniqwen")
"""Yardsticks that searches measure candidates on."""
YARDSTICKS = (*SEARCHED, "miniintern", "minigemma")
"""All yardsticks of the accuracy table."""


def open_yardstick(name: str, checkpoint: Path | None = None) -> Yardstick:
    """Open a yardstick with the committed checkpoint, or with another training of its model."""
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
