"""The vision side of a local checkpoint, run with transformers: what a server would see.

Knows nothing about vLLM, nor about which tokens are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from PIL import Image

from vllm_autoprune.errors import ConfigError, Problem, UnsupportedModelError
from vllm_autoprune.serving.towers import TextTower, describe_tower
from vllm_autoprune.tpdsl.tokens import VisualTokens


@dataclass(frozen=True)
class Seen:
    """One image as a model sees it.

    picture is what its processor leaves of the image, with all tiles side by side, so that the
    grid of ``tokens`` (B = 1) lies over it; tokens hold every input that can be filled.
    """

    picture: Image.Image
    tokens: VisualTokens


class Vision(Protocol):
    """The vision side of one checkpoint."""

    def look(self, image: Image.Image, instruction: str) -> Seen:
        """The image and its tokens, with relevance to the instruction."""


Opener = Callable[[Path, TextTower | None], Vision]


def _llava(checkpoint: Path, tower: TextTower | None) -> Vision:
    from vllm_autoprune.checkpoints.llava import LlavaVision

    return LlavaVision(checkpoint, tower)


OPENERS: dict[str, Opener] = {"LlavaForConditionalGeneration": _llava}
"""Hugging Face architecture name -> what opens its vision side; another backbone is one more."""


def open_vision(checkpoint: Path, text_tower: Path | None = None) -> Vision:
    """The vision side of a checkpoint, its relevance measured by a CLIP text tower if given.

    Without one the language model's own input embeddings measure it, as on a server. Raises
    :class:`ConfigError` for folders that hold no checkpoint and :class:`UnsupportedModelError`
    for architectures that nobody has written this for.
    """
    config = checkpoint / "config.json"
    try:
        said = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not JSON"
        what = f"config.json cannot be read ({reason})"
        fix = "give a folder with a Hugging Face checkpoint"
        raise ConfigError("checkpoint", [Problem(str(checkpoint), what, fix)]) from None
    named = said.get("architectures") if isinstance(said, dict) else None
    architecture = named[0] if isinstance(named, list) and named else ""
    if architecture not in OPENERS:
        what = f"architecture {architecture or 'unknown'!s} cannot be looked into"
        fix = f"give a checkpoint of {', '.join(OPENERS)}"
        raise UnsupportedModelError("checkpoint", [Problem(str(checkpoint), what, fix)])
    tower = None if text_tower is None else describe_tower(str(text_tower))
    return OPENERS[architecture](checkpoint, tower)
