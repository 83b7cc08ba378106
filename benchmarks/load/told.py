"""What a server says it is: its version, and the state that it runs, if it tells.

Knows nothing about figures. A server that does not answer a question is asked no further.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from benchmarks.load.server_metrics import fetch


def about(url: str) -> dict[str, str]:
    """From ``/version`` and, where the plugin's endpoint is loaded, ``/v1/autoprune``."""
    found: dict[str, str] = {}
    version = _object(fetch(url, "/version")).get("version")
    if isinstance(version, str):
        found["server version"] = version
    state = _object(fetch(url, "/v1/autoprune"))
    for name in ("state", "digest", "version"):
        value = state.get(name)
        if isinstance(value, str):
            found[f"autoprune {name}"] = value
    budget = state.get("budget")
    if isinstance(budget, dict) and "k" in budget:
        found["autoprune budget"] = str(budget["k"])
    return found


def _object(text: str | None) -> Mapping[str, object]:
    try:
        told = json.loads(text or "{}")
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
