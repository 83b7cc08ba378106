"""lmms-eval's own `openai` model; what it sends is unchanged, and the images are written down.

Knows nothing about this repository. lmms-eval 0.7.3 leaves a question's document, and with it the
name of its image, out of the samples that it logs; without it, questions about one image cannot be
resampled together.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lmms_eval.api.instance import GenerationResult, Instance
from lmms_eval.models.chat.openai import OpenAICompatible
from PIL import Image

FILE = "AUTOPRUNE_IMAGES"
"""The variable that names the file: a line of JSON a question, ``task``, ``doc_id``, ``image``."""

Messages = Sequence[Mapping[str, Sequence[Mapping[str, object]]]]
Place = tuple[str, int]


class OpenAIWithImages(OpenAICompatible):
    """Found by its class path; see the package."""

    def generate_until(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """As the model that it extends."""
        seen: dict[Place, str] = {}
        for request in requests:
            context, doc_to_messages, settings, number, task, split = request.arguments
            noting = functools.partial(_note, doc_to_messages, seen, (task, number))
            request.arguments = (context, noting, settings, number, task, split)
        answers: list[GenerationResult] = super().generate_until(requests)
        with Path(os.environ[FILE]).open("a", encoding="utf-8") as file:
            for (task, number), image in seen.items():
                file.write(json.dumps({"task": task, "doc_id": number, "image": image}) + "\n")
        return answers


def _note(
    doc_to_messages: Callable[[object], Messages], seen: dict[Place, str], place: Place, doc: object
) -> Messages:
    messages = doc_to_messages(doc)
    seen[place] = fingerprint(messages)
    return messages


def fingerprint(messages: Messages) -> str:
    """Of the pixels of all images of a request, in order; empty where it has none."""
    parts = [part for message in messages for part in message["content"]]
    media = [part["url"] for part in parts if part["type"] != "text"]
    digest = hashlib.sha256()
    for one in media:
        if isinstance(one, Image.Image):
            digest.update(f"{one.mode} {one.size}".encode() + one.tobytes())
        else:
            digest.update(str(one).encode())
    return digest.hexdigest()[:16] if media else ""
