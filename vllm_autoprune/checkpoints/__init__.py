"""Visual tokens of an image from a checkpoint, and what a policy keeps of them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

from vllm_autoprune.errors import ConfigError, Problem, UnsupportedModelError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Files of a checkpoint that are downloaded."""


def find_checkpoint(name: str) -> Path:
    """The folder of a local checkpoint, or of one on the Hugging Face Hub, downloaded if need be.

    Raises :class:`ConfigError` for an id of the Hub that cannot be had.
    """
    path = Path(name)
    if path.exists() or not _HUB_ID.fullmatch(name):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except (OSError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        what = f"is no folder, and not to be had from the Hub ({type(error).__name__})"
        fix = "give a folder with a Hugging Face checkpoint, or the id of one on the Hub"
        raise ConfigError("checkpoint", [Problem(name, what, fix)]) from None


def require_architecture(checkpoint: Path, known: Collection[str]) -> None:
    """Require one of the known architectures in the config.json of a checkpoint.

    Raises :class:`ConfigError` for folders without a checkpoint and
    :class:`UnsupportedModelError` for other architectures.
    """
    try:
        data = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not JSON"
        what = f"config.json cannot be read ({reason})"
        fix = "give a folder with a Hugging Face checkpoint"
        raise ConfigError("checkpoint", [Problem(str(checkpoint), what, fix)]) from None
    names = data.get("architectures") if isinstance(data, dict) else None
    architecture = str(names[0]) if isinstance(names, list) and names else "unknown"
    if architecture not in known:
        what = f"architecture {architecture} is not supported here"
        fix = f"give a checkpoint of {', '.join(known)}"
        raise UnsupportedModelError("checkpoint", [Problem(str(checkpoint), what, fix)])
