"""Registry of atoms, the typed operations of TPDSL.

An atom is declared once, by decorating its function with its group and parameter model. The
grammar of a state (which atoms a field takes, with their parameters), its JSON Schema, the
reference page and the text for an LLM proposer are all generated from this registry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model
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

_Role = Literal["context", "B", "S", "C", "R", "validation"]

Origin = Literal["printed", "listed", "extension"]
"""Where an atom comes from.

``printed``: the paper gives its name. ``listed``: the paper counts it among the 131 atoms without
naming it, so its name and definition are this project's. ``extension``: added by this project, not
one of the 131.
"""

ROLES: dict[Group, _Role] = {
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


class StatePart(BaseModel):
    """A part of a state: frozen, without unknown fields and without type conversion."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=True
    )


class AtomCall(StatePart):
    """An atom with its parameters, as written in a state."""

    atom: str

    def __reduce__(self) -> tuple[object, ...]:
        # As JSON text: the models of atoms are created at run time and have no import path.
        return _load_call, (self.atom, self.model_dump_json())

    @property
    def idle(self) -> bool:
        """Whether the call changes nothing, so that it reads nothing and need not be run."""
        return False

    def describe(self, doc: str) -> str:
        """What the call does: ``doc``, its atom's, or what a parameter makes of it."""
        return doc

    @classmethod
    def parameters(cls) -> tuple[str, ...]:
        """Names of the parameters this call takes."""
        return tuple(name for name in cls.model_fields if name != "atom")


def added(default: Any, **field: Any) -> Any:
    """Field for a parameter that was added to an atom after states with that atom were published.

    A default value is left out of the JSON, so that the digests of those states do not change.
    """
    return Field(default, exclude_if=lambda value: value == default, **field)


def add_clauses(doc: str, clauses: Mapping[str, bool]) -> str:
    """``doc`` with those of ``clauses`` at its end that are true."""
    return "".join([doc.removesuffix("."), *(c for c in clauses if clauses[c]), "."])


def _load_call(name: str, text: str) -> AtomCall:
    return ATOMS[name].call.model_validate_json(text)


Reads = Callable[..., frozenset[Need]]
"""call -> the inputs that this call reads, for atoms whose parameters decide that."""


@dataclass(frozen=True, slots=True)
class Atom:
    """One typed operation of TPDSL."""

    name: str
    group: Group
    call: type[AtomCall]
    """Model of a call of this atom in a state."""
    needs: frozenset[Need]
    """Every input that some call of this atom reads."""
    origin: Origin
    doc: str
    """First line of its documentation."""
    function: Callable[..., object]
    """Computes the atom's result from a call and the inputs of its group."""
    reads: Reads | None = None
    """call -> the inputs that the call reads, if its parameters decide that."""
    cost: float = 0.0
    """Milliseconds of a call with the most expensive parameters
    (:mod:`~vllm_autoprune.tpdsl.cost`); 0 if they are not counted."""
    videos: bool = False
    """Whether the atom is meaningless for a single image, so that a search on images leaves it out.
    """

    def needs_of(self, call: AtomCall) -> frozenset[Need]:
        """Optional inputs that this call reads; empty if its parameters disable it."""
        if call.idle:
            return frozenset()
        return self.needs if self.reads is None else self.reads(call)

    @property
    def role(self) -> _Role:
        """Component of alpha = (B, S, C, R) that this atom belongs to."""
        return ROLES[self.group]


class _Registry(dict[str, Atom]):
    """All declared atoms by name, in order of declaration."""

    def names(self, group: Group | None = None) -> list[str]:
        """Names of all atoms, or of one group."""
        return [name for name, a in self.items() if group is None or a.group == group]

    def of_kind(self, group: Group, kind: type[AtomCall]) -> list[str]:
        """Names of the atoms of a group whose call model is a subclass of ``kind``."""
        return [name for name in self.names(group) if issubclass(self[name].call, kind)]

    def of(self, call: AtomCall) -> Atom:
        """The atom that a call names."""
        return self[call.atom]

    def describe(self, call: AtomCall) -> str:
        """What a call does, in one sentence."""
        return call.describe(self.of(call).doc)


ATOMS = _Registry()

T = TypeVar("T")


def run(kind: type[T], call: AtomCall, *inputs: object) -> T:
    """Run the atom of a call and check that its result is of type ``kind``."""
    result = ATOMS.of(call).function(call, *inputs)
    assert isinstance(result, kind)
    return result


F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True)
class atom:
    """Decorator: register a function as an atom; see :class:`Atom` for the fields."""

    group: Group
    call: type[AtomCall] | tuple[type[AtomCall], ...] = AtomCall
    """One model, or several whose parameters the atom's model combines."""
    _: KW_ONLY
    name: str = ""
    """By default the name of the function without the underscore."""
    doc: str = ""
    """By default the first line of the function's docstring."""
    cost: float = 0.0
    needs: frozenset[Need] = frozenset()
    origin: Origin = "printed"
    reads: Reads | None = None
    videos: bool = False

    def __call__(self, function: F) -> F:
        """Register the function and return it."""
        name = self.name or function.__name__.removeprefix("_")
        if name in ATOMS:
            raise ValueError(f"atom {name!r} is declared twice")
        doc = self.doc or (function.__doc__ or "").strip().splitlines()[0]
        call: type[AtomCall] = create_model(
            "".join(part.capitalize() for part in re.split(r"[^a-z0-9]+", name)),
            __base__=self.call,
            __doc__=doc,
            atom=(Literal[name], ...),  # type: ignore[arg-type]  # not static
        )
        ATOMS[name] = Atom(
            name,
            self.group,
            call,
            self.needs,
            self.origin,
            doc,
            function,
            self.reads,
            self.cost,
            self.videos,
        )
        return function


C = TypeVar("C", bound=AtomCall)


def default_call(kind: type[C], name: str) -> C:
    """Call of an atom with default parameters."""
    call = ATOMS[name].call.model_validate({"atom": name})
    assert isinstance(call, kind)
    return call


class OneOf:
    """Field annotation: a tagged union of the registered atoms of one group.

    Pydantic builds the union from the registry together with the state model, so a declared atom
    is part of the grammar and the JSON Schema without further changes.
    """

    def __init__(
        self, group: Group, kind: type[AtomCall] = AtomCall, *, bare: bool = False
    ) -> None:
        self.group = group
        self.kind = kind
        """Base class of the calls that this field takes, in a group with several kinds."""
        self.bare = bare
        """Whether a plain string stands for the atom of that name with default parameters."""

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
        return core_schema.no_info_before_validator_function(
            lambda value: {"atom": value} if isinstance(value, str) else value, union
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        union = handler(schema)
        if not self.bare:
            return union
        return {"anyOf": [{"enum": ATOMS.of_kind(self.group, self.kind)}, union]}
