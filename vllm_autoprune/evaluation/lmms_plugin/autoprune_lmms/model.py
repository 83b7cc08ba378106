"""lmms-eval's `openai` model, which records the image of each question and sends pruning options.

lmms-eval itself cannot send them: it takes from ``--gen_kwargs`` only what OpenAI defines, and uses
``extra_body`` for videos and templates (lmms_eval/models/chat/openai.py). The samples that it
logs do not name the image, without which questions about the same image cannot be resampled
together.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmms_eval.api.instance import GenerationResult, Instance
from lmms_eval.models.chat.openai import OpenAICompatible
from PIL import Image

FILE = "AUTOPRUNE_IMAGES"
"""Environment variable with the output file: ``task``, ``doc_id`` and ``image`` per line."""

PRUNING = "AUTOPRUNE_PRUNING"
"""Environment variable with the ``autoprune`` entry of every request, as JSON; empty for none."""

HEADERS = "AUTOPRUNE_HEADERS"
"""Environment variable with the headers of every request, as JSON: the key among them."""

Messages = Sequence[Mapping[str, Sequence[Mapping[str, object]]]]
Key = tuple[str, int]


class OpenAIWithImages(OpenAICompatible):  # type: ignore[misc]  # untyped here
    """The model that the package's manifest names."""

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)
        headers = json.loads(os.environ[HEADERS])
        self.client: Any = self.client.with_options(default_headers=headers)
        if pruning := json.loads(os.environ[PRUNING]):
            completions = self.client.chat.completions
            body = {"mm_processor_kwargs": {"autoprune": pruning}}
            completions.create = functools.partial(completions.create, extra_body=body)

    def generate_until(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """Generate as the parent class does, and append the images to the file."""
        images: dict[Key, str] = {}
        for request in requests:
            context, doc_to_messages, settings, number, task, split = request.arguments
            recording = functools.partial(_record, doc_to_messages, images, (task, number))
            request.arguments = (context, recording, settings, number, task, split)
        answers: list[GenerationResult] = super().generate_until(requests)
        with Path(os.environ[FILE]).open("a", encoding="utf-8") as file:
            for (task, number), image in images.items():
                file.write(json.dumps({"task": task, "doc_id": number, "image": image}) + "\n")
        return answers


def _record(
    doc_to_messages: Callable[[object], Messages], images: dict[Key, str], key: Key, doc: object
) -> Messages:
    messages = doc_to_messages(doc)
    images[key] = fingerprint(messages)
    return messages


def fingerprint(messages: Messages) -> str:
    """Digest of the pixels of all images of a request in order; empty without images."""
    parts = [part for message in messages for part in message["content"]]
    media = [part["url"] for part in parts if part["type"] != "text"]
    digest = hashlib.sha256()
    for image in media:
        if isinstance(image, Image.Image):
            digest.update(f"{image.mode} {image.size}".encode() + image.tobytes())
        else:
            digest.update(str(image).encode())
    return digest.hexdigest()[:16] if media else ""
