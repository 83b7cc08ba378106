"""Reference of the language from its registry: the page on atoms, and the text for a proposer.

Both list what is declared, so neither can fall behind the code.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import cast, get_args

from pydantic import BaseModel, JsonValue, TypeAdapter

from vllm_autoprune.tpdsl.atoms.pools import PartitionCall, PoolCall
from vllm_autoprune.tpdsl.atoms.reassembly import (
    AGGREGATIONS,
    ASSIGNMENTS,
    ORDERINGS,
    OUTPUTS,
    PRINTED,
    NearestCall,
)
from vllm_autoprune.tpdsl.atoms.source import PriorCall, ViewCall
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS, ROLES, AtomCall, Group
from vllm_autoprune.tpdsl.state import Core
from vllm_autoprune.tpdsl.tokens import RankAt

_JSON: TypeAdapter[object] = TypeAdapter(object)

_GROUPS: tuple[Group, ...] = get_args(Group)

_AXES = {
    "assignment": ASSIGNMENTS,
    "aggregation": AGGREGATIONS,
    "output": OUTPUTS,
    "ordering": ORDERINGS,
}


CORE_POLICIES = tuple(name for name, policy in BASE_POLICIES.items() if policy.core is not None)
"""Base policies that may choose the core: those with a form that does not read the question."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A field of a state that takes atoms: its JSON pointer, and whether it takes a list."""

    pointer: str
    group: Group
    kind: type[AtomCall] = AtomCall
    many: bool = False

    @property
    def names(self) -> list[str]:
        """Atoms that the field takes."""
        return ATOMS.of_kind(self.group, self.kind)


PLACES = (
    _Place("/source/tokens", "token_source_base_policy", ViewCall),
    _Place("/source/priors", "token_source_base_policy", PriorCall, many=True),
    _Place("/budget", "budget_control"),
    _Place("/scoring/signals", "scoring", many=True),
    _Place("/scoring/kernel", "similarity_kernel"),
    _Place("/scoring/fusion", "score_fusion"),
    _Place("/constraints/pool", "candidate_pool", PoolCall, many=True),
    _Place("/constraints/partition", "candidate_pool", PartitionCall),
    _Place("/constraints/selector", "selection_constraints"),
    _Place("/reassembly", "reassembly"),
    _Place("/safety", "safety_checks", many=True),
)
"""All fields of a state that take atoms; together they take every atom (tested)."""


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter of an atom, as text: allowed values, default and description."""

    name: str
    values: str
    default: str
    description: str


def _list_parameters(model: type[BaseModel]) -> list[_Parameter]:
    """Parameters of a call, or fields of the core, with their ranges and defaults."""
    schema = cast(dict[str, dict[str, dict[str, JsonValue]]], model.model_json_schema())
    rows = []
    for name, field in model.model_fields.items():
        if name == "atom":
            continue
        default = "required"
        if not field.is_required():
            value = field.get_default(call_default_factory=True)
            default = _JSON.dump_json(value, exclude_defaults=True).decode()
        # A policy is any of a union, whose schemas would say no more than its name.
        policy = name == "policy" and model is Core
        values = ", ".join(CORE_POLICIES) if policy else _values(schema["properties"][name])
        rows.append(_Parameter(name, values, default, str(field.description)))
    return rows


def _values(field: dict[str, JsonValue]) -> str:
    if "anyOf" in field:
        choices = cast(list[dict[str, JsonValue]], field["anyOf"])
        return " or ".join(_values(choice) for choice in choices)
    if "enum" in field:
        return ", ".join(json.dumps(value) for value in cast(list[JsonValue], field["enum"]))
    kind = str(field["type"])
    if "minimum" not in field:
        return {"boolean": "true, false", "array": "a list of atoms"}.get(kind, kind)
    least, most = field["minimum"], field["maximum"]
    return f"{kind} {least:g}" if least == most else f"{kind} {least:g} to {most:g}"


def render_page() -> str:
    """Reference page of all atoms, in Markdown."""
    extensions = [name for name in ATOMS.names() if ATOMS[name].origin == "extension"]
    lines = [
        "# Atoms",
        "",
        "An atom is one typed operation of TPDSL, the language of [states](states.md). Each is",
        "declared once, in `vllm_autoprune/tpdsl`; this page, the JSON Schema, the loader and the",
        "text for LLM proposers are generated from the declarations.",
        f"{len(ATOMS) - len(extensions)} atoms form the language of the paper; "
        f"{len(extensions)} are extensions of this project.",
        "",
        "- **Origin**: *printed*, the paper gives the atom's name; *listed*, the paper counts the",
        "  atom in its group's size without naming it, so name and definition are this project's;",
        "  *extension*, added by this project.",
        "- **Reads**: optional inputs that have to be computed for states that use the atom, and",
        "  for no others. An atom whose parameters disable it reads nothing.",
        "",
        "| group | component of alpha | atoms | extensions | fields of a state |",
        "|---|---|---|---|---|",
    ]
    for group in _GROUPS:
        ours = sum(ATOMS[name].origin == "extension" for name in ATOMS.names(group))
        fields = ", ".join(f"`{place.pointer}`" for place in PLACES if place.group == group)
        count = len(ATOMS.names(group)) - ours
        lines.append(f"| [{group}](#{group}) | {ROLES[group]} | {count} | {ours} | {fields} |")
    for group in _GROUPS:
        lines += ["", f"## {group}", ""]
        if group == "reassembly":
            lines += [
                "81 atoms: 3 assignments x 3 aggregations x 3 outputs x 3 orderings. The paper "
                f"names {len(PRINTED)} of",
                "them; the others are called `reassemble/ASSIGNMENT.AGGREGATION.OUTPUT.ORDERING`.",
                "",
                "| axis | level | effect |",
                "|---|---|---|",
            ]
            for axis, levels in _AXES.items():
                lines += [f"| {axis} | `{level.name}` | {level.description} |" for level in levels]
            lines += [""]
        lines += ["| atom | origin | reads | effect | parameters |", "|---|---|---|---|---|"]
        for name in ATOMS.names(group):
            atom = ATOMS[name]
            reads = ", ".join(sorted(atom.needs)) or "-"
            rows = "<br>".join(
                f"`{p.name}`: {p.values}; default {p.default}; {p.description}"
                for p in _list_parameters(atom.call)
            )
            lines.append(f"| `{name}` | {atom.origin} | {reads} | {atom.doc} | {rows or '-'} |")
    lines += [
        "",
        "## core",
        "",
        "Extension, at `/core`: part of the K tokens is chosen without the question, so that all",
        "questions about an image share its KV blocks",
        "([Core and delta](states.md#core-and-delta)).",
        "",
        "| field | values | default | effect |",
        "|---|---|---|---|",
        *(
            f"| `{p.name}` | {p.values} | {p.default} | {p.description} |"
            for p in _list_parameters(Core)
        ),
        "",
        "## rank_at",
        "",
        "Extension, at `/rank_at`: where tokens are scored and compared",
        "([Ranking before the merger](states.md#ranking-before-the-merger)).",
        "",
        "| value | effect |",
        "|---|---|",
        *(f"| `{value}` | {effect} |" for value, effect in _RANK_PLACES.items()),
    ]
    return "\n".join(lines) + "\n"


_RANK_PLACES: dict[RankAt, str] = {
    "merger_out": "default: by the tokens that the language model reads",
    "merger_in": "by the mean of the patches that the merger makes a token of; only on backbones "
    "with a patch merger (Qwen-VL, InternVL)",
}
"""Values of a state's ``rank_at``, and what they mean."""


def render_proposer_text(components: Collection[str] = (), left_out: Collection[str] = ()) -> str:
    """Text of the language for an LLM proposer: base policies, fields, atoms and parameters.

    ``components``, such as ``("scoring",)``, limits it to the fields of a state below them. It has
    no atom that is ``left_out``.
    """
    lines = []
    if not components:
        lines += ["Base policies (/base_policy/name):"]
        lines += [f"- {policy.name}: {policy.doc}" for policy in BASE_POLICIES.values()]
    for place in PLACES:
        if components and place.pointer.split("/")[1] not in components:
            continue
        many = ", a list" if place.many else ""
        lines += ["", f"{place.group} ({place.pointer}{many}):"]
        if place.group == "reassembly":
            lines += _reassembly_axes()
            continue
        # A parameter that several atoms share is described for the first one only.
        described: set[_Parameter] = set()
        for name in place.names:
            if name in left_out:
                continue
            atom, parameters = ATOMS[name], _list_parameters(ATOMS[name].call)
            new = _describe(p for p in parameters if p not in described)
            repeated = ", ".join(p.name for p in parameters if p in described)
            described.update(parameters)
            also = f" also takes {repeated}" if repeated else ""
            reads = f" Reads {', '.join(sorted(atom.needs))}." if atom.needs else ""
            lines.append(f"- {name}: {atom.doc}{reads}{f' {new}' if new else ''}{also}")
    if not components or "core" in components:
        lines += [
            "",
            "core (/core), an extension, optional: part of the tokens is chosen without the",
            "question, and shared by all questions about an image; the rest of the policy then",
            "chooses the others given it:",
            *(f"- {_describe([p])}" for p in _list_parameters(Core)),
        ]
    if not components or "rank_at" in components:
        lines += ["", "rank_at (/rank_at), an extension, optional: where tokens are scored and"]
        lines += ["compared; the tokens that are kept are those after the merger either way:"]
        lines += [f"- {value}: {effect}" for value, effect in _RANK_PLACES.items()]
    return "\n".join(lines) + "\n"


def _describe(parameters: Iterable[_Parameter]) -> str:
    return "; ".join(f"{p.name} = {p.default} ({p.values}: {p.description})" for p in parameters)


def _reassembly_axes() -> Iterator[str]:
    """The 81 reassembly atoms by their axes, which is shorter than one line per atom."""
    yield "  reassemble/ASSIGNMENT.AGGREGATION.OUTPUT.ORDERING, or one of the names below; has no"
    yield "  effect at strength 0 (for exchange: at margin 10), which is the default"
    for axis, levels in _AXES.items():
        effects = "; ".join(f"{level.name}: {level.description}" for level in levels)
        yield f"- {axis.upper()}: {effects}"
        for level in levels:
            if level.call is not None:
                yield f"    {level.name} takes {_describe(_list_parameters(level.call))}"
    for cell, name in PRINTED.items():
        yield f"- {name} is {cell}"
        if issubclass(ATOMS[name].call, NearestCall):
            nearest = (p for p in _list_parameters(NearestCall) if p.name == "nearest")
            yield f"    {name} also takes {_describe(nearest)}"
