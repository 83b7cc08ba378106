"""The registry as text: a reference page for people, and what an LLM proposer reads.

Knows nothing about what any atom computes: every word comes from its declaration.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import cast, get_args

from pydantic import JsonValue, TypeAdapter

from vllm_autoprune.tpdsl.atom import ATOMS, ROLES, Atom, AtomCall, Group
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.partitions import PartitionCall
from vllm_autoprune.tpdsl.pools import PoolCall
from vllm_autoprune.tpdsl.reassembly import AGGREGATIONS, ASSIGNMENTS, ORDERINGS, OUTPUTS, PRINTED
from vllm_autoprune.tpdsl.source import PriorCall, ViewCall

_JSON: TypeAdapter[object] = TypeAdapter(object)

GROUPS: tuple[Group, ...] = get_args(Group)

_AXES = {
    "assignment": ASSIGNMENTS,
    "aggregation": AGGREGATIONS,
    "output": OUTPUTS,
    "ordering": ORDERINGS,
}


@dataclass(frozen=True, slots=True)
class Place:
    """A field of a state that takes atoms: its JSON pointer, and how many it holds."""

    pointer: str
    group: Group
    kind: type[AtomCall] = AtomCall
    many: bool = False

    @property
    def names(self) -> list[str]:
        """Atoms that the field takes."""
        return ATOMS.of_kind(self.group, self.kind)


PLACES = (
    Place("/source/tokens", "token_source_base_policy", ViewCall),
    Place("/source/priors", "token_source_base_policy", PriorCall, many=True),
    Place("/budget", "budget_control"),
    Place("/scoring/signals", "scoring", many=True),
    Place("/scoring/kernel", "similarity_kernel"),
    Place("/scoring/fusion", "score_fusion"),
    Place("/constraints/pool", "candidate_pool", PoolCall, many=True),
    Place("/constraints/partition", "candidate_pool", PartitionCall),
    Place("/constraints/selector", "selection_constraints"),
    Place("/reassembly", "reassembly"),
    Place("/safety", "safety_checks", many=True),
)
"""Every field of a state that takes atoms; together they take all of them (a test holds it)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an atom: what it may be, as text."""

    name: str
    values: str
    default: str
    says: str


def parameters(call: type[AtomCall]) -> list[Parameter]:
    """The parameters of a call, with ranges and defaults as its model declares them."""
    schema = cast(dict[str, dict[str, dict[str, JsonValue]]], call.model_json_schema())
    found = []
    for name, field in schema["properties"].items():
        if name == "atom":
            continue
        default = call.model_fields[name].get_default(call_default_factory=True)
        text = _JSON.dump_json(default, exclude_defaults=True).decode()
        found.append(Parameter(name, _values(field), text, str(field["description"])))
    return found


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


def page() -> str:
    """The reference page of the language, in Markdown."""
    extensions = [name for name in ATOMS.names() if ATOMS[name].origin == "extension"]
    lines = [
        "# Atoms",
        "",
        "<!-- Made by `vllm-autoprune atoms --markdown > docs/atoms.md`; a test holds it to that."
        " -->",
        "",
        "A [state](states.md) is written in these atoms. Each is declared once in",
        "`vllm_autoprune/tpdsl`; this page, the JSON Schema, the loader and the text for proposers",
        f"are made from the declarations. {len(ATOMS) - len(extensions)} atoms are the paper's "
        "language;",
        f"{len(extensions)} are extensions, outside that count.",
        "",
        "Origin: **printed**, the paper prints the name; **listed**, the paper counts it in its",
        "group's size without printing it, so that name and meaning are ours; **extension**, ours.",
        "Reads: inputs that cost something, computed for states that read them and no others. An",
        "atom whose parameters make it do nothing reads nothing.",
        "",
        "| group | part of alpha | atoms | extensions | where a state names them |",
        "|---|---|---|---|---|",
    ]
    for group in GROUPS:
        ours = sum(ATOMS[name].origin == "extension" for name in ATOMS.names(group))
        fields = ", ".join(f"`{place.pointer}`" for place in PLACES if place.group == group)
        count = len(ATOMS.names(group)) - ours
        lines.append(f"| [{group}](#{group}) | {ROLES[group]} | {count} | {ours} | {fields} |")
    for group in GROUPS:
        lines += ["", f"## {group}", ""]
        lines += _axes() if group == "reassembly" else []
        lines += _table(ATOMS.names(group))
    return "\n".join(lines) + "\n"


def _axes() -> list[str]:
    lines = [
        "3 assignments x 3 aggregations x 3 outputs x 3 orderings, 81 in all. The paper prints "
        f"{len(PRINTED)} of",
        "them; the others are named `reassemble/` and their four levels.",
        "",
        "| axis | level | what it does |",
        "|---|---|---|",
    ]
    for axis, levels in _AXES.items():
        lines += [f"| {axis} | `{level.name}` | {level.says} |" for level in levels]
    return [*lines, ""]


def _table(names: list[str]) -> list[str]:
    lines = ["| atom | origin | reads | what it does | parameters |", "|---|---|---|---|---|"]
    for name in names:
        atom = ATOMS[name]
        reads = ", ".join(sorted(atom.needs)) or "-"
        told = "<br>".join(
            f"`{p.name}`: {p.values}; default {p.default}; {p.says}" for p in parameters(atom.call)
        )
        lines.append(f"| `{name}` | {atom.origin} | {reads} | {atom.doc} | {told or '-'} |")
    return lines


def proposer_text(components: Collection[str] = ()) -> str:
    """The language as an LLM proposer reads it: fields, base policies, atoms, parameters.

    With components, such as ``("scoring",)``, no more than the fields of a state below them.
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
        lines += _cells() if place.group == "reassembly" else _brief(place)
    return "\n".join(lines) + "\n"


def _brief(place: Place) -> Iterator[str]:
    """A parameter that several atoms of a field share is told in full for the first of them."""
    told: set[Parameter] = set()
    for name in place.names:
        atom = ATOMS[name]
        own = parameters(atom.call)
        words = _listed(p for p in own if p not in told)
        again = ", ".join(p.name for p in own if p in told)
        told.update(own)
        also = f" also takes {again}" if again else ""
        yield f"- {name}: {_says(atom)}{f' {words}' if words else ''}{also}"


def _says(atom: Atom) -> str:
    reads = f" Reads {', '.join(sorted(atom.needs))}." if atom.needs else ""
    return f"{atom.doc}{reads}"


def _listed(found: Iterator[Parameter]) -> str:
    return "; ".join(f"{p.name} = {p.default} ({p.values}: {p.says})" for p in found)


def _cells() -> Iterator[str]:
    """81 atoms by their axes: their lines would say the same twelve things over and over."""
    yield "  reassemble/ASSIGNMENT.AGGREGATION.OUTPUT.ORDERING, or a name of its own; does nothing"
    yield "  at strength 0 (margin 10 for exchange), the default"
    for axis, levels in _AXES.items():
        told = "; ".join(f"{level.name}: {level.says}" for level in levels)
        yield f"- {axis.upper()}: {told}"
        for level in levels:
            if level.call is not None:
                yield f"    {level.name} takes {_listed(iter(parameters(level.call)))}"
    for cell, name in PRINTED.items():
        yield f"- {name} is {cell}"
