"""Reference of the language, generated from its registry, for the site and for an LLM proposer."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import cast

from pydantic import BaseModel, JsonValue, TypeAdapter

from vllm_autoprune.tpdsl.atoms.pools import PartitionCall, PoolCall
from vllm_autoprune.tpdsl.atoms.reassembly import (
    AGGREGATIONS,
    ASSIGNMENTS,
    ORDERINGS,
    OUTPUTS,
    PRINTED,
)
from vllm_autoprune.tpdsl.atoms.source import PriorCall, ViewCall
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, Group
from vllm_autoprune.tpdsl.state import Core
from vllm_autoprune.tpdsl.tokens import RankAt

_JSON: TypeAdapter[object] = TypeAdapter(object)

CORE_POLICIES = tuple(
    name for name, policy in BASE_POLICIES.items() if policy.core is not None
)
"""Base policies that may choose the core: those with a form that does not read the question."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A field of a state that takes atoms: its JSON pointer, and whether it takes a list."""

    pointer: str
    group: Group
    kind: type[AtomCall] = AtomCall
    many: bool = False
    note: str = ""
    """What a reader has to know of the field beside its atoms."""

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
    _Place(
        "/constraints/pool",
        "candidate_pool",
        PoolCall,
        many=True,
        note="each within the pool of the one before",
    ),
    _Place(
        "/constraints/partition",
        "candidate_pool",
        PartitionCall,
        note="optional, by default spatial_grid_partition; only constrained_pool_dpp_selector "
        "reads it",
    ),
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

    def limit(self, largest_quota: int | None) -> _Parameter:
        """The parameter with the range of a search, if it is a number of exchanges."""
        if largest_quota is None or self.name not in ("q_e", "r_min"):
            return self
        values = re.sub(r"(?<=to )\d+", str(largest_quota), self.values)
        return replace(self, values=values)


def _list_parameters(model: type[BaseModel]) -> list[_Parameter]:
    """Parameters of an atom's call, or fields of the core, with their ranges and defaults."""
    schema = cast(dict[str, dict[str, dict[str, JsonValue]]], model.model_json_schema())
    rows = []
    for name, field in model.model_fields.items():
        if name == "atom":
            continue
        default = "required"
        if not field.is_required():
            value = field.get_default(call_default_factory=True)
            default = _JSON.dump_json(value, exclude_defaults=True).decode()
        # A core's policy is a union of all base policies, whose schemas say no more than their
        # names.
        policy = name == "policy" and model is Core
        values = (
            ", ".join(CORE_POLICIES) if policy else _values(schema["properties"][name])
        )
        rows.append(_Parameter(name, values, default, str(field.description)))
    return rows


def _values(field: dict[str, JsonValue]) -> str:
    if "anyOf" in field:
        choices = cast(list[dict[str, JsonValue]], field["anyOf"])
        return " or ".join(_values(choice) for choice in choices)
    if "enum" in field:
        return ", ".join(
            json.dumps(value) for value in cast(list[JsonValue], field["enum"])
        )
    kind = str(field["type"])
    if "minimum" not in field:
        return {"boolean": "true, false", "array": "a list of atoms"}.get(kind, kind)
    minimum = field["minimum"]
    maximum = field["maximum"]
    return (
        f"{kind} {minimum:g}"
        if minimum == maximum
        else f"{kind} {minimum:g} to {maximum:g}"
    )


_RANK_PLACES: dict[RankAt, str] = {
    "merger_out": "default: by the tokens that the language model reads",
    "merger_in": "by the mean of the patches that the merger makes a token of; only on backbones "
    "with a patch merger (Qwen-VL, InternVL)",
}
"""Values of a state's ``rank_at``, and their meaning."""


def render_language(
    components: Collection[str] = (),
    left_out: Collection[str] = (),
    largest_quota: int | None = None,
) -> str:
    """Base policies, fields of a state, their atoms and parameters, in Markdown.

    With ``components``, such as ``("scoring",)``, the text is only about these fields of a state
    and those inside them. The atoms and parameters ``left_out`` do not appear. ``largest_quota`` is
    that of q_e and r_min, if not the language's.
    """
    lines = []
    if not components:
        lines += ["Base policies (/base_policy/name):", ""]
        lines += [f"- {policy.name}: {policy.doc}" for policy in BASE_POLICIES.values()]
    for place in PLACES:
        if components and place.pointer.split("/")[1] not in components:
            continue
        many = ", a list" if place.many else ""
        note = f", {place.note}" if place.note else ""
        lines += ["", f"{place.group} ({place.pointer}{many}{note}):", ""]
        if place.group == "reassembly":
            lines += _describe_reassembly(left_out)
            continue
        # A parameter that several atoms share is described for the first one only.
        described: set[_Parameter] = set()
        for name in place.names:
            if name in left_out:
                continue
            atom = ATOMS[name]
            parameters = [
                parameter.limit(largest_quota)
                for parameter in _list_parameters(ATOMS[name].call)
                if parameter.name not in left_out
            ]
            new = _describe(p for p in parameters if p not in described)
            repeated = ", ".join(p.name for p in parameters if p in described)
            described.update(parameters)
            also = f" also takes {repeated}" if repeated else ""
            reads = f" Reads {', '.join(sorted(atom.needs))}." if atom.needs else ""
            lines.append(f"- {name}: {atom.doc}{reads}{f' {new}' if new else ''}{also}")
    if not components or "core" in components:
        lines += [
            "",
            "core (/core), an extension, optional: part of the tokens is chosen without",
        ]
        lines += [
            "the question, and shared by all questions about an image; the rest of the"
        ]
        lines += [
            "policy then chooses the others given it, and exchanges none of it:",
            "",
        ]
        lines += [f"- {_describe([p])}" for p in _list_parameters(Core)]
        if components:  # without, all policies are described above
            lines += [f"    {name}: {_describe_core(name)}" for name in CORE_POLICIES]
    if not components or "rank_at" in components:
        lines += [
            "",
            "rank_at (/rank_at), an extension, optional: where tokens are scored and",
        ]
        lines += [
            "compared; the tokens that are kept are those after the merger either way:",
            "",
        ]
        lines += [f"- {value}: {effect}" for value, effect in _RANK_PLACES.items()]
    return "\n".join(lines) + "\n"


def _describe_core(name: str) -> str:
    """What a base policy does where it chooses the core of an image."""
    policy = BASE_POLICIES[name]
    doc = policy.doc
    if policy.reads_instruction:
        doc += " Here without what it says of the question."
    if policy.score is not None:
        doc += " A tile is a frame."
    return doc


def _describe(parameters: Iterable[_Parameter]) -> str:
    return "; ".join(
        f"{p.name} = {p.default} ({p.values}: {p.description})" for p in parameters
    )


def _describe_reassembly(left_out: Collection[str]) -> Iterator[str]:
    """The 81 atoms by their axes, which is shorter than one line per atom.

    Levels of atoms that are all in ``left_out`` are not told.
    """
    level_names_of = {name: level_names for level_names, name in PRINTED.items()}
    told = {
        level
        for name in ATOMS.names("reassembly")
        if name not in left_out
        for level in level_names_of.get(name, name.removeprefix("reassemble/")).split(
            "."
        )
    }
    yield "reassemble/ASSIGNMENT.AGGREGATION.OUTPUT.ORDERING; those that are listed with names of"
    yield "their own have no others. No row changes by default: strength is 0, and no gain in"
    yield "cosine reaches the margin of 10. The orders score and pick act nevertheless."
    yield ""
    axes = {"ASSIGNMENT": ASSIGNMENTS, "AGGREGATION": AGGREGATIONS}
    for axis, levels in {**axes, "OUTPUT": OUTPUTS, "ORDERING": ORDERINGS}.items():
        offered = [level for level in levels if level.name in told]
        effects = "; ".join(f"{level.name}: {level.description}" for level in offered)
        yield f"- {axis}: {effects}"
        for level in offered:
            if level.call is not None:
                yield f"    {level.name} takes {_describe(_list_parameters(level.call))}"
    for level_names, name in PRINTED.items():
        if name in left_out:
            continue
        yield f"- {name} is {level_names}"
        if nearest := [
            p for p in _list_parameters(ATOMS[name].call) if p.name == "nearest"
        ]:
            yield f"    {name} also takes {_describe(nearest)}"
