"""Which mini-LLaVA is asked, and its held-out questions.

Knows nothing about servers or policies. Questions are of the test split, which no search looks at.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.accuracy.records import MME, Question
from benchmarks.minillava.split import CHECKPOINT, png
from benchmarks.search.scenes import select_questions
from vllm_autoprune.errors import ConfigError, Problem

EMBEDDED = "embedded"
_REQUESTS = 60_000
"""What the default number of scenes is chosen for: half an hour at 35 requests a second."""
_PER_SCENE = 18
"""Questions about one scene, about; it has no number to read where it has no sign."""


@dataclass(frozen=True)
class MiniLlava:
    """A checkpoint folder: ``llava`` and, beside it, the text tower ``clip``."""

    name: str
    folder: Path

    @property
    def llava(self) -> Path:
        """What is served."""
        return self.folder / "llava"

    @property
    def text_tower(self) -> Path:
        """What measures relevance."""
        return self.folder / "clip"

    @cached_property
    def tokens(self) -> int:
        """N, visual tokens of an image."""
        config = json.loads((self.llava / "config.json").read_text())
        return int(config["image_seq_length"])

    @cached_property
    def digest(self) -> str:
        """First twelve digits of the SHA-256 over all weights."""
        digest = hashlib.sha256()
        for folder in (self.llava, self.text_tower):
            for path in sorted(folder.glob("*.safetensors")):
                digest.update(path.read_bytes())
        return digest.hexdigest()[:12]

    def scenes(self, cases: int) -> int:
        """As many scenes as so many cases answer in about half an hour; at least 8."""
        return max(8, _REQUESTS // (max(cases, 1) * _PER_SCENE))


def find(name: str) -> MiniLlava:
    """``embedded``, or a folder with ``llava`` and ``clip``; raises :class:`ConfigError`."""
    folder = CHECKPOINT if name == EMBEDDED else Path(name)
    for part in ("llava/config.json", "clip/config.json"):
        if not (folder / part).is_file():
            mend = f"give {EMBEDDED}, or a folder with llava/ and clip/"
            raise ConfigError("eval", [Problem(f"--model {name}", f"has no {part}", mend)])
    return MiniLlava(name if name == EMBEDDED else folder.name, folder)


@dataclass(frozen=True)
class Asked:
    """One question in the form in which it is sent."""

    record: Question
    text: str
    answer: str
    image: str
    """A ``data:`` URL, one object for all questions about a scene."""


def held_out(scenes: int) -> Sequence[Asked]:
    """The questions about the first scenes of the test split, scene by scene."""
    found, images = [], dict[int, str]()
    for number, example in enumerate(select_questions("test", scenes)):
        if example.image_id not in images:
            content = base64.b64encode(png(example.image)).decode()
            images[example.image_id] = f"data:image/png;base64,{content}"
        paired = example.pair is not None
        record = Question(
            id=str(number),
            benchmark=MME if paired else example.kind,
            image=str(example.image_id),
            category=example.kind if paired else "",
            pair=str(example.pair) if paired else "",
        )
        found.append(Asked(record, example.question, example.answer, images[example.image_id]))
    return found


def digest(asked: Sequence[Asked]) -> str:
    """First twelve digits of the SHA-256 over questions, answers and images."""
    seen = hashlib.sha256()
    for one in asked:
        seen.update(f"{one.text}\n{one.answer}\n{one.image}\n".encode())
    return seen.hexdigest()[:12]
