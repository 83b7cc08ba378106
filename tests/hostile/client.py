"""OpenAI client that records replies and never raises for errors of the server."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.server import Server
from tests.hostile.pictures import Picture

CHAT = "/v1/chat/completions"
PATIENCE = 240.0
"""Seconds that one answer may take."""

Logprobs = Mapping[str, float]
"""The most likely first tokens of an answer."""


@dataclass(frozen=True)
class Reply:
    """One reply: status (0 without an answer), body and seconds."""

    status: int
    text: str
    seconds: float

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer; empty if it is not one."""
        try:
            value = json.loads(self.text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def message(self) -> str:
        """Message of an error."""
        error = self.body.get("error")
        return str(error.get("message", "")) if isinstance(error, dict) else self.text

    @property
    def logprobs(self) -> Logprobs:
        """Of the first token of each answer; empty where the request was refused."""
        if self.status != 200:
            return {}
        content = self.body["choices"][0]["logprobs"]["content"]
        tops = content[0]["top_logprobs"]
        # The endpoint for processed inputs returns token ids instead of text.
        return {str(top.get("token_id", top.get("token"))): float(top["logprob"]) for top in tops}

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.message[:160]!r}"


@dataclass(frozen=True)
class Client:
    """Requests to one server; ``statuses`` has that of every answer, 0 where there was none."""

    server: Server
    headers: Mapping[str, str] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list, compare=False)

    def send(self, path: str, body: Mapping[str, object] | bytes) -> Reply:
        """The answer to a POST request on a connection of its own."""
        reply = self._send(path, body)
        self.statuses.append(reply.status)
        return reply

    def _send(self, path: str, body: Mapping[str, object] | bytes) -> Reply:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        at = urlsplit(self.server.url)
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=PATIENCE)
        begun = time.monotonic()
        headers = {"Content-Type": "application/json", "Connection": "close", **self.headers}
        try:
            connection.request("POST", path, content, headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
            return Reply(answer.status, text, time.monotonic() - begun)
        except (OSError, http.client.HTTPException) as error:
            return Reply(0, repr(error), time.monotonic() - begun)
        finally:
            connection.close()

    def abandon(self, body: Mapping[str, object], after: float) -> None:
        """Send a chat request and hang up before it is answered."""
        at = urlsplit(self.server.url)
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=PATIENCE)
        headers = {"Content-Type": "application/json"}
        with contextlib.suppress(OSError):
            connection.request("POST", CHAT, json.dumps(body), headers)
            time.sleep(after)
        connection.close()

    def chat(self, text: str, *pictures: Picture, **more: object) -> Reply:
        """The answer to a question about pictures."""
        return self.send(CHAT, self.chat_body(text, *pictures, **more))

    def chat_body(self, text: str, *pictures: Picture, **more: object) -> dict[str, object]:
        """A chat request: the pictures first, then the text."""
        return {
            "model": self.server.model,
            "messages": [{"role": "user", "content": content(text, pictures)}],
            "temperature": 0,
            "max_tokens": 4,
            "logprobs": True,
            "top_logprobs": 20,
            "return_tokens_as_token_ids": True,
            **more,
        }

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over all samples with these labels."""
        pairs = [f'{label}="{value}"' for label, value in labels.items()]
        lines = self.server.get("/metrics").splitlines()
        samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in samples
            if all(label in line for label in pairs)
        )


def content(text: str, pictures: Sequence[Picture]) -> list[dict[str, object]]:
    """Content parts of a user turn."""
    return [*(picture.part for picture in pictures), {"type": "text", "text": text}]


def entry(**fields: object) -> dict[str, object]:
    """The part of a request body that says how its images are pruned."""
    return {"mm_processor_kwargs": {"autoprune": fields}}


def distance(one: Logprobs, other: Logprobs) -> float:
    """Mean absolute difference of two distributions of the first token.

    A token that only one of them lists counts as the least likely that the other lists.
    """
    if not one or not other:
        return float("inf")
    floors = min(one.values()), min(other.values())
    tokens = {*one, *other}
    gaps = (abs(one.get(t, floors[0]) - other.get(t, floors[1])) for t in tokens)
    return sum(gaps) / len(tokens)


def nearest(answer: Logprobs, references: Sequence[Logprobs]) -> int:
    """The reference nearest to an answer."""
    return min(range(len(references)), key=lambda i: distance(answer, references[i]))
