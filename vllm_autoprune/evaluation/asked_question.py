"""A question as it is sent to a model, with its pictures and the answers that are accepted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_autoprune.evaluation.answers import Rule, score_text
from vllm_autoprune.evaluation.pictures import Picture, PictureSource

Turns = Sequence[Mapping[str, object]]
"""Messages in OpenAI's form, in which the part of an image is a picture or a picture's source."""


@dataclass(frozen=True)
class AskedQuestion:
    """A question as it is sent, and the answers that are accepted: empty if the data has none."""

    where: str
    turns: Turns
    answers: tuple[str, ...]
    rule: Rule = "text"
    category: str = "all"
    pair: int | None = None

    def messages(self, frames: int = 0) -> list[dict[str, object]]:
        """The messages with data URLs; every call reads the pictures' files again.

        ``frames``: number of frames of a video. Raises :class:`EvaluationError` for a file that
        has changed.
        """
        return render(self.turns, lambda picture: picture.part(frames))

    @property
    def digest(self) -> str:
        """SHA-256 of the messages and the contents of their pictures, without the answers."""
        text = json.dumps(render(self.turns, lambda picture: picture.digest))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def pictures(self) -> list[Picture]:
        """The pictures of all turns."""
        pictures: list[Picture] = []
        render(self.turns, pictures.append)
        return pictures

    @property
    def text(self) -> str:
        """The text of the last turn."""
        content = render(self.turns, lambda picture: {})[-1].get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        return "\n".join(str(part["text"]) for part in parts if part.get("text"))

    @property
    def is_exact(self) -> bool:
        """Whether only one text is right, so that a prefill with this text can score it."""
        return self.rule == "text" and len(self.answers) == 1

    def score_text(self, text: str) -> float:
        """Accuracy of a text by the question's rule, 0 to 1."""
        return score_text(self.rule, self.answers, text)


def render(turns: Turns, show: Callable[[Any], object]) -> list[dict[str, object]]:
    """The messages of ``turns`` with every picture replaced by the result of ``show``."""
    messages = []
    for turn in turns:
        message = dict(turn)
        if isinstance(parts := message.get("content"), list):
            kinds = (Picture, PictureSource)
            parts = [show(part) if isinstance(part, kinds) else part for part in parts]
            message["content"] = parts
        messages.append(message)
    return messages


def ask(question: str, *pictures: Picture | PictureSource) -> Turns:
    """One user turn with ``pictures``, followed by ``question``."""
    return [
        {"role": "user", "content": [*pictures, {"type": "text", "text": question}]}
    ]
