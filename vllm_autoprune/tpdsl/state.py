"""PruningState: a pruning policy as frozen, versioned data.

Knows nothing about how a state is executed, and loading one runs no code and follows no link.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

# The grammar below is made of what is registered, so the atoms must be declared by now.
from vllm_autoprune.tpdsl.atom import ATOMS, AtomCall, by_default
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, AnyBasePolicy
from vllm_autoprune.tpdsl.budget import Budget
from vllm_autoprune.tpdsl.constraints import Selector, SelectorCall
from vllm_autoprune.tpdsl.fusion import Fusion
from vllm_autoprune.tpdsl.kernels import SimilarityKernel
from vllm_autoprune.tpdsl.partitions import Partition, PartitionCall
from vllm_autoprune.tpdsl.pools import Pool
from vllm_autoprune.tpdsl.reassembly import Reassembly
from vllm_autoprune.tpdsl.safety import SafetyCall
from vllm_autoprune.tpdsl.scoring import Signal
from vllm_autoprune.tpdsl.source import Source

SCHEMA = "autoprune-state/1"

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ID = "urn:vllm-autoprune:autoprune-state:1"


Calls = TypeVar("Calls", bound=tuple[AtomCall, ...])


def _each_once(calls: Calls) -> Calls:
    """Two calls of one check would contradict each other in their parameters."""
    names = [call.atom for call in calls]
    for name in names:
        if names.count(name) > 1:
            raise PydanticCustomError("repeated", "list {name} once", {"name": name})
    return calls


def _each_once_in_schema(schema: dict[str, JsonValue]) -> None:
    schema["allOf"] = [
        {
            "contains": {
                "anyOf": [
                    {"const": name},
                    {
                        "type": "object",
                        "properties": {"atom": {"const": name}},
                        "required": ["atom"],
                    },
                ]
            },
            "minContains": 0,
            "maxContains": 1,
        }
        for name in ATOMS.names("safety_checks")
    ]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Scoring(_Part):
    """S: the signals, how they fuse into token quality g, and the similarity kernel."""

    signals: Annotated[tuple[Signal, ...], Field(min_length=1, max_length=32, strict=False)] = (
        Field(description="what makes a token worth keeping; a signal listed twice counts twice")
    )
    kernel: SimilarityKernel = Field(description="what makes two tokens redundant to each other")
    fusion: Fusion = Field(description="how the signals become one quality per token")


class Constraints(_Part):
    """C: the candidate pool and the selector that exchanges within it."""

    pool: Annotated[tuple[Pool, ...], Field(min_length=1, max_length=8, strict=False)] = Field(
        description="builders of the candidate pool; each sees what the one before it left"
    )
    partition: Partition = Field(
        default_factory=lambda: by_default(PartitionCall, "spatial_grid_partition"),
        description="parts of the image, for selectors that cap them; none: a 4 x 4 grid",
    )
    selector: Selector = Field(description="which reference tokens are exchanged, and how many")


class Provenance(_Part):
    """Where a state comes from and what was measured on it; outside the digest."""

    found_by: str = Field(default="", description="who or what made the state")
    evaluated_on: str = Field(default="", description="data, model and hardware of the scores")
    scores: dict[str, JsonValue] = Field(
        default_factory=dict, description="what was measured, by the name of the measure"
    )
    seed: int | None = Field(
        default=None, ge=-(2**63), lt=2**63, description="of the search or evaluation; null: none"
    )
    notes: str = Field(default="", description="anything else a reader should know")


class PruningState(_Part):
    """(pi_P, alpha) with alpha = (B, S, C, R): equation 4 of the paper."""

    model_config = ConfigDict(
        serialize_by_alias=True,
        title="vllm-autoprune pruning state",
        json_schema_extra={"$schema": _DIALECT, "$id": _ID},
    )

    schema_uri: str = Field(
        default="",
        alias="$schema",
        max_length=2048,
        exclude_if=lambda uri: not uri,
        description="address of this JSON Schema, for editors; never opened",
    )
    schema_version: Literal["autoprune-state/1"] = Field(
        alias="schema", description="version of the language"
    )
    name: str = Field(min_length=1, max_length=128, description="what logs and tables call it")
    base_policy: AnyBasePolicy = Field(
        description="pi_P, the human-designed policy whose selection is refined"
    )
    source: Source = Field(
        default_factory=Source, description="what the residual looks at and knows beforehand"
    )
    budget: Budget = Field(description="B: tokens one image contributes")
    scoring: Scoring
    constraints: Constraints
    reassembly: Reassembly = Field(description="R: what becomes of the discarded tokens")
    safety: Annotated[
        tuple[SafetyCall, ...],
        Field(min_length=1, max_length=8, strict=False, json_schema_extra=_each_once_in_schema),
        AfterValidator(_each_once),
    ] = Field(description="promises that are checked before the state is served")
    provenance: Provenance = Provenance()

    def __reduce__(self) -> tuple[object, ...]:
        # Through text: the models of atoms are made at run time and have no import path.
        return type(self).model_validate_json, (self.dumps(),)

    def __hash__(self) -> int:
        # The default would hash the fields, of which provenance holds dictionaries.
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides behaviour: no name, no provenance, no address.

        Defaults are written out first, so stating one does not change the digest.
        """
        body = self.model_dump(mode="json", exclude={"schema_uri", "name", "provenance"})
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def model_copy(
        self, *, update: Mapping[str, object] | None = None, deep: bool = False
    ) -> PruningState:
        """As pydantic's, but a changed copy works out its own digest."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("digest", None)
        return copied

    def without_exchange(self) -> PruningState:
        """The same state as its base policy alone: nothing exchanged, merged or reordered."""
        selector = by_default(SelectorCall, "reference_strict_preservation_selector")
        constraints = self.constraints.model_copy(update={"selector": selector})
        reassembly = by_default(AtomCall, "mean_residual")
        return self.model_copy(update={"constraints": constraints, "reassembly": reassembly})

    def dumps(self) -> str:
        """The state as JSON text that loads back to an equal state."""
        return self.model_dump_json(indent=2) + "\n"


def known_base_policies() -> list[str]:
    """Names a state may give as its base policy."""
    return list(BASE_POLICIES)
