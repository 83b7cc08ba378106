"""Candidates: the schema of proposals, replies read as such, and the first states of a search.

A proposal in a list has a hypothesis: what its change is for, and the difference it expects.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle, islice
from typing import Literal, get_args

from pydantic import Field, JsonValue

from offline_search.components import (
    BASE,
    COMPONENTS,
    CORE,
    RANK_AT,
    Candidate,
    JsonObject,
    SelectionProgram,
    components_json,
    searched_components,
)
from offline_search.search_space import atom_names, excluded_atoms, project
from offline_search.settings import MAX_QUOTA, Settings
from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.tpdsl.atoms.source import FIXED_BUDGETS
from vllm_autoprune.tpdsl.loading import load_state, parse_json
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.state import SCHEMA, PruningState

Expectation = Literal["higher", "same", "lower"]
"""Expected score of a proposal, compared with its parent's."""

_EXPLORE = "explore"

PURPOSES: Mapping[str, str] = {
    "exploit": "the best candidate with other numbers",
    "ablate": "a candidate without one of its parts, or with that part replaced by a simpler one",
    _EXPLORE: "a structure that is not listed",
    "combine": "parts of two or more candidates",
    "worst_category": "a change for the category with the largest share of the loss",
}
"""What proposals are asked for, in this order, and what each means in a prompt."""

MAX_HYPOTHESIS = 200
"""Length of a hypothesis; a longer one is cut, because prompts repeat it."""

BASE_PARENT = "base"
"""Name of the base policy alone, where a proposal names its parent."""


class Hypothesis(FrozenModel):
    """Purpose, reason and expectation of a proposal; empty where the reply has none."""

    purpose: str = ""
    text: str = Field(default="", max_length=MAX_HYPOTHESIS)
    expect: Expectation = "higher"


def list_purposes(begin: int, count: int, measured: bool) -> Sequence[str]:
    """Purposes of ``count`` proposals, in turn from the place ``begin`` on.

    Before a candidate is measured, all explore.
    """
    return list(islice(cycle(PURPOSES if measured else [_EXPLORE]), begin, begin + count))


_SAFETY_CHECKS = ("preserve_budget", "no_shape_change", "deterministic", "fallback_to_selection")

MAX_REPLY_CHARACTERS = 20_000
"""Longer replies are invalid; a proposal has about a thousand characters."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed candidate: its state, or the problems that make it invalid.

    ``origin`` names the source of the proposal, ``parents`` the earlier candidates that it was
    derived from, ``program`` the code that returned it if the proposal was a program. A candidate
    in free code has ``selection`` in place of a state.
    """

    origin: str
    state: PruningState | None
    problems: tuple[Problem, ...] = ()
    parents: tuple[str, ...] = ()
    program: str = ""
    selection: SelectionProgram | None = None
    hypothesis: Hypothesis | None = None

    @property
    def candidate(self) -> Candidate | None:
        """What is evaluated, or None for an invalid proposal."""
        return self.selection if self.state is None else self.state


def assemble_state(components: Mapping[str, JsonValue], settings: Settings) -> PruningState:
    """The state with these components and the search's base policy, budget and safety checks.

    Raises :class:`StateError` with every problem.
    """
    searched = searched_components(settings)
    parts = {name: components[name] for name in searched if name in components}
    if settings.bases and BASE in components:
        # The name alone, because parameters of base policies are not searched.
        choice = components[BASE]
        name = choice.get("name") if isinstance(choice, dict) else choice
        if name not in settings.bases:
            fix = f"write {' or '.join(settings.bases)}"
            problem = Problem(f"/{BASE}", f"{str(name)[:80]!r} is not offered", fix)
            raise StateError("proposal", [problem])
        parts[BASE] = {"name": name}
    if settings.library == "paper":
        _refuse_extensions(parts)
    # An atom that keeps exactly K tokens: where none has this K, equal floor and ceiling.
    count = settings.source_budget
    budget: JsonObject = {"atom": f"fixed_budget@{count}"}
    if count not in FIXED_BUDGETS:
        budget = {"atom": "ratio_budget", "ratio": 1.0, "floor": count, "ceiling": count}
    chosen = parts.get("budget")
    if isinstance(chosen, dict) and chosen.get("atom") in ATOMS.names("budget_control"):
        # Candidates are instantiated at K_0 (equation 6), so that their scores compare.
        parts["budget"] = {**chosen, **budget, "limit": chosen.get("limit")}
    document: JsonObject = {
        "schema": SCHEMA,
        "name": "candidate",
        "base_policy": {"name": settings.base_policy},
        "budget": budget,
        "safety": list(_SAFETY_CHECKS),
        **parts,
        "provenance": {"found_by": f"vllm-autoprune search, strategy {settings.strategy}"},
    }
    state = load_state(json.dumps(document))
    if settings.space == "all":
        return state
    return load_state(document | project(state, settings.space))


def _refuse_extensions(value: JsonValue | Mapping[str, JsonValue], where: str = "") -> None:
    """Raise :class:`StateError` for an atom that is not one of the paper's 131."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_extensions(item, f"{where}/{index}")
    elif isinstance(value, Mapping):
        atom = value.get("atom")
        if isinstance(atom, str) and atom in ATOMS and ATOMS[atom].origin == "extension":
            problem = Problem(where, f"{atom} is an extension", "write an atom of the list")
            raise StateError("proposal", [problem])
        for name, item in value.items():
            _refuse_extensions(item, f"{where}/{name}")


PROPOSALS = "proposals"
"""The only field of a reply with a list."""

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
    answer, begin, thinking = list[str](), 0, False
    for tag in _THOUGHTS.finditer(text):
        if tag["end"]:
            if not thinking:  # they began in the prompt
                answer.clear()
            begin, thinking = tag.end(), False
        elif not thinking:
            answer.append(text[begin : tag.start()])
            thinking = True
    return "".join([*answer, UNFINISHED if thinking else text[begin:]])


def parse_proposal(text: str, settings: Settings, default: Draft) -> Draft:
    """The draft in a reply: its JSON object, whatever text surrounds it.

    Origin and parents are those of ``default``. Never raises: an invalid reply gives a draft with
    problems.
    """
    answer = remove_thoughts(text)
    return _parse_item(next(iter(_split_proposals(answer, 1)), answer), settings, default)[0]


def parse_list(
    text: str, settings: Settings, count: int, default: Draft, names: Collection[str]
) -> list[Draft]:
    """The ``count`` drafts in a reply; what it has beyond them is ignored.

    Each proposal is read by itself, so that one that is invalid or cut off spoils no other. Origin
    and parents are those of ``default``, unless a proposal names one of ``names`` as its parent.
    Never raises: missing proposals are drafts with a problem.
    """
    answer = remove_thoughts(text)
    texts = _split_proposals(answer, count)
    # Without one the reply as a whole has the problem.
    parsed = [_parse_item(item, settings, default) for item in texts or [answer]]
    drafts = [_add_hypothesis(draft, item, names) if item else draft for draft, item in parsed]
    what = f"the reply has {len(texts)} of {count} proposals"
    missing = Problem("", what, "write all of them")
    return drafts + [replace(default, problems=(missing,))] * (count - len(drafts))


def _parse_item(text: str, settings: Settings, default: Draft) -> tuple[Draft, JsonObject]:
    """The draft in a text, and its JSON object; empty where it has none that can be read."""
    item: JsonObject = {}
    try:
        item = _parse_object(text)
        return replace(default, state=assemble_state(item, settings)), item
    except StateError as error:
        return replace(default, problems=error.problems), item


def _parse_object(text: str) -> JsonObject:
    """The outermost JSON object of a text; raises :class:`StateError`."""
    begin, end = text.find("{"), text.rfind("}")
    what = ""
    if not text.strip():
        what = "the reply is empty"
    elif len(text) > MAX_REPLY_CHARACTERS:
        what = f"the reply has {len(text)} characters"
    elif begin < 0:
        what = "the reply holds no JSON object"
        if text.endswith(UNFINISHED):
            what = "the reply holds thoughts and no answer"
    elif end < begin:
        what = "the reply ends within its JSON object"
    if what:
        fix = f"write one JSON object with {', '.join(COMPONENTS)}"
        raise StateError("proposal", [Problem("", what, fix)])
    data = parse_json(text[begin : end + 1], "proposal")
    assert isinstance(data, dict)  # it begins with a brace
    return data


def _add_hypothesis(draft: Draft, item: JsonObject, names: Collection[str]) -> Draft:
    """The draft with what its item says beside the policy; other values count as left out."""
    fields = ("parent", "purpose", "hypothesis", "expect")
    parent, purpose, reason, expect = (item.get(name) for name in fields)
    if parent == BASE_PARENT:
        draft = replace(draft, parents=())
    elif isinstance(parent, str) and parent in names:
        draft = replace(draft, parents=(parent,))
    words = " ".join(reason.split()) if isinstance(reason, str) else ""
    printable = "".join(character for character in words if character.isprintable())
    hypothesis = Hypothesis(
        purpose=purpose if isinstance(purpose, str) and purpose in PURPOSES else "",
        text=printable[:MAX_HYPOTHESIS],
        expect=next((word for word in get_args(Expectation) if word == expect), "higher"),
    )
    return replace(draft, hypothesis=hypothesis)


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


def _split_proposals(text: str, count: int) -> list[str]:
    """Texts of at most ``count`` proposals in a text, complete or not valid JSON.

    A proposal is the innermost object with a component, in whatever it is wrapped. Of several lists
    the last that is long enough counts, without one the last objects: earlier ones are drafts.
    Without a proposal, all objects are returned.
    """
    opened, lists = [_Bracket("", 0)], list[list[str]]()
    numbers, quoted = Counter[str](), False
    for match in _MARKS.finditer(text):
        mark, bracket = match[0], opened[-1]
        if mark == '"':
            quoted = not quoted and len(opened) > 1
        elif mark == "\n":
            quoted = False  # no string has one, so that a quote in prose ends with its line
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


_CORE_SHARES = (0.5, 0.75)
"""Shares of the core of warm starts, in a search of cores."""


def base_state(settings: Settings) -> PruningState:
    """The base policy alone, as a state of this search."""
    return paper_state(settings).without_exchange()


def paper_state(settings: Settings, quota: int = 2) -> PruningState:
    """The paper's selected structure on this search's base policy and budget."""
    released = load_state("autoprune")
    update = {"q_e": min(quota, settings.source_budget), "r_min": None}
    selector = released.constraints.selector.model_copy(update=update)
    constraints = released.constraints.model_copy(update={"selector": selector})
    changed = released.model_copy(update={"constraints": constraints})
    return assemble_state(components_json(changed), settings)


def minimal_state(
    settings: Settings, signal: str = "visual_token_norm_saliency", quota: int = 1
) -> PruningState:
    """A state of one signal: by default the simplest, which is the example of the first prompt."""
    components: JsonObject = {
        "scoring": {
            "signals": [{"atom": signal, "weight": 1.0}],
            "kernel": {"atom": "pairwise_cosine_kernel"},
            "fusion": {"atom": "weighted_sum_fusion"},
        },
        "constraints": {
            "pool": [{"atom": "quality_pool_builder"}],
            "selector": {"atom": "reference_residual_exchange_selector", "q_e": quota},
        },
        "reassembly": {"atom": "mean_residual"},
    }
    return assemble_state(components, settings)


def warm_start_states(settings: Settings) -> list[PruningState]:
    """The paper's structure at its q_e and at K, then every signal alone with q_e = K.

    Which signals matter differs from model to model: alone, a signal shows it in one evaluation,
    among several it takes many. q_e is K because with a weak base policy a full exchange may be
    best. A search of cores starts with two of them as well, after the paper's own state, and a
    search of where tokens are ranked with that state ranking before the merger. A search of base
    policies has each alone, where any state may be a candidate.
    """
    paper = paper_state(settings)
    components, largest_quota = components_json(paper), min(settings.source_budget, MAX_QUOTA)
    bases = [
        assemble_state({**components, BASE: {"name": name}}, settings).without_exchange()
        for name in (settings.other_bases if settings.space == "all" else ())
    ]
    cores: list[JsonObject] = [{CORE: {"share": share}} for share in _CORE_SHARES]
    ranked: list[JsonObject] = [{RANK_AT: "merger_in"}]
    variants = (cores if settings.core else []) + (ranked if settings.rank_at else [])
    states = [
        paper,
        *bases,
        *(assemble_state({**components, **variant}, settings) for variant in variants),
        paper_state(settings, largest_quota),
        *(
            minimal_state(settings, name, largest_quota)
            for name in atom_names("scoring", settings.library)
        ),
    ]
    # With a small K or in a small space, some of them are equal.
    return list({state.digest: state for state in states}.values())


# Limits on list lengths, so that a small model's constrained output comes to an end.
_MAX_ITEMS = {"signals": 6, "pool": 3}

# Schema keywords that do not constrain the output.
_UNUSED_KEYWORDS = ("title", "description", "discriminator", "default", "allOf", "$schema", "$id")


@cache
def proposal_schema(settings: Settings) -> JsonObject:
    """JSON Schema of a proposal of a search: accepts a subset of what a state accepts.

    Atoms that take the same parameters are one alternative, so that it is about a third as long as
    the state's: the 81 atoms of reassembly, for example, have twelve forms.
    """
    schema: JsonObject = PruningState.model_json_schema()
    definitions, fields = _object(schema["$defs"]), _object(schema["properties"])
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
            parts = alternative.get("properties") if isinstance(alternative, dict) else None
            called = parts.get("atom") if isinstance(parts, dict) else None
            atom = called.get("const") if isinstance(called, dict) else None
            if atom is None:
                atoms[json.dumps(alternative)] = []
            elif atom not in excluded:
                form = json.dumps(alternative).replace(json.dumps(called), "ATOM", 1)
                atoms.setdefault(form, []).append(atom)
        return [json.loads(form.replace("ATOM", json.dumps({"enum": names}), 1))
                for form, names in atoms.items()]  # fmt: skip

    properties = reduce_fields({name: fields[name] for name in searched_components(settings)})
    required: list[JsonValue] = [*COMPONENTS]
    if settings.bases:
        name: JsonObject = {"enum": list(settings.bases)}
        properties[BASE] = _closed_object({"name": name}, ["name"])
        required.append(BASE)
    return _closed_object(properties, required)


@cache
def list_schema(settings: Settings, count: int) -> JsonObject:
    """JSON Schema of ``count`` proposals, each with its hypothesis."""
    proposal = proposal_schema(settings)
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
    items: JsonObject = {"type": "array", "items": item, "minItems": count, "maxItems": count}
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
