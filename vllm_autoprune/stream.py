"""Streamed answers and chat messages, as vLLM, other servers and gateways send them."""

from __future__ import annotations

import contextlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from vllm_autoprune.record_file import FrozenModel

EMPTY = "the answer contains no text"
"""Error of a stream without output: a failure where a first token is timed, else a wrong answer."""
_KEPT_TEXT = 400
"""Characters of an answer that a stream keeps."""
_THOUGHTS = ("reasoning", "reasoning_content")
"""Fields of thoughts: of vLLM 0.32, and of others."""


class StreamedAnswer(FrozenModel):
    """What a streamed answer contains."""

    deltas: tuple[float, ...] = ()
    """Arrival of each delta with output: thoughts, text, a refusal or a tool call. The first one
    ends the time to first token."""
    thoughts: int = 0
    """Number of deltas before the first one of the answer."""
    text: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    """What is wrong with the stream, in one line; None if the request was answered."""


def parse_stream(
    reads: Sequence[tuple[float, bytes]], end: str = "the stream ended without [DONE]"
) -> StreamedAnswer:
    """Parse the server-sent events in the pieces of an answer, and the times when they were read.

    Call it after the stream has ended, because parsing between two reads would delay the time stamp
    of the next. The first chunk of a chat only names the role; it is no delta, because it has no
    output. ``end`` says how an unfinished stream ended.
    """
    events, framed, stray = _split_events(reads)
    if stray and not framed:
        body = b"".join(piece for _, piece in reads).decode(errors="replace")
        events = [(reads[-1][0], body, _parse_object(body))]
    answer = _AnswerReader()
    for arrived, data, chunk in events:
        if data.strip() == "[DONE]":
            answer.finished = True
        elif chunk is not None:
            answer.read_chunk(arrived, chunk)
        elif data.strip():
            expected = "an event is not a JSON object"
            if not framed:
                expected = "the answer is not a stream"
            answer.errors.append(f"{expected}: {data[:80]}")
    errors = answer.errors
    if answer.deltas and not framed:
        errors.append(
            "the answer is not a stream, so that its first token cannot be timed"
        )
    if not answer.finished:
        after = f", after: {stray[:80]}" if stray else ""
        errors.append(f"the answer was cut short: {end}{after}")
    if not answer.deltas:
        errors.append(EMPTY)
    text = "".join(answer.text)[:_KEPT_TEXT]
    return StreamedAnswer(
        deltas=tuple(answer.deltas),
        thoughts=answer.thoughts,
        text=text.encode(errors="replace").decode(),
        error=(one_line(errors[0], 200) or "an error without text") if errors else None,
        **answer.usage,
    )


class _AnswerReader:
    """Accumulator of the chunks of one streamed answer."""

    def __init__(self) -> None:
        self.deltas = list[float]()
        """Arrival of each delta with output."""
        self.thoughts = 0
        """Number of deltas before the first one of the answer."""
        self.text = list[str]()
        self.errors = list[str]()
        self.usage = dict[str, int]()
        self.finished = False
        self._answered = False

    def read_chunk(self, arrived: float, chunk: dict[str, Any]) -> None:
        """Add one JSON object of the stream."""
        choices = _list_objects(chunk.get("choices"))
        # A chunk with choices may have other fields of these names.
        if failure := read_error({"error": chunk.get("error")} if choices else chunk):
            self.errors.append(failure)
        self._read_usage(chunk, choices)
        thinks = False
        answers = False
        for choice in choices:
            reason = choice.get("finish_reason")
            self.finished = self.finished or bool(reason)
            if reason in ("error", "abort"):
                self.errors.append(f"the server ended the answer: {reason}")
            message = choice.get("delta")
            if not message and not self.deltas:
                message = choice.get("message")
            if isinstance(message, dict):
                answer, thought = read_message(message)
                thinks = thinks or bool(thought)
                answers = answers or bool(answer or message.get("tool_calls"))
                if not choice.get("index"):
                    self.text.append(answer)
        if thinks or answers:
            self.deltas.append(arrived)
            self._answered = self._answered or answers
            self.thoughts += not self._answered

    def _read_usage(
        self, chunk: dict[str, Any], choices: Sequence[dict[str, Any]]
    ) -> None:
        """Read the token counts: most servers send them last, some always, some in the choice.

        A chunk with counts and without choices is the last one.
        """
        for counts in _list_objects(
            [holder.get("usage") for holder in (chunk, *choices)]
        ):
            for name in ("prompt_tokens", "completion_tokens"):
                with contextlib.suppress(ValueError, TypeError, OverflowError):
                    self.usage[name] = int(counts.get(name, ""))
            self.finished = self.finished or not choices


def read_message(message: Mapping[str, object]) -> tuple[str, str]:
    """Answer and thoughts of a chat message or of a delta of one; a refusal is an answer.

    Content may be a list of parts, where some servers put the thoughts too.
    """
    content = message.get("content")
    thoughts = [next((message[name] for name in _THOUGHTS if message.get(name)), None)]
    answer = list[object]()
    for part in content if isinstance(content, list) else [content]:
        thinks = isinstance(part, dict) and part.get("type") in (
            "thinking",
            "reasoning",
        )
        (thoughts if thinks else answer).append(part)
    return _join_text(answer) or _join_text(message.get("refusal")), _join_text(
        thoughts
    )


def read_error(content: object) -> str:
    """The message of an error in the format of OpenAI, FastAPI or a gateway; empty without one."""
    if not isinstance(content, Mapping):
        return ""
    for error in (content.get("error"), content.get("detail"), content.get("message")):
        if error:
            return str((isinstance(error, Mapping) and error.get("message")) or error)
    return ""


def one_line(text: object, length: int) -> str:
    """The beginning of a text, without what a terminal, or UTF-8, does not take."""
    printable = "".join(letter if letter.isprintable() else " " for letter in str(text))
    return " ".join(printable.split())[:length]


def _join_text(value: object, depth: int = 4) -> str:
    """Text of a field: the field itself, a part, or a list of either."""
    if isinstance(value, dict):
        value = value.get("text") or value.get("thinking")
    if isinstance(value, list) and depth:
        return "".join(_join_text(item, depth - 1) for item in value)
    return value if isinstance(value, str) else ""


def _split_events(
    reads: Sequence[tuple[float, bytes]],
) -> tuple[list[tuple[float, str, dict[str, Any] | None]], bool, str]:
    """Arrival, data and JSON object of each event; whether there is data; a line that has none.

    Lines end in LF, CR or CRLF, also between reads, and arrive with the read that completes them.
    Lines of data which are no JSON together are events of their own, and what is left at the end
    is an event unless it was cut.
    """
    ends = [*accumulate(len(piece) for _, piece in reads)]
    events = list[tuple[float, str, dict[str, Any] | None]]()
    lines = list[tuple[float, str]]()
    framed = False
    stray = ""
    offset = 0
    body = b"".join(piece for _, piece in reads)
    for line in (*body.splitlines(keepends=True), b""):
        content = line.rstrip(b"\r\n")
        field, _, value = content.decode("utf-8-sig", errors="replace").partition(":")
        if field == "data":
            completed = min(bisect_right(ends, offset + len(content)), len(reads) - 1)
            lines.append((reads[completed][0], value.removeprefix(" ")))
            framed = True
        elif field not in ("", "event", "id", "retry"):
            stray = stray or content.decode(errors="replace")
        elif not content and lines:
            data = "\n".join(value for _, value in lines)
            chunk = _parse_object(data)
            if chunk is not None or len(lines) == 1:
                lines = [(lines[-1][0], data)]
            split = [
                (arrived, value, chunk or _parse_object(value))
                for arrived, value in lines
            ]
            if not line and split[-1][2] is None and split[-1][1].strip() != "[DONE]":
                stray = split.pop()[1]
            events += split
            lines = []
        offset += len(line)
    return events, framed, stray


def _parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is, if it is one."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        return value if isinstance(value, dict) else None
    return None


def _list_objects(value: object) -> list[dict[str, Any]]:
    """The JSON objects in a list, if it is one."""
    return (
        [item for item in value if isinstance(item, dict)]
        if isinstance(value, list)
        else []
    )
