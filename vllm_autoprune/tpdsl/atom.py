"""Atoms: one declaration each, kept in one registry that everything else is made from.

Knows nothing about what any single atom computes.

An atom is declared once, by decorating its function with its group and parameter model. From
the registry come the grammar of a state (which atoms a field takes, with their parameters), the
JSON Schema, the reference page and the text that an LLM proposer reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, create_model
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from vllm_autoprune.tpdsl.tokens import Need

Group = Literal[
    "token_source_base_policy",
    "budget_control",
    "scoring",
    "similarity_kernel",
    "score_fusion",
    "candidate_pool",
    "selection_constraints",
    "reassembly",
    "safety_checks",
]

Role = Literal["context", "B", "S", "C", "R", "validation"]

Origin = Literal["printed", "listed", "extension"]
"""Where an atom comes from: the paper prints its name; it is one of the 131 without being printed,
so that its name and meaning are ours; or it is ours altogether and outside the 131."""

ROLES: dict[Group, Role] = {
    "token_source_base_policy": "context",
    "budget_control": "B",
    "scoring": "S",
    "similarity_kernel": "S",
    "score_fusion": "S",
    "candidate_pool": "C",
    "selection_constraints": "C",
    "reassembly": "R",
    "safety_checks": "validation",
}


class AtomCall(BaseModel):
    """An atom as a state writes it: its name and its parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    atom: str

    @classmethod
    def parameters(cls) -> tuple[str, ...]:
        """Names of the parameters this call takes."""
        return tuple(name for name in cls.model_fields if name != "atom")


Reads = Callable[..., frozenset[Need]]
"""call -> the inputs that this call reads, for atoms whose parameters decide it."""


@dataclass(frozen=True, slots=True)
class Atom:
    """One typed operation of TPDSL; ``needs`` is the most that any call of it reads."""

    name: str
    group: Group
    call: type[AtomCall]
    needs: frozenset[Need]
    origin: Origin
    doc: str
    function: Callable[..., object]
    reads: Reads | None = None

    @property
    def paper(self) -> bool:
        """True where the paper prints the name."""
        return self.origin == "printed"

    def needs_of(self, call: AtomCall) -> frozenset[Need]:
        """Inputs that cost something and that this call reads: none where it does nothing."""
        return self.needs if self.reads is None else self.reads(call)

    @property
    def role(self) -> Role:
        """The component of alpha = (B, S, C, R) that this atom belongs to."""
        return ROLES[self.group]


class Registry:
    """Every declared atom, in order of declaration."""

    def __init__(self) -> None:
        self._atoms: dict[str, Atom] = {}

    def add(self, atom: Atom) -> None:
        """Enter an atom; a second one of the same name is a programming error."""
        if atom.name in self._atoms:
            raise ValueError(f"atom {atom.name!r} is declared twice")
        self._atoms[atom.name] = atom

    def __getitem__(self, name: str) -> Atom:
        return self._atoms[name]

    def __len__(self) -> int:
        return len(self._atoms)

    def names(self, group: Group | None = None) -> list[str]:
        """Names of all atoms, or of one group."""
        return [a.name for a in self._atoms.values() if group is None or a.group == group]

    def of_kind(self, group: Group, kind: type[AtomCall]) -> list[str]:
        """Names of a group's atoms whose calls are of one kind."""
        return [name for name in self.names(group) if issubclass(self[name].call, kind)]

    def of(self, call: AtomCall) -> Atom:
        """The atom that a call names."""
        return self._atoms[call.atom]


ATOMS = Registry()

F = TypeVar("F", bound=Callable[..., object])


def literal(name: str) -> type[str]:
    """The type that admits one string, made at run time (a type checker cannot follow it)."""
    admitted: type[str] = Literal[name]  # type: ignore[assignment]
    return admitted


def declare(
    name: str,
    group: Group,
    call: type[AtomCall] | tuple[type[AtomCall], ...],
    function: Callable[..., object],
    *,
    needs: frozenset[Need] = frozenset(),
    origin: Origin = "printed",
    doc: str | None = None,
    reads: Reads | None = None,
) -> type[AtomCall]:
    """Enter one atom; returns its call model, whose ``atom`` field admits this name alone.

    Of several call models the new one has the parameters of all.
    """
    text = doc or (function.__doc__ or "").strip().splitlines()[0]
    bound: type[AtomCall] = create_model(
        "".join(part.capitalize() for part in re.split(r"[^a-z0-9]+", name)),
        __base__=call,
        __doc__=text,
        atom=(literal(name), ...),
    )
    ATOMS.add(Atom(name, group, bound, needs, origin, text, function, reads))
    return bound


def atom(
    group: Group,
    call: type[AtomCall] = AtomCall,
    *,
    needs: frozenset[Need] = frozenset(),
    origin: Origin = "printed",
    reads: Reads | None = None,
) -> Callable[[F], F]:
    """Declare the decorated function as the atom of its own name.

    The first line of the docstring is the atom's doc line.
    """

    def enter(function: F) -> F:
        declare(function.__name__, group, call, function, needs=needs, origin=origin, reads=reads)
        return function

    return enter


C = TypeVar("C", bound=AtomCall)


def by_default(kind: type[C], name: str) -> C:
    """A call of an atom with all its defaults."""
    call = ATOMS[name].call.model_validate({"atom": name})
    assert isinstance(call, kind)
    return call


class OneOf:
    """Annotation that makes a field take exactly the registered atoms of one group.

    A pydantic tagged union made from the registry when the state model is built, so a new atom
    is part of the grammar, and of the JSON Schema, as soon as it is declared.
    """

    def __init__(
        self, group: Group, kind: type[AtomCall] = AtomCall, *, bare: bool = False
    ) -> None:
        self.group = group
        self.kind = kind
        """Where a group holds atoms of several kinds: the calls that this field takes."""
        self.bare = bare
        """True where a name alone stands for an atom with all its defaults."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        choices = {
            name: handler.generate_schema(ATOMS[name].call)
            for name in ATOMS.of_kind(self.group, self.kind)
        }
        union = core_schema.tagged_union_schema(choices, discriminator="atom")
        if not self.bare:
            return union
        return core_schema.no_info_before_validator_function(_named, union)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        described = handler(schema)
        if not self.bare:
            return described
        return {"anyOf": [{"enum": ATOMS.of_kind(self.group, self.kind)}, described]}


def _named(value: object) -> object:
    return {"atom": value} if isinstance(value, str) else value
