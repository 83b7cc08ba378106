"""Files of the zoo: a state as text that people can read and compare.

Knows nothing about what a state means. Every default is written out, so that a later release that
chooses other defaults serves the same policy.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import JsonValue

from vllm_autoprune import PruningState

_WIDTH = 96


def write(state: PruningState, path: Path) -> None:
    """Write a state; the text loads back to an equal one."""
    path.write_text(laid_out(json.loads(state.dumps())) + "\n", encoding="utf-8")


def laid_out(value: JsonValue, indent: int = 0, key: str = "") -> str:
    """JSON with what fits on a line on one line."""
    flat = json.dumps(value, ensure_ascii=False)
    lead = f"{json.dumps(key, ensure_ascii=False)}: " if key else ""
    short = indent > 0 and indent + len(lead) + len(flat) < _WIDTH
    if not isinstance(value, dict | list) or not value or short:
        return lead + flat
    if isinstance(value, dict):
        parts = [laid_out(item, indent + 2, name) for name, item in value.items()]
    else:
        parts = [laid_out(item, indent + 2) for item in value]
    open_, close = ("{", "}") if isinstance(value, dict) else ("[", "]")
    inner = ",\n".join(" " * (indent + 2) + part for part in parts)
    return f"{lead}{open_}\n{inner}\n{' ' * indent}{close}"
