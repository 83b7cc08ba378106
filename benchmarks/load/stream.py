"""Server-sent events, taken apart after the stream has ended.

Knows nothing about sockets: it is handed bytes with the time each of them was read.

Nothing is parsed between two reads, because parsing would delay the stamp of the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Read = tuple[float, bytes]
"""When a piece was read, and the piece."""


@dataclass(frozen=True)
class Stream:
    """What a streamed chat completion held."""

    deltas: tuple[float, ...]
    text: str
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    finished: bool
    """Whether the server said ``[DONE]``."""
    error: str | None


def parse(reads: Sequence[Read]) -> Stream:
    """Each event gets the stamp of the read that held its last byte.

    A delta counts from its text: the first chunk of a chat, which only names the role, does not.
    """
    deltas: list[float] = []
    text: list[str] = []
    usage: dict[str, object] = {}
    finished, error = False, None
    for arrived, data in _events(reads):
        if data == "[DONE]":
            finished = True
            continue
        try:
            chunk = json.loads(data)
        except json.JSONDecodeError:
            error = error or f"an event is not JSON: {data[:80]}"
            continue
        if not isinstance(chunk, dict):
            error = error or f"an event is no object: {data[:80]}"
            continue
        if "error" in chunk:
            error = error or _message(chunk["error"])
        usage = chunk.get("usage") or usage
        said = "".join(_said(choice) for choice in chunk.get("choices") or ())
        if said:
            deltas.append(arrived)
            text.append(said)
    details = usage.get("prompt_tokens_details")
    return Stream(
        deltas=tuple(deltas),
        text="".join(text),
        prompt_tokens=_whole(usage.get("prompt_tokens")),
        completion_tokens=_whole(usage.get("completion_tokens")),
        cached_tokens=_whole(details.get("cached_tokens")) if isinstance(details, dict) else None,
        finished=finished,
        error=error,
    )


def _events(reads: Sequence[Read]) -> Iterator[tuple[float, str]]:
    """The data of each event; an event ends with an empty line, in whichever read that is."""
    rest = b""
    for arrived, piece in reads:
        rest += piece.replace(b"\r\n", b"\n")
        *whole, rest = rest.split(b"\n\n")
        for event in whole:
            lines = event.decode(errors="replace").split("\n")
            data = [line[5:].removeprefix(" ") for line in lines if line.startswith("data:")]
            if data:
                yield arrived, "\n".join(data)


def _said(choice: object) -> str:
    delta = choice.get("delta") if isinstance(choice, dict) else None
    return str(delta.get("content") or "") if isinstance(delta, dict) else ""


def _message(error: object) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None
