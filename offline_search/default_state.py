"""The default state of a served model's family, with which the winner of a search is compared."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from vllm_autoprune.serving.models import BACKBONES, CHECKPOINTS


def find_default_state(model: str, architecture: str = "") -> str:
    """Name of the default state, empty if the model's family is not known.

    ``model`` is the name by which it is served: a folder that is also on this machine, or an id on
    the Hub. ``architecture`` is what the server tells, if it does.
    """
    names = [architecture, *_read_architectures(model), *_match_checkpoints(model)]
    return next((BACKBONES[name].state for name in names if name in BACKBONES), "")


def _read_architectures(folder: str) -> list[str]:
    """Architectures in the config.json of a folder; empty if it cannot be read."""
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads(Path(folder, "config.json").read_text("utf-8"))
        return [str(name) for name in config.get("architectures") or ()]
    return []


_WILDCARDS = {r"\*": ".*", r"\{": "(", r"\}": ")", ",": "|"}
"""Signs of a pattern, such as ``Qwen/Qwen3-VL-{2B,4B}-*``, as an escaped regular expression has
them, with their meaning."""


def _match_checkpoints(model: str) -> list[str]:
    """Architectures that have ``model`` among their ids on the Hub."""
    found = []
    for architecture, ids in CHECKPOINTS.items():
        for pattern in ids.split(", "):
            expression = re.sub(
                r"\\[*{}]|,", lambda sign: _WILDCARDS[sign[0]], re.escape(pattern)
            )
            if re.fullmatch(expression, model):
                found.append(architecture)
    return found
