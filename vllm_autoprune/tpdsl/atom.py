"""Atoms: one declaration each, kept in one registry that everything else is made from.

Knows nothing about what any single atom computes.

An atom is declared once, by decorating its function with its group and parameter model. From
the registry come the grammar of a state (which atoms a field takes, with their parameters), the
JSON Schema, the reference page and the text that an LLM proposer reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, create_model
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from vllm_autoprune.tpdsl.tokens import Need

Group = Literal[
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

ROLES: dict[Group, Role] = {
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


@dataclass(frozen=True, slots=True)
class Atom:
    """One typed operation of TPDSL."""

    name: str
    group: Group
    call: type[AtomCall]
    needs: frozenset[Need]
    paper: bool
    doc: str
    function: Callable[..., object]

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
    call: type[AtomCall],
    function: Callable[..., object],
    *,
    needs: frozenset[Need] = frozenset(),
    paper: bool = True,
    doc: str | None = None,
) -> type[AtomCall]:
    """Enter one atom; returns its call model, whose ``atom`` field admits this name alone."""
    text = doc or (function.__doc__ or "").strip().splitlines()[0]
    bound = create_model(
        "".join(part.capitalize() for part in name.replace("@", "_").split("_")),
        __base__=call,
        __doc__=text,
        atom=(literal(name), ...),
    )
    ATOMS.add(Atom(name, group, bound, needs, paper, text, function))
    return bound


def atom(
    group: Group,
    call: type[AtomCall] = AtomCall,
    *,
    needs: frozenset[Need] = frozenset(),
    paper: bool = True,
) -> Callable[[F], F]:
    """Declare the decorated function as the atom of its own name.

    ``paper`` is true where the paper prints the name. The first line of the docstring is the
    atom's doc line.
    """

    def enter(function: F) -> F:
        declare(function.__name__, group, call, function, needs=needs, paper=paper)
        return function

    return enter


class OneOf:
    """Annotation that makes a field take exactly the registered atoms of one group.

    A pydantic tagged union made from the registry when the state model is built, so a new atom
    is part of the grammar, and of the JSON Schema, as soon as it is declared.
    """

    def __init__(self, group: Group, *, bare: bool = False) -> None:
        self.group = group
        self.bare = bare
        """True where a name alone stands for an atom with all its defaults."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        choices = {
            name: handler.generate_schema(ATOMS[name].call) for name in ATOMS.names(self.group)
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
        return {"anyOf": [{"enum": ATOMS.names(self.group)}, described]}


def _named(value: object) -> object:
    return {"atom": value} if isinstance(value, str) else value
