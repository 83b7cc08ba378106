"""Searched components of a state, alpha = (S, C, R), as typed models and as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from offline_search.settings import Library
from vllm_autoprune.tpdsl.atoms.reassembly import Reassembly
from vllm_autoprune.tpdsl.atoms.source import Source
from vllm_autoprune.tpdsl.registry import AtomCall
from vllm_autoprune.tpdsl.state import Constraints, Core, PruningState, Scoring
from vllm_autoprune.tpdsl.tokens import RankAt

JsonObject = dict[str, JsonValue]

COMPONENTS = ("scoring", "constraints", "reassembly")
"""Fields of a state that are searched; base policy, budget and safety checks are settings."""

CORE = "core"
RANK_AT = "rank_at"
BASE = "base_policy"
"""The optional components, searched where the settings say so."""

LIBRARY_COMPONENTS = ("source", "budget", *COMPONENTS, "safety")
"""Fields that take the 131 atoms of the paper."""

Choice = float | str


class ChoiceSource(Protocol):
    """Makes named choices; one name always has the same options or range."""

    def option(self, name: str, options: Sequence[str]) -> str:
        """One of several options."""

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """A number between two inclusive bounds."""


def searched_components(
    core: bool = False,
    rank_at: bool = False,
    library: Library = "searched",
    bases: bool = False,
) -> tuple[str, ...]:
    """Names of the searched components, with or without the optional ones."""
    names = LIBRARY_COMPONENTS if library == "paper" else COMPONENTS
    optional = {CORE: core, RANK_AT: rank_at, BASE: bases}
    return (*names, *(name for name, searched in optional.items() if searched))


class Components(BaseModel):
    """The searched components, validated one by one; editing a copy keeps the types."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scoring: Scoring
    constraints: Constraints
    reassembly: Reassembly
    core: Core | None = Field(default=None, exclude_if=lambda core: core is None)
    rank_at: RankAt = Field(default="merger_out", exclude_if=lambda place: place == "merger_out")

    @classmethod
    def from_state(cls, state: PruningState) -> Components:
        """The components of a state."""
        return cls(
            scoring=state.scoring,
            constraints=state.constraints,
            reassembly=state.reassembly,
            core=state.core,
            rank_at=state.rank_at,
        )

    def to_json(self) -> JsonObject:
        """All fields, defaults included."""
        return self.model_dump(mode="json")

    def with_scoring(self, **changes: object) -> Components:
        """A copy with some fields of the scoring replaced."""
        return self.model_copy(update={"scoring": self.scoring.model_copy(update=changes)})

    def with_constraints(self, **changes: object) -> Components:
        """A copy with some fields of the constraints replaced."""
        return self.model_copy(update={"constraints": self.constraints.model_copy(update=changes)})


def compact_json(state: PruningState, bases: bool = False) -> JsonObject:
    """The components of a state as a prompt shows them, without defaults that add little.

    With ``bases``, its base policy among them, for a search that has several to choose from.
    """
    included = {*COMPONENTS, CORE, RANK_AT}
    body: JsonObject = state.model_dump(mode="json", include=included, exclude_defaults=True)
    constraints = state.constraints
    compact: JsonObject = {
        "pool": [call.model_dump(mode="json", exclude_defaults=True) for call in constraints.pool],
        "selector": constraints.selector.model_dump(mode="json", exclude={"r_min"}),
    }
    if constraints.partition != Constraints.model_fields["partition"].get_default(
        call_default_factory=True
    ):
        compact["partition"] = constraints.partition.model_dump(mode="json", exclude_defaults=True)
    source: JsonObject = {}
    if state.source != Source():
        source = {"source": state.source.model_dump(mode="json", exclude_defaults=True)}
    reassembly = state.reassembly.model_dump(mode="json")
    compacted: JsonObject = {
        **source,
        **body,
        "constraints": compact,
        "reassembly": reassembly,
    }
    return {**compacted, BASE: base_choice(state)} if bases else compacted


def compact_text(state: PruningState, bases: bool = False) -> str:
    """:func:`compact_json` as text without spaces."""
    return json.dumps(compact_json(state, bases), separators=(",", ":"))


def base_choice(state: PruningState) -> JsonObject:
    """The base policy as a proposal names it, without its parameters, which are not searched."""
    return {"name": state.base_policy.name}


def atom_calls(state: PruningState) -> list[AtomCall]:
    """All atom calls of the searched components, in the order of the state."""
    scoring, constraints = state.scoring, state.constraints
    return [
        *scoring.signals,
        scoring.kernel,
        scoring.fusion,
        *constraints.pool,
        constraints.partition,
        constraints.selector,
        state.reassembly,
    ]


def structure(state: PruningState) -> tuple[str, ...]:
    """Names of all atoms in order, of the policies, and where tokens are ranked.

    Two states of one structure differ in numbers only.
    """
    source = (state.source.tokens, *state.source.priors) if state.source != Source() else ()
    core = () if state.core is None else (f"core={state.core.policy.name}",)
    rank = () if state.rank_at == "merger_out" else (f"{RANK_AT}={state.rank_at}",)
    base = f"{BASE}={state.base_policy.name}"
    return (*(call.atom for call in (*source, *atom_calls(state))), *core, *rank, base)


@dataclass(frozen=True, slots=True)
class SelectionProgram:
    """Python code with a function ``select(features, signals, K)`` that returns K indices."""

    code: str

    @property
    def digest(self) -> str:
        """SHA-256 of the code, which identifies the candidate as a state's digest does."""
        return hashlib.sha256(self.code.encode()).hexdigest()


Candidate = PruningState | SelectionProgram
"""What a search evaluates: a state, or a program that selects tokens."""
