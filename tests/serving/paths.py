"""Which checkpoint the engine tests serve."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.yardsticks.examples import CHECKPOINTS

ROOT = Path(os.environ.get("MINILLAVA", CHECKPOINTS["minillava"]))
LLAVA, CLIP = ROOT / "llava", ROOT / "clip"
TOKENS = 144
"""Visual tokens of one image, N."""
