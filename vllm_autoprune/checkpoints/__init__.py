"""Visual tokens of an image from a local checkpoint, and what a policy keeps of them.

LLaVA-1.5 is read with transformers, in seconds; other backbones by the plugin in a vLLM engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from PIL import Image

from vllm_autoprune.errors import ConfigError, Problem, UnsupportedModelError
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.shared.text_tower import TextTower, read_text_tower

if TYPE_CHECKING:
    from vllm_autoprune.checkpoints.llava import EncodedImage
    from vllm_autoprune.checkpoints.regions import SelectedRegion
    from vllm_autoprune.tpdsl.executor.materialize import PruningPolicy


class Vision(Protocol):
    """The vision side of one checkpoint."""

    def encode(self, image: Image.Image, instruction: str) -> EncodedImage:
        """Encode an image, with relevance to the instruction."""


Opener = Callable[[Path, TextTower | None], Vision]


def _llava(checkpoint: Path, tower: TextTower | None) -> Vision:
    from vllm_autoprune.checkpoints.llava import LlavaVision

    return LlavaVision(checkpoint, tower)


OPENERS: dict[str, Opener] = {"LlavaForConditionalGeneration": _llava}
"""Hugging Face architecture name -> opener of its vision side."""


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


def select_regions(
    checkpoint: Path,
    text_tower: Path | None,
    policy: PruningPolicy,
    image: Image.Image,
    question: str,
) -> list[SelectedRegion]:
    """Each region of an image, and what a policy keeps of it for a question.

    Raises :class:`ConfigError` for folders without a checkpoint and
    :class:`UnsupportedModelError` for architectures that are not served.
    """
    architecture = read_architecture(checkpoint)
    if architecture in OPENERS:
        from vllm_autoprune.checkpoints.regions import SelectedRegion
        from vllm_autoprune.tpdsl.executor.refine import refine

        encoded = open_vision(checkpoint, text_tower).encode(image, question)
        refined = refine(policy, encoded.tokens)
        return [SelectedRegion(encoded.picture, policy, encoded.tokens, refined)]
    _require_known(checkpoint, architecture, BACKBONES)
    from vllm_autoprune.checkpoints.engine import select_in_engine

    return select_in_engine(checkpoint, text_tower, policy, image, question)


def open_vision(checkpoint: Path, text_tower: Path | None = None) -> Vision:
    """Open the vision side of a checkpoint, with relevance measured by a CLIP text tower if given.

    Without a text tower the language model's input embeddings measure it, as on a server. Raises
    :class:`ConfigError` for folders without a checkpoint and :class:`UnsupportedModelError` for
    architectures that are not in :data:`OPENERS`.
    """
    architecture = read_architecture(checkpoint)
    _require_known(checkpoint, architecture, OPENERS)
    tower = None if text_tower is None else read_text_tower(str(text_tower))
    return OPENERS[architecture](checkpoint, tower)


def read_architecture(checkpoint: Path) -> str:
    """Architecture of a checkpoint by its config.json; raises :class:`ConfigError` without one."""
    config = checkpoint / "config.json"
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not JSON"
        what = f"config.json cannot be read ({reason})"
        fix = "give a folder with a Hugging Face checkpoint"
        raise ConfigError("checkpoint", [Problem(str(checkpoint), what, fix)]) from None
    names = data.get("architectures") if isinstance(data, dict) else None
    return str(names[0]) if isinstance(names, list) and names else ""


def _require_known(checkpoint: Path, architecture: str, known: Collection[str]) -> None:
    if architecture in known:
        return
    what = f"architecture {architecture or 'unknown'} is not supported here"
    fix = f"give a checkpoint of {', '.join(known)}"
    raise UnsupportedModelError("checkpoint", [Problem(str(checkpoint), what, fix)])
