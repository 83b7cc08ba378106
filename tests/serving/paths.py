"""Which checkpoint the engine tests serve."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.minillava.split import CHECKPOINT

ROOT = Path(os.environ.get("MINILLAVA", CHECKPOINT))
LLAVA, CLIP = ROOT / "llava", ROOT / "clip"
TOKENS = 144
"""Visual tokens of one image, N."""
