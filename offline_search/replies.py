"""Replies of a language model: the schema that is requested, and how drafts are read from them."""

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
"""Largest length of a valid reply; a proposal has about a thousand characters."""

UNFINISHED = "<think>"
"""Mark in place of thoughts that no answer follows."""

_TAG = r"(?:\w+:)?(?:think(?:ing)?|thoughts?|reasoning)"
_THOUGHTS = re.compile(
    rf"<{_TAG}>|\[THINK\]|◁think▷|<\|START_THINKING\|>|<\|channel\|>analysis<\|message\|>"
    rf"|(?P<end></{_TAG}>|\[/THINK\]|◁/think▷|<\|END_THINKING\|>"
    r"|<\|channel\|>final\b[^{]{0,40}?<\|message\|>|assistantfinal(?:json)?)",
    re.IGNORECASE,
)
"""Marks at which thoughts begin or end: those of Qwen and DeepSeek, Mistral, Kimi, Cohere, and both
forms of gpt-oss."""


def remove_thoughts(text: str) -> str:
    """A reply without its thoughts; ends with :data:`UNFINISHED` if the last ones have no end."""
    answer = list[str]()
    begin = 0
    thinking = False
    for tag in _THOUGHTS.finditer(text):
        if tag["end"]:
            if not thinking:  # the prompt began the thoughts
                answer.clear()
            begin = tag.end()
            thinking = False
        elif not thinking:
            answer.append(text[begin : tag.start()])
            thinking = True
    return "".join([*answer, UNFINISHED if thinking else text[begin:]])


def parse_reply(
    text: str,
    settings: Settings,
    default: Draft,
    count: int = 0,
    names: Collection[str] = (),
) -> list[Draft]:
    """Read the only draft in a reply, or ``count`` drafts of its list; other text is ignored.

    Every proposal is read by itself, so that an invalid or cut one does not affect the others.
    Origin and parents are those of ``default``, unless a proposal of a list names one of ``names``
    as its parent. Never raises: an invalid or missing proposal becomes a draft with problems.
    """
    answer = remove_thoughts(text)
    texts = _split_proposals(answer, count or 1)
    drafts: list[Draft] = []
    # If there is no proposal, the problem is that of the whole reply.
    for proposal in texts or [answer]:
        body: JsonObject = {}
        try:
            body = _parse_object(proposal)
            draft = replace(default, state=assemble_state(body, settings))
        except StateError as error:
            draft = replace(default, problems=error.problems)
        if count and body:
            hypothesis = _read_hypothesis(body)
            parents = _read_parents(body, names, default.parents)
            draft = replace(draft, hypothesis=hypothesis, parents=parents)
        drafts.append(draft)
    if not count:
        return drafts
    what = f"the reply has {len(texts)} of {count} proposals"
    missing = Problem("", what, "write all of them")
    return drafts + [replace(default, problems=(missing,))] * (count - len(drafts))


def _parse_object(text: str) -> JsonObject:
    """The JSON object in a text; raises :class:`StateError` with the reason if there is none."""
    begin = text.find("{")
    end = text.rfind("}")
    what = ""
    if not text.strip():
        what = "the reply is empty"
    elif len(text) > MAX_REPLY_CHARACTERS:
        what = f"the reply has {len(text)} characters"
    elif begin < 0 and text.endswith(UNFINISHED):
        what = "the reply holds thoughts and no answer"
    elif begin < 0:
        what = "the reply holds no JSON object"
    elif end < begin:
        what = "the reply ends within its JSON object"
    if what:
        fix = f"write one JSON object with {', '.join(COMPONENTS)}"
        raise StateError.of("", what, fix, subject="proposal")
    return _object(parse_json(text[begin : end + 1]))


def _read_hypothesis(proposal: JsonObject) -> Hypothesis:
    """Purpose, reason and expectation of a proposal; invalid values count as absent."""
    purpose = proposal.get("purpose")
    if not isinstance(purpose, str) or purpose not in PURPOSES:
        purpose = ""
    reason = proposal.get("hypothesis")
    text = one_line(reason, MAX_HYPOTHESIS) if isinstance(reason, str) else ""
    expect: Expectation = "higher"
    for word in get_args(Expectation):
        if word == proposal.get("expect"):
            expect = word
    return Hypothesis(purpose=purpose, text=text, expect=expect)


def _read_parents(
    proposal: JsonObject, names: Collection[str], default: tuple[str, ...]
) -> tuple[str, ...]:
    """The parent that a proposal names if it is in ``names``; empty if it is the base policy."""
    parent = proposal.get("parent")
    if parent == BASE_PARENT:
        return ()
    if isinstance(parent, str) and parent in names:
        return (parent,)
    return default


@dataclass(slots=True)
class _Bracket:
    """An open bracket of a reply, with its keys among components, and the objects inside."""

    mark: str
    start: int
    keys: set[str] = field(default_factory=set)
    objects: list[tuple[str, bool]] = field(default_factory=list)
    """Text of each object, and whether it is a proposal or is in a list with one."""

    @property
    def proposals(self) -> list[str]:
        """Texts of the proposals among its objects."""
        return [text for text, is_proposal in self.objects if is_proposal]


_MARKS = re.compile(rf'"({"|".join((*COMPONENTS, PROPOSALS))})"\s*:|\\.|["\n{{}}\[\]]')
_QUOTED_JSON = re.compile(r'"\s*[\[{](?:\\[nrt]|[\s\[{])*\\"')
_OPENING = {"}": "{", "]": "["}


class _BracketParser:
    """Finds the objects and lists of a text, closed or not, in one pass.

    The first bracket of ``opened`` stands for the whole text. ``numbers`` counts open brackets by
    their mark, so that a closing bracket without an opening one is skipped in constant time.
    """

    def __init__(self, text: str) -> None:
        self.lists: list[list[str]] = []
        self.opened = [_Bracket("", 0)]
        self._text = text
        self._numbers = Counter[str]()
        quoted = False
        for match in _MARKS.finditer(text):
            mark = match[0]
            if mark == '"':
                quoted = not quoted and len(self.opened) > 1
            elif mark == "\n":
                # JSON strings have no line breaks, so a quote in prose ends with its line.
                quoted = False
            elif quoted or mark[0] == "\\":
                continue
            elif match[1]:
                self.opened[-1].keys.add(match[1])
            elif mark in "{[":
                self.opened.append(_Bracket(mark, match.start()))
                self._numbers[mark] += 1
            elif self._numbers[_OPENING[mark]]:
                self._close(_OPENING[mark], match.end())
        while len(self.opened) > 1:
            self._drop_unclosed()

    def _close(self, mark: str, end: int) -> None:
        """Close the last open bracket ``mark``, and move its objects to the bracket around it."""
        while self.opened[-1].mark != mark:
            self._numbers[self.opened[-1].mark] -= 1
            self._drop_unclosed()
        self._numbers[mark] -= 1
        bracket = self.opened.pop()
        objects = bracket.objects
        is_component = bool(bracket.keys - {PROPOSALS})
        if mark == "[" and bracket.proposals:
            objects = [(text, True) for text, _ in objects]
            self.lists.append([text for text, _ in objects])
        elif mark == "{" and (is_component or not (bracket.proposals or bracket.keys)):
            objects = [(self._text[bracket.start : end], is_component)]
        self.opened[-1].objects += objects

    def _drop_unclosed(self) -> None:
        """Drop the last open bracket, which is prose or was cut off; its proposals are kept."""
        unclosed = self.opened.pop()
        self.opened[-1].objects += [(text, True) for text in unclosed.proposals]


def _split_proposals(text: str, count: int) -> list[str]:
    """Texts of at most ``count`` proposals in ``text``; they may be invalid JSON.

    A proposal is the innermost object that has a component. The last list that is long enough
    counts; if there is none, the last proposals do, because earlier ones are drafts. Without a
    proposal, other objects are returned.
    """
    parsed = _BracketParser(text)
    for texts in reversed(parsed.lists):
        if len(texts) >= count:
            return texts[:count]
    (root,) = parsed.opened
    proposals = root.proposals
    if not proposals:
        for literal in islice(_QUOTED_JSON.finditer(text), 20):
            with suppress(json.JSONDecodeError):
                unquoted, _ = json.JSONDecoder().raw_decode(text, literal.start())
                proposals += _split_proposals(unquoted, count)
    return proposals[-count:] or [item for item, _ in root.objects[:count]]


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


class _SchemaReducer:
    """Reduces the schema of a state to that of a search's proposals.

    Atoms that take the same parameters become one alternative, which halves the schema: the 81
    atoms of reassembly, for example, have thirteen forms.
    """

    def __init__(self, definitions: JsonObject, settings: Settings) -> None:
        self._definitions = definitions
        self._settings = settings
        self._excluded = excluded_atoms(settings)

    def _reduce(self, value: JsonValue) -> JsonValue:
        """A part of the schema, with references replaced by the definitions that they name."""
        if isinstance(value, list):
            return [self._reduce(item) for item in value]
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if not isinstance(value, dict):
            return value
        if isinstance(reference := value.get("$ref"), str):
            return self._reduce(self._definitions[reference.rpartition("/")[2]])
        unused = {*_UNUSED_KEYWORDS}
        if "enum" in value or "const" in value:  # the type follows from the values
            unused.add("type")
        reduced: JsonObject = {}
        for keyword, item in value.items():
            if keyword in ("anyOf", "oneOf") and isinstance(item, list):
                # `anyOf` is equivalent here, because branches differ in a constant, and every
                # engine for constrained output supports it.
                reduced["anyOf"] = self._merge(
                    [self._reduce(branch) for branch in item]
                )
            elif keyword == "properties":
                reduced[keyword] = self.reduce_fields(_object(item))
            elif keyword not in unused:
                reduced[keyword] = self._reduce(item)
        return reduced

    def reduce_fields(self, fields: JsonObject) -> JsonObject:
        """Reduce fields: limit list lengths and q_e, and drop r_min if it follows from q_e."""
        settings = self._settings
        reduced = {name: self._reduce(item) for name, item in fields.items()}
        if settings.library != "paper":
            reduced.pop("r_min", None)
        for name, item in reduced.items():
            if name in _MAX_ITEMS:
                _object(item)["maxItems"] = _MAX_ITEMS[name]
            elif name == "q_e":
                largest = min(settings.source_budget, MAX_QUOTA)
                if settings.space == "without-anchoring":  # q_e is fixed there
                    largest = MAX_QUOTA
                _object(item)["maximum"] = largest
        return reduced

    def _merge(self, alternatives: list[JsonValue]) -> list[JsonValue]:
        """Merge alternatives that differ in the atom's name alone, and drop excluded atoms."""
        atoms: dict[str, list[JsonValue]] = {}
        for alternative in alternatives:
            constant = _atom_schema(alternative)
            form = json.dumps(alternative)
            if not constant:
                atoms[form] = []
            elif constant["const"] not in self._excluded:
                form = form.replace(json.dumps(constant), "ATOM", 1)
                atoms.setdefault(form, []).append(constant["const"])
        return [
            json.loads(form.replace("ATOM", json.dumps({"enum": names}), 1))
            for form, names in atoms.items()
        ]


def _atom_schema(alternative: JsonValue) -> JsonObject:
    """Schema of the atom that an alternative calls; empty if it calls none."""
    fields = alternative.get("properties") if isinstance(alternative, dict) else None
    atom = fields.get("atom") if isinstance(fields, dict) else None
    return atom if isinstance(atom, dict) and "const" in atom else {}


@cache
def _proposal_schema(settings: Settings) -> JsonObject:
    """JSON Schema of a search's proposals, which accepts a subset of a state's schema."""
    schema: JsonObject = PruningState.model_json_schema()
    fields = _object(schema["properties"])
    reducer = _SchemaReducer(_object(schema["$defs"]), settings)
    properties = reducer.reduce_fields(
        {name: fields[name] for name in searched_components(settings)}
    )
    _object(properties["scoring"])["required"] = ["signals", "fusion"]  # no kernel
    required: list[JsonValue] = [*COMPONENTS]
    if settings.bases:
        name: JsonObject = {"enum": list(settings.bases)}
        properties[BASE] = _closed_object({"name": name}, ["name"])
        required.append(BASE)
    return _closed_object(properties, required)


@cache
def reply_schema(settings: Settings, count: int = 0) -> JsonObject:
    """JSON Schema of a reply: a proposal, or a list of ``count`` proposals with hypotheses."""
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
