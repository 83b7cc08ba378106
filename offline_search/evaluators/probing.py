"""A probe set from a local checkpoint: what the served model sees of a few images.

Knows nothing about searching.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from PIL import Image

from offline_search.examples import Dataset
from vllm_autoprune.offline import open_vision
from vllm_autoprune.tpdsl.tokens import VisualTokens

PROBED = 16
"""Questions that are looked at, each about another image."""


def local_probes(
    checkpoint: Path, text_tower: Path | None, dataset: Dataset
) -> Sequence[VisualTokens]:
    """The first images of the search split with their first question.

    Raises :class:`ConfigError` or :class:`UnsupportedModelError` as `explain` does.
    """
    vision = open_vision(checkpoint, text_tower)
    first = {example.image: example for example in reversed(dataset.of("search"))}
    found = []
    for example in islice(reversed(first.values()), PROBED):
        with Image.open(dataset.folder / example.image) as image:
            found.append(vision.look(image, example.question).tokens)
    return found
