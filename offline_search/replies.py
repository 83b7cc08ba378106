"""Replies of a language model: the schema that they are asked for, and the drafts read of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import get_args

from pydantic import JsonValue

from offline_search.candidates import (
    BASE_PARENT,
    MAX_HYPOTHESIS,
    PROPOSALS,
    PURPOSES,
    Draft,
    Expectation,
    Hypothesis,
    assemble_state,
)
from offline_search.components import BASE, COMPONENTS, JsonObject, searched_components
from offline_search.search_space import excluded_atoms
from offline_search.settings import MAX_QUOTA, Settings
from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.stream import one_line
from vllm_autoprune.tpdsl.loading import parse_json
from vllm_autoprune.tpdsl.state import PruningState

MAX_REPLY_CHARACTERS = 20_000
"""Longer replies are invalid; a proposal has about a thousand characters."""

UNFINISHED = "<think>"
"""Stands for thoughts that no answer follows."""

_TAG = r"(?:\w+:)?(?:think(?:ing)?|thoughts?|reasoning)"
_THOUGHTS = re.compile(
    rf"<{_TAG}>|\[THINK\]|◁think▷|<\|START_THINKING\|>|<\|channel\|>analysis<\|message\|>"
    rf"|(?P<end></{_TAG}>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>"
    r"|<\|channel\|>final\b[^{]{0,40}?<\|message\|>|assistantfinal(?:json)?)",
    re.IGNORECASE,
)
"""Where thoughts begin or end: Qwen and DeepSeek, Mistral, Kimi, Cohere; gpt-oss in both forms."""


def remove_thoughts(text: str) -> str:
    """A reply without its thoughts; ends with :data:`UNFINISHED` where the last have no end."""
    answer = list[str]()
    begin = 0
    thinking = False
    for tag in _THOUGHTS.finditer(text):
        if tag["end"]:
            if not thinking:  # they began in the prompt
                answer.clear()
            begin = tag.end()
            thinking = False
        elif not thinking:
            answer.append(text[begin : tag.start()])
            thinking = True
    return "".join([*answer, UNFINISHED if thinking else text[begin:]])


def parse_reply(  # noqa: C901
    text: str,
    settings: Settings,
    default: Draft,
    count: int = 0,
    names: Collection[str] = (),
) -> list[Draft]:
    """The only draft in a reply, or with a ``count`` those of its list; the rest is ignored.

    Each proposal is read by itself, in whatever text it stands, so that one that is invalid or cut
    off spoils no other. Origin and parents are those of ``default``, unless a proposal of a list
    names one of ``names`` as its parent. Never raises: what is invalid or missing is a draft with
    problems.
    """
    answer = remove_thoughts(text)
    texts = _split_proposals(answer, count or 1)
    # Without one the reply as a whole has the problem.
    drafts = list[Draft]()
    for item_text in texts or [answer]:
        begin = item_text.find("{")
        end = item_text.rfind("}")
        item: JsonObject = {}
        what = ""
        if not item_text.strip():
            what = "the reply is empty"
        elif len(item_text) > MAX_REPLY_CHARACTERS:
            what = f"the reply has {len(item_text)} characters"
        elif begin < 0:
            what = "the reply holds no JSON object"
            if item_text.endswith(UNFINISHED):
                what = "the reply holds thoughts and no answer"
        elif end < begin:
            what = "the reply ends within its JSON object"
        try:
            if what:
                fix = f"write one JSON object with {', '.join(COMPONENTS)}"
                raise StateError("proposal", [Problem("", what, fix)])
            parsed = parse_json(item_text[begin : end + 1], "proposal")
            assert isinstance(parsed, dict)  # it begins with a brace
            item = parsed
            draft = replace(default, state=assemble_state(item, settings))
        except StateError as error:
            draft = replace(default, problems=error.problems)
        if count and item:
            # What it says beside the policy; other values count as left out.
            fields = ("parent", "purpose", "hypothesis", "expect")
            parent, purpose, reason, expect = (item.get(name) for name in fields)
            if isinstance(parent, str) and (parent == BASE_PARENT or parent in names):
                draft = replace(
                    draft, parents=() if parent == BASE_PARENT else (parent,)
                )
            hypothesis = Hypothesis(
                purpose=purpose
                if isinstance(purpose, str) and purpose in PURPOSES
                else "",
                text=one_line(reason, MAX_HYPOTHESIS)
                if isinstance(reason, str)
                else "",
                expect=next(
                    (word for word in get_args(Expectation) if word == expect), "higher"
                ),
            )
            draft = replace(draft, hypothesis=hypothesis)
        drafts.append(draft)
    if not count:
        return drafts
    what = f"the reply has {len(texts)} of {count} proposals"
    missing = Problem("", what, "write all of them")
    return drafts + [replace(default, problems=(missing,))] * (count - len(drafts))


@dataclass(slots=True)
class _Bracket:
    """An open bracket of a reply: its keys that are looked for, and the objects found inside."""

    mark: str
    place: int
    keys: set[str] = field(default_factory=set)
    found: list[tuple[str, bool]] = field(default_factory=list)
    """Texts, and whether each is a proposal or stands in a list with one."""


_MARKS = re.compile(rf'"({"|".join((*COMPONENTS, PROPOSALS))})"\s*:|\\.|["\n{{}}\[\]]')
_QUOTED_JSON = re.compile(r'"\s*[\[{](?:\\[nrt]|[\s\[{])*\\"')
_OPENING = {"}": "{", "]": "["}


def _split_proposals(text: str, count: int) -> list[str]:  # noqa: C901
    """Texts of at most ``count`` proposals in a text, complete or not valid JSON.

    A proposal is the innermost object with a component, in whatever it is wrapped. Of several lists
    the last that is long enough counts, without one the last objects: earlier ones are drafts.
    Without a proposal, all objects are returned.
    """
    opened = [_Bracket("", 0)]
    lists = list[list[str]]()
    numbers = Counter[str]()
    quoted = False
    for match in _MARKS.finditer(text):
        mark = match[0]
        bracket = opened[-1]
        if mark == '"':
            quoted = not quoted and len(opened) > 1
        elif mark == "\n":
            quoted = (
                False  # no string has one, so that a quote in prose ends with its line
            )
        elif quoted or mark[0] == "\\":
            continue
        elif match[1]:
            bracket.keys.add(match[1])
        elif mark in "{[":
            opened.append(_Bracket(mark, match.start()))
            numbers[mark] += 1
        elif numbers[_OPENING[mark]]:
            while opened[-1].mark != _OPENING[mark]:
                numbers[opened[-1].mark] -= 1
                _drop_unclosed(opened)
            numbers[_OPENING[mark]] -= 1
            bracket = opened.pop()
            found, proposes = bracket.found, any(valid for _, valid in bracket.found)
            if mark == "]" and proposes:
                found = [(item, True) for item, _ in found]
                lists.append([item for item, _ in found])
            elif mark == "}" and (component := bracket.keys - {PROPOSALS}):
                found = [(text[bracket.place : match.end()], bool(component))]
            elif mark == "}" and not proposes and PROPOSALS not in bracket.keys:
                found = [(text[bracket.place : match.end()], False)]
            opened[-1].found += found
    while len(opened) > 1:
        _drop_unclosed(opened)
    for items in reversed(lists):
        if len(items) >= count:
            return items[:count]
    proposals = [item for item, valid in opened[0].found if valid]
    if not proposals:
        for literal in islice(_QUOTED_JSON.finditer(text), 20):
            with suppress(json.JSONDecodeError):
                unquoted, _ = json.JSONDecoder().raw_decode(text, literal.start())
                proposals += _split_proposals(unquoted, count)
    return proposals[-count:] or [item for item, _ in opened[0].found[:count]]


def _drop_unclosed(opened: list[_Bracket]) -> None:
    """Take the last bracket for prose, or for what a reply was cut off in."""
    unclosed = opened.pop()
    opened[-1].found += [(item, valid) for item, valid in unclosed.found if valid]


# Limits on list lengths, so that a small model's constrained output comes to an end.
_MAX_ITEMS = {"signals": 6, "pool": 3}

# Schema keywords that do not constrain the output.
_UNUSED_KEYWORDS = (
    "title",
    "description",
    "discriminator",
    "default",
    "allOf",
    "$schema",
    "$id",
)


@cache
def _proposal_schema(settings: Settings) -> JsonObject:  # noqa: C901
    """JSON Schema of a proposal of a search: accepts a subset of what a state accepts.

    Atoms that take the same parameters are one alternative, so that it is about a third as long as
    the state's: the 81 atoms of reassembly, for example, have twelve forms.
    """
    schema: JsonObject = PruningState.model_json_schema()
    definitions = _object(schema["$defs"])
    fields = _object(schema["properties"])
    excluded = excluded_atoms(settings)

    def reduce(value: JsonValue) -> JsonValue:
        """A part of the schema with what it refers to in place of the reference."""
        if isinstance(value, list):
            return [reduce(item) for item in value]
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if not isinstance(value, dict):
            return value
        if isinstance(reference := value.get("$ref"), str):
            return reduce(definitions[reference.rpartition("/")[2]])
        typed = "enum" in value or "const" in value  # its values have their type
        reduced: JsonObject = {}
        for keyword, item in value.items():
            if keyword in ("anyOf", "oneOf") and isinstance(item, list):
                # Equivalent here, because branches differ in a constant, and `anyOf` is supported
                # by every engine for constrained output.
                reduced["anyOf"] = merge([reduce(alternative) for alternative in item])
            elif keyword == "properties":
                reduced[keyword] = reduce_fields(_object(item))
            elif keyword not in _UNUSED_KEYWORDS and not (typed and keyword == "type"):
                reduced[keyword] = reduce(item)
        return reduced

    def reduce_fields(values: JsonObject) -> JsonObject:
        """Fields with limits on lists and q_e, without r_min where it follows."""
        reduced = {name: reduce(item) for name, item in values.items()}
        if settings.library != "paper":
            reduced.pop("r_min", None)
        for name, item in reduced.items():
            if name in _MAX_ITEMS:
                _object(item)["maxItems"] = _MAX_ITEMS[name]
            elif name == "q_e":
                _object(item)["maximum"] = min(settings.source_budget, MAX_QUOTA)
        return reduced

    def merge(alternatives: list[JsonValue]) -> list[JsonValue]:
        """One alternative for all offered atoms that take the same parameters."""
        atoms: dict[str, list[JsonValue]] = {}
        for alternative in alternatives:
            parts = (
                alternative.get("properties") if isinstance(alternative, dict) else None
            )
            called = parts.get("atom") if isinstance(parts, dict) else None
            atom = called.get("const") if isinstance(called, dict) else None
            if atom is None:
                atoms[json.dumps(alternative)] = []
            elif atom not in excluded:
                form = json.dumps(alternative).replace(json.dumps(called), "ATOM", 1)
                atoms.setdefault(form, []).append(atom)
        return [
            json.loads(form.replace("ATOM", json.dumps({"enum": names}), 1))
            for form, names in atoms.items()
        ]

    properties = reduce_fields(
        {name: fields[name] for name in searched_components(settings)}
    )
    required: list[JsonValue] = [*COMPONENTS]
    if settings.bases:
        name: JsonObject = {"enum": list(settings.bases)}
        properties[BASE] = _closed_object({"name": name}, ["name"])
        required.append(BASE)
    return _closed_object(properties, required)


@cache
def reply_schema(settings: Settings, count: int = 0) -> JsonObject:
    """JSON Schema of a reply: a proposal, or a list of ``count``, each with its hypothesis."""
    proposal = _proposal_schema(settings)
    if not count:
        return proposal
    hypothesis: JsonObject = {
        "purpose": {"enum": list(PURPOSES)},
        "hypothesis": {"type": "string", "maxLength": MAX_HYPOTHESIS},
        "parent": {"type": "string", "maxLength": 8},
        "expect": {"enum": list(get_args(Expectation))},
    }
    required = proposal["required"]
    assert isinstance(required, list)
    item = _closed_object(
        {**hypothesis, **_object(proposal["properties"])}, [*hypothesis, *required]
    )
    items: JsonObject = {
        "type": "array",
        "items": item,
        "minItems": count,
        "maxItems": count,
    }
    return _closed_object({PROPOSALS: items}, [PROPOSALS])


def _closed_object(properties: JsonObject, required: list[JsonValue]) -> JsonObject:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _object(value: JsonValue) -> JsonObject:
    assert isinstance(value, dict), "a part of a JSON Schema that is an object"
    return value
