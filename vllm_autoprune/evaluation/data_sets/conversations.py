"""Conversations of ShareGPT, LLaVA, LLaMA-Factory and ms-swift, and chat requests of logs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.asked_question import AskedQuestion, render
from vllm_autoprune.evaluation.data_sets.chat_parts import read_part
from vllm_autoprune.evaluation.data_sets.registry import (
    Record,
    data_set,
    list_media,
    list_texts,
)
from vllm_autoprune.evaluation.pictures import PictureSource
from vllm_autoprune.evaluation.records import parse

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
}
"""Roles of chat requests by the names that conversations use; other names are not changed."""
_WITHOUT_PICTURE = "without a picture"


def unwrap_request(record: Any) -> Any:
    """The body of a logged chat request, which may be JSON text; other records are not changed.

    DashScope puts the messages into ``input``; Anthropic's batches put the request into ``params``.
    """
    body = record
    for name in ("request", "params", "body", "request_body", "input"):
        inner = body.get(name) if isinstance(body, dict) else None
        inner = parse(inner) if isinstance(inner, str) else inner
        body = inner if isinstance(inner, dict) else body
    is_request = isinstance(body, dict) and (
        isinstance(body.get("messages"), list) or _is_responses(body.get("input"))
    )
    return body if is_request else record


def _is_responses(value: object) -> bool:
    """Whether ``value`` is the ``input`` of a request to the Responses API."""
    return isinstance(value, list) and any(
        isinstance(item, dict) and "role" in item for item in value
    )


@data_set("messages", others="images image videos video system solution")
def read_messages(record: Record) -> AskedQuestion | str:
    """Chat messages in the form of OpenAI, Anthropic or Qwen, or with media in columns beside."""
    return read_turns(record, record.fields["messages"])


@data_set("conversations", others="images image videos video system")
def read_conversation(record: Record) -> AskedQuestion | str:
    """A conversation of ShareGPT's or LLaVA's form."""
    return read_turns(record, record.fields["conversations"])


@data_set("input", without="question instruction query image")
def read_responses(record: Record) -> AskedQuestion | str:
    """A request of the Responses API, whose system prompt is ``instructions``."""
    items = record.fields["input"]
    if not _is_responses(items):
        return _WITHOUT_PICTURE
    system = record.fields.get("instructions")
    fields = {**record.fields, "system": system}
    messages = [item for item in items if item.get("type") != "reasoning"]
    return read_turns(record._replace(fields=fields), messages)


@data_set("query response images", others="system history")
@data_set("query response videos", others="system history")
def read_query(record: Record) -> AskedQuestion | str:
    """A question of ms-swift's form with ``query`` and ``response``."""
    return _read_pair(record, "query", "", "response")


@data_set("instruction input output images", others="system history")
@data_set("instruction input output videos", others="system history")
def read_instruction(record: Record) -> AskedQuestion | str:
    """A question of Alpaca's form with pictures, as LLaMA-Factory reads it."""
    return _read_pair(record, "instruction", "input", "output")


def _read_pair(
    record: Record, query: str, more: str, response: str
) -> AskedQuestion | str:
    """A conversation: ``history``, then a question in ``query`` and ``more`` with its response."""
    fields = record.fields
    history = fields.get("history")
    pairs = list(history) if isinstance(history, list) else []
    text = "\n".join(str(fields[name]) for name in (query, more) if fields.get(name))
    messages = [
        {"role": role, "content": content}
        for pair in [*pairs, [text, fields[response]]]
        for role, content in zip(("user", "assistant"), pair, strict=False)
    ]
    return read_turns(record, messages)


def read_turns(record: Record, turns: object) -> AskedQuestion | str:
    """The question that ``turns`` ask; if the last turn is the assistant's, it is the answer.

    A turn has a ``role`` and ``content``, or ``from`` and ``value``. Returns the reason why the
    record is left out if no turn has media.
    """
    turns = parse(turns) if isinstance(turns, str) else turns
    messages = list[dict[str, Any]]()
    for turn in turns if isinstance(turns, list) else [turns]:
        messages.append(_read_turn(record, turn))
    if system := record.fields.get("system"):
        messages.insert(0, {"role": "system", "content": system})
    _place_media(record, messages)
    for message in messages:
        parts = message["content"]
        if isinstance(parts, list) and parts:
            message["content"] = [read_part(record, part) for part in parts]
    answer = ""
    if messages and messages[-1]["role"] == "assistant":
        answer = _join_text(messages.pop()["content"])
    sources = list[PictureSource]()
    render(messages, sources.append)
    if not sources:
        return _WITHOUT_PICTURE
    answers = [answer] if answer.strip() else list_texts(record.fields.get("solution"))
    return AskedQuestion(record.where, messages, tuple(map(str, answers)))


def _read_turn(record: Record, turn: object) -> dict[str, Any]:
    """``turn`` as a message with a role and content; other fields, such as tool calls, stay."""
    if isinstance(turn, dict):
        fields = dict(turn)
        if "from" in fields:
            fields["role"] = fields.pop("from")
            fields["content"] = fields.pop("value", None)
        if isinstance(role := fields.get("role"), str):
            content = fields.get("content")
            return {**fields, "role": _ROLES.get(role, role), "content": content}
    what = "has a message without a role"
    fix = "give each a role and its content"
    raise ConfigError.of(record.where, what, fix, subject="data")


def _join_text(content: object) -> str:
    """The text of a message's content."""
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    return "".join(
        str(part.get("text", "")) for part in parts if isinstance(part, dict)
    )


_MARK = re.compile("(<image>|<video>|<img>[^<]+</img>)")


def _place_media(record: Record, messages: Sequence[dict[str, Any]]) -> None:
    """Replace the marks in ``messages`` by the media in columns of ``record``.

    Without marks, the media are put before the user's first text, as in ms-swift. Raises
    :class:`ConfigError` if the number of marks is not that of the media.
    """
    fields = record.fields
    media = {
        "<image>": list_media(fields.get("images") or fields.get("image")),
        "<video>": list_media(fields.get("videos") or fields.get("video")),
    }
    if media["<video>"] and not media["<image>"]:
        # LLaVA marks a video with <image> too.
        for message in messages:
            if isinstance(message["content"], str):
                message["content"] = message["content"].replace("<image>", "<video>")
    split = [_split_marks(message["content"]) for message in messages]
    for mark, names in media.items():
        count = sum(parts.count(mark) for parts in split)
        roles = [message["role"] for message in messages]
        if names and count == 0 and "user" in roles:
            split[roles.index("user")][:0] = [mark] * len(names)
        elif count != len(names) and (names or "conversations" in fields):
            what = f"has {len(names)} files for {count} {mark}"
            raise ConfigError.of(
                record.where, what, "give one for each", subject="data"
            )
    queues = {mark: iter(names) for mark, names in media.items() if names}
    for message, parts in zip(messages, split, strict=True):
        placed = [_place(part, queues) for part in parts]
        if placed != parts:
            message["content"] = placed


def _split_marks(content: object) -> list[object]:
    """The parts of a message's ``content``, split so that every mark is a part of its own."""
    if isinstance(content, str):
        return [piece.strip() for piece in _MARK.split(content) if piece.strip()]
    parts = content if isinstance(content, list) else []
    return [_read_mark(part) for part in parts]


def _read_mark(part: object) -> object:
    """The mark for a part of TRL that has only a ``type``; other parts are returned unchanged."""
    if isinstance(part, dict) and [n for n in part if part[n] is not None] == ["type"]:
        return f"<{part['type']}>"
    return part


def _place(part: object, queues: Mapping[str, Iterator[object]]) -> object:
    """``part`` with a mark replaced by the next file of its queue, or by the one that it names.

    Qwen's ``<img>`` marks name their file. Parts that are no mark are returned unchanged.
    """
    if not isinstance(part, str):
        return part
    if part in queues:
        return {"image": next(queues[part])}
    if _MARK.fullmatch(part) and part.startswith("<img>"):
        return {"image": part.removeprefix("<img>").removesuffix("</img>")}
    return part
