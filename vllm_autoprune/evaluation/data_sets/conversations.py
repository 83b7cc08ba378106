"""Chat requests as servers and gateways log them, and conversations of LLaVA's form."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.asked_question import AskedQuestion, render
from vllm_autoprune.evaluation.data_sets.registry import Record, data_set, list_texts
from vllm_autoprune.evaluation.pictures import PictureSource
from vllm_autoprune.evaluation.records import parse
from vllm_autoprune.stream import one_line

_CHAT = "give chat messages of OpenAI's form, with text and image_url"


def unwrap_request(record: Any) -> Any:
    """The body of a chat request, which a gateway may log as text; another record as it is."""
    body = record
    for name in ("request", "body"):
        inner = body.get(name) if isinstance(body, dict) else None
        inner = parse(inner) if isinstance(inner, str) else inner
        body = inner if isinstance(inner, dict) else body
    if isinstance(body, dict) and isinstance(body.get("messages"), list):
        return body
    return record


@data_set("messages")
def read_request(record: Record) -> AskedQuestion | None:
    """The question of a chat request."""
    return _read_chat(record, record.fields["messages"])


@data_set("conversations")
def read_conversation(record: Record) -> AskedQuestion | None:
    """The question of a conversation of LLaVA's form with its images."""
    names = iter(list_texts(record.fields.get("image")))
    turns = record.fields["conversations"]
    if isinstance(turns, list):
        turns = [_convert_turn(turn, names) for turn in turns]
    return _read_chat(record, turns)


def _convert_turn(turn: object, names: Iterator[object]) -> object:
    """The message of a turn of LLaVA's form, whose next images have these names."""
    match turn:
        case {"from": str(role), "value": str(text)}:
            pieces = [piece for piece in re.split("(<image>)", text) if piece.strip()]
            parts = [
                {"image_url": next(names, piece)}
                if piece == "<image>"
                else piece.strip()
                for piece in pieces
            ]
            role = {"human": "user", "gpt": "assistant"}.get(role, role)
            return {"role": role, "content": parts}
    return turn


def _read_chat(record: Record, messages: object) -> AskedQuestion | None:
    """The question of messages, whose last turn is its answer if it is the assistant's."""
    turns = list[dict[str, Any]]()
    for message in messages if isinstance(messages, list) else [messages]:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            what = "has a message without a role"
            raise ConfigError.of(record.where, what, _CHAT, subject="data")
        content = message.get("content")
        if isinstance(content, list) and content:
            content = [_read_part(record, part) for part in content]
        turns.append({**message, "content": content})
    answer = None
    if turns and turns[-1]["role"] == "assistant":
        answer = turns.pop()["content"]
    sources = list[PictureSource]()
    render(turns, sources.append)
    if not sources:
        return None
    if isinstance(answer, list):
        answer = "".join(
            part.get("text", "") for part in answer if isinstance(part, dict)
        )
    answers = (answer,) if answer and str(answer).strip() else ()
    return AskedQuestion(record.where, turns, answers)


def _read_part(record: Record, part: object) -> dict[str, str] | PictureSource:
    """The text or the picture of a part of a message."""
    match part:
        case str(text) | {"type": "text" | "input_text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"image_url": {"url": str(url)} | str(url)} | {
            "video_url": {"url": str(url)} | str(url)
        }:
            return record.pictures.find(record.where, url)
    kind = part.get("type") if isinstance(part, dict) else part
    what = f"has a part of type {one_line(kind, 40)!r}"
    raise ConfigError.of(record.where, what, _CHAT, subject="data")
