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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmms_eval.api.instance import GenerationResult, Instance
from lmms_eval.models.chat.openai import OpenAICompatible
from openai import DefaultHttpxClient
from PIL import Image

Messages = Sequence[Mapping[str, Sequence[Mapping[str, object]]]]


class OpenAIWithImages(OpenAICompatible):  # type: ignore[misc]  # untyped here
    """lmms-eval's OpenAI-compatible model, with pruning options and a file of image digests.

    The environment variable AUTOPRUNE_RUN is a JSON object: ``pruning``, the ``autoprune`` entry of
    every request; ``headers`` of every request, the key among them; ``insecure``, whether any
    certificate is accepted; and ``images``, the file to which ``doc_id`` and ``image`` of every
    question are written as a line.
    """

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)
        self._run = json.loads(os.environ["AUTOPRUNE_RUN"])
        options = (
            {"http_client": DefaultHttpxClient(verify=False)}
            if self._run["insecure"]
            else {}
        )
        self.client: Any = self.client.with_options(
            default_headers=self._run["headers"], **options
        )
        completions = self.client.chat.completions
        body = {"mm_processor_kwargs": {"autoprune": self._run["pruning"]}}
        completions.create = functools.partial(completions.create, extra_body=body)

    def generate_until(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """Generate as the parent class does, and append the images to the file."""
        images: dict[int, str] = {}
        for request in requests:
            context, doc_to_messages, settings, number, *where = request.arguments

            def record(
                doc: object, number: int = number, build: Any = doc_to_messages
            ) -> Messages:
                messages: Messages = build(doc)
                parts = [part for message in messages for part in message["content"]]
                media = [part["url"] for part in parts if part["type"] != "text"]
                # A digest of the pixels of all images in order; empty without images.
                digest = hashlib.sha256()
                for image in media:
                    if isinstance(image, Image.Image):
                        digest.update(
                            f"{image.mode} {image.size}".encode() + image.tobytes()
                        )
                    else:
                        digest.update(str(image).encode())
                images[number] = digest.hexdigest()[:16] if media else ""
                return messages

            request.arguments = (context, record, settings, number, *where)
        answers: list[GenerationResult] = super().generate_until(requests)
        with Path(self._run["images"]).open("a", encoding="utf-8") as file:
            for number, image in images.items():
                file.write(json.dumps({"doc_id": number, "image": image}) + "\n")
        return answers
