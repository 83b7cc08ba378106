"""Tables of the paper and of its supplement, as printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PUBLISHED: list[dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text()
)["tables"]
"""``rel_follows`` of a row says which definition of Rel. gives the printed value."""
