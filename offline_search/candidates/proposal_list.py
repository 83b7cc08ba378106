"""Replies with a list of proposals, each with its hypothesis and the candidate it changes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from offline_search.candidates.components import JsonObject
from offline_search.candidates.hypothesis import BASE_PARENT, hypothesis_fields, parse_hypothesis
from offline_search.candidates.proposal import Draft, parse_object, parse_proposal
from offline_search.settings import Settings
from vllm_autoprune.errors import Problem, StateError

PROPOSALS = "proposals"
"""The one field of the reply."""


def list_schema(schema: JsonObject, count: int) -> JsonObject:
    """JSON Schema of ``count`` proposals, given that of one."""
    one = {name: part for name, part in schema.items() if name != "$defs"}
    fields, properties, required = hypothesis_fields(), one["properties"], one["required"]
    assert isinstance(properties, dict) and isinstance(required, list)
    one |= {"properties": {**fields, **properties}, "required": [*fields, *required]}
    items: JsonObject = {"type": "array", "items": one, "minItems": count, "maxItems": count}
    return {
        "type": "object",
        "properties": {PROPOSALS: items},
        "required": [PROPOSALS],
        "additionalProperties": False,
        "$defs": schema["$defs"],
    }


def parse_list(
    text: str, settings: Settings, count: int, default: Draft, names: Collection[str]
) -> list[Draft]:
    """The ``count`` drafts in a reply; what it has beyond them is ignored.

    Each proposal is read by itself, so that one that is invalid or cut off spoils no other. Origin
    and parents are those of ``default``, unless a proposal names one of ``names`` as its parent.
    Never raises: missing proposals are drafts with a problem.
    """
    texts = [one for one, _ in zip(_split_objects(text), range(count), strict=False)]
    drafts = [_parse_item(one, settings, default, names) for one in texts]
    if not drafts:  # the reply as a whole has the problem
        drafts = [parse_proposal(text, settings, default.origin, default.parents)]
    what = f"the reply has {len(texts)} of {count} proposals"
    missing = Problem("", what, "write all of them", "reply.missing")
    return drafts + [replace(default, problems=(missing,))] * (count - len(drafts))


def _parse_item(text: str, settings: Settings, default: Draft, names: Collection[str]) -> Draft:
    draft = parse_proposal(text, settings, default.origin, default.parents)
    try:
        item = parse_object(text)
    except StateError:
        return draft
    parent = item.get("parent")
    if parent == BASE_PARENT:
        draft = replace(draft, parents=())
    elif isinstance(parent, str) and parent in names:
        draft = replace(draft, parents=(parent,))
    return replace(draft, hypothesis=parse_hypothesis(item))


def _split_objects(text: str) -> Iterator[str]:
    """Texts of the complete objects of a list, or of those that stand without one."""
    wrapped = text.find(f'"{PROPOSALS}"')
    begin = text.find("[", max(0, wrapped))
    if wrapped < 0 and (begin < 0 or 0 <= text.find("{") < begin):
        begin = -1  # the first bracket is within an object
    depth, start, quoted, escaped = 0, 0, False, False
    for place in range(begin + 1, len(text)):
        character = text[place]
        if quoted:
            quoted = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            quoted = depth > 0
        elif character == "{":
            start = start if depth else place
            depth += 1
        elif character == "}" and depth:
            depth -= 1
            if not depth:
                yield text[start : place + 1]
        elif character == "]" and not depth and begin >= 0:
            return
