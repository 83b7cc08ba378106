"""PruningState: a pruning policy as frozen, versioned data.

Knows nothing about how a state is executed, and loading one runs no code and follows no link.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

# The grammar below is made of what is registered, so the atoms must be declared by now.
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, AnyBasePolicy
from vllm_autoprune.tpdsl.budget import Budget
from vllm_autoprune.tpdsl.constraints import Selector
from vllm_autoprune.tpdsl.fusion import Fusion
from vllm_autoprune.tpdsl.kernels import SimilarityKernel
from vllm_autoprune.tpdsl.pools import Pool
from vllm_autoprune.tpdsl.reassembly import Reassembly
from vllm_autoprune.tpdsl.safety import SafetyCall
from vllm_autoprune.tpdsl.scoring import Signal

SCHEMA = "autoprune-state/1"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class Scoring(_Part):
    """S: the signals, how they fuse into token quality g, and the similarity kernel."""

    signals: Annotated[tuple[Signal, ...], Field(min_length=1, max_length=32, strict=False)]
    kernel: SimilarityKernel
    fusion: Fusion


class Constraints(_Part):
    """C: the candidate pool and the selector that exchanges within it."""

    pool: Annotated[tuple[Pool, ...], Field(min_length=1, max_length=8, strict=False)]
    selector: Selector


class Provenance(_Part):
    """Where a state comes from and what was measured on it; outside the digest."""

    found_by: str = ""
    evaluated_on: str = ""
    scores: dict[str, JsonValue] = Field(default_factory=dict)
    seed: int | None = None
    notes: str = ""


class PruningState(_Part):
    """(pi_P, alpha) with alpha = (B, S, C, R): equation 4 of the paper."""

    model_config = ConfigDict(serialize_by_alias=True, title="vllm-autoprune pruning state")

    schema_version: Literal["autoprune-state/1"] = Field(alias="schema")
    name: str = Field(min_length=1, max_length=128)
    base_policy: AnyBasePolicy
    budget: Budget
    scoring: Scoring
    constraints: Constraints
    reassembly: Reassembly
    safety: Annotated[tuple[SafetyCall, ...], Field(min_length=1, max_length=8, strict=False)]
    provenance: Provenance = Provenance()

    def __reduce__(self) -> tuple[object, ...]:
        # Through text: the models of atoms are made at run time and have no import path.
        return type(self).model_validate_json, (self.dumps(),)

    def __hash__(self) -> int:
        # The default would hash the fields, of which provenance holds dictionaries.
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides behaviour: not the name, not the provenance.

        Defaults are written out first, so stating one does not change the digest.
        """
        body = self.model_dump(mode="json", exclude={"name", "provenance"})
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
        """The same state with q_e = 0: its base policy alone."""
        selector = self.constraints.selector.model_copy(update={"q_e": 0, "r_min": None})
        constraints = self.constraints.model_copy(update={"selector": selector})
        return self.model_copy(update={"constraints": constraints})

    def dumps(self) -> str:
        """The state as JSON text that loads back to an equal state."""
        return self.model_dump_json(indent=2) + "\n"


def known_base_policies() -> list[str]:
    """Names a state may give as its base policy."""
    return list(BASE_POLICIES)
