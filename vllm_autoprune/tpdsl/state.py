"""PruningState: a pruning policy as frozen, versioned data.

Loading one runs no code, opens no address and reads no other file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from vllm_autoprune.errors import Problem
from vllm_autoprune.tpdsl.atoms.pools import Partition, PartitionCall, Pool
from vllm_autoprune.tpdsl.atoms.reassembly import RECIPES, Reassembly
from vllm_autoprune.tpdsl.atoms.safety import SafetyCall
from vllm_autoprune.tpdsl.atoms.scoring import Fusion, SimilarityKernel
from vllm_autoprune.tpdsl.atoms.selectors import Selector, SelectorCall
from vllm_autoprune.tpdsl.atoms.signals import Signal
from vllm_autoprune.tpdsl.atoms.source import Budget, Source
from vllm_autoprune.tpdsl.base_policy import (
    BASE_POLICIES,
    AnyBasePolicy,
    QuestionFreePolicy,
)
from vllm_autoprune.tpdsl.cells import Cells
from vllm_autoprune.tpdsl.frames import Frames
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, StatePart, default_call
from vllm_autoprune.tpdsl.tokens import Need, Positions, RankAt, Shares, VisualTokens
from vllm_autoprune.tpdsl.tower import Tower

# The grammar below is built from the registry, so these imports have to declare the atoms first.

SCHEMA = "autoprune-state/1"

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ID = "urn:vllm-autoprune:autoprune-state:1"


_Calls = TypeVar("_Calls", bound=tuple[AtomCall, ...])


def _each_once(calls: _Calls) -> _Calls:
    """Refuse two calls of a safety check, because their parameters could contradict each other."""
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


class Scoring(StatePart):
    """S: the signals, their fusion into token quality g, and the similarity kernel."""

    signals: Annotated[
        tuple[Signal, ...], Field(min_length=1, max_length=32, strict=False)
    ] = Field(
        description="quality signals of a token; a signal listed twice counts twice"
    )
    kernel: SimilarityKernel = Field(
        description="how redundant two tokens are to each other"
    )
    fusion: Fusion = Field(
        description="how the signals are combined into one quality per token"
    )


class Constraints(StatePart):
    """C: the candidate pool, and the selector that exchanges tokens for its candidates."""

    pool: Annotated[
        tuple[Pool, ...], Field(min_length=1, max_length=8, strict=False)
    ] = Field(
        description="builders of the candidate pool, each within that of the one before"
    )
    partition: Partition = Field(
        default_factory=lambda: default_call(PartitionCall, "spatial_grid_partition"),
        description="parts of the image, for selectors that cap them; default: a 4 x 4 grid",
    )
    selector: Selector = Field(
        description="which reference tokens are exchanged, and how many at most"
    )


class Core(StatePart):
    """Extension: tokens that are kept for every question, so that servers share their KV blocks.

    The core is chosen without the question and fills part of K; the rest of the state then chooses
    the others, the delta, given the core.
    """

    share: float = Field(
        ge=0.01,
        le=1.0,
        description="part of K that is core, rounded down; 1: no question is read",
    )
    policy: QuestionFreePolicy = Field(
        default_factory=lambda: BASE_POLICIES["divprune"].call.model_validate(
            {"name": "divprune"}
        ),
        description="policy that chooses the core; it must not read the question",
    )
    cover: float = Field(
        0.0,
        ge=0.0,
        le=0.9,
        description="part of all tokens that the core stands for, the most similar ones to it: no "
        "other part keeps or merges them, unless too few were left",
    )
    strength: float = Field(
        0.0,
        ge=0.0,
        le=0.5,
        description="weight, in a core row, of the mean of the tokens that it stands for",
    )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the fields that select the core and make its rows, without its size."""
        body = self.model_dump(mode="json", exclude={"share"})
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

    def tokens(self, budget: int) -> int:
        """Number of core tokens K_c at K = ``budget``, at most K."""
        # Products such as 0.07 * 100 are a rounding error above or below the whole number.
        return int(self.share * budget + 1e-9)


class Provenance(StatePart):
    """Origin of a state and its evaluation scores; not part of the digest."""

    found_by: str = Field(
        default="", description="author or search that created the state"
    )
    evaluated_on: str = Field(
        default="", description="data, model and hardware of the scores"
    )
    scores: dict[str, JsonValue] = Field(
        default_factory=dict, description="evaluation results by metric name"
    )
    seed: int | None = Field(
        default=None,
        ge=-(2**63),
        lt=2**63,
        description="seed of the search or evaluation; null: none",
    )
    # One text, because a state has at most 10,000 values and may be chosen by more images.
    chosen_by: str = Field(
        default="",
        pattern=r"^([0-9a-f]{8}( [0-9a-f]{8})*)?$",
        exclude_if=lambda digests: not digests,
        description="images about which a search asked the questions that chose the state: the "
        "first eight digits of the SHA-256 of each",
    )
    notes: str = Field(default="", description="further remarks")


class PruningState(StatePart):
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
        description="address of this JSON Schema, for editors; never fetched",
    )
    schema_version: Literal["autoprune-state/1"] = Field(
        alias="schema", description="version of the language"
    )
    name: str = Field(
        min_length=1, max_length=128, description="name in logs and tables"
    )
    base_policy: AnyBasePolicy = Field(
        description="pi_P, the human-designed policy whose selection is refined"
    )
    source: Source = Field(
        default_factory=Source,
        description="features that are scored, and priors on quality",
    )
    rank_at: RankAt = Field(
        default="merger_out",
        exclude_if=lambda place: place == "merger_out",
        description="extension: where tokens are scored and compared, after the patch merger or "
        "before it; the rows that are kept are those after it either way",
    )
    shares: Shares = Field(
        default="equal",
        exclude_if=lambda shares: shares == "equal",
        description="extension: how K falls to the tiles of an image; equal: the base policy keeps "
        "K / T of each of T tiles; free: it keeps K of all tokens as of one grid",
    )
    positions: Positions = Field(
        default="packed",
        exclude_if=lambda positions: positions == "packed",
        description="extension: where kept tokens stand for a language model whose positions have "
        "one axis; true: where they stood in the whole image; spread: evenly over its span; "
        "packed: one after the other. Under M-RoPE they keep their places in any case",
    )
    budget: Budget = Field(description="B: number of tokens kept per image")
    core: Core | None = Field(
        default=None,
        exclude_if=lambda core: core is None,
        description="extension: tokens of K that are kept for every question; null: none",
    )
    cells: Cells | None = Field(
        default=None,
        exclude_if=lambda cells: cells is None,
        description="extension: blank or unchanged cells of a picture that are dropped before the "
        "vision tower; null: none",
    )
    tower: Tower | None = Field(
        default=None,
        exclude_if=lambda tower: tower is None,
        description="extension: cells of a picture that are dropped inside the vision tower; "
        "null: none",
    )
    frames: Frames | None = Field(
        default=None,
        exclude_if=lambda frames: frames is None,
        description="extension: how videos are pruned; null: they stay whole",
    )
    scoring: Scoring
    constraints: Constraints
    reassembly: Reassembly = Field(
        description="R: how discarded tokens are merged into kept ones, and the order of rows"
    )
    safety: Annotated[
        tuple[SafetyCall, ...],
        Field(
            min_length=1,
            max_length=8,
            strict=False,
            json_schema_extra=_each_once_in_schema,
        ),
        AfterValidator(_each_once),
    ] = Field(description="guarantees that are checked before the state is served")
    provenance: Provenance = Provenance()

    def __reduce__(self) -> tuple[object, ...]:
        # As JSON text, because the models of atoms are created at run time and cannot be pickled.
        return type(self).model_validate_json, (self.dumps(),)

    def __hash__(self) -> int:
        # The fields cannot be hashed, because provenance contains dictionaries.
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of every field that affects behaviour: all but name, provenance and $schema.

        Defaults are included, so writing one out does not change the digest.
        """
        body = self.model_dump(
            mode="json", exclude={"schema_uri", "name", "provenance"}
        )
        canonical = json.dumps(
            body, sort_keys=True, separators=(",", ":"), ensure_ascii=True
        )
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def possible_core(self) -> Core | None:
        """The core, or of a state without one what its base policy chooses without the question.

        None if that policy has no form without the question.
        """
        policy = BASE_POLICIES[self.base_policy.name]
        if self.core is not None or policy.core is None:
            return self.core
        params = policy.question_free_params(self.base_policy.params)
        call = {"name": policy.name, "params": params.model_dump(mode="json")}
        return Core.model_validate({"share": 1.0, "policy": call})

    @cached_property
    def core_digest(self) -> str:
        """SHA-256 of all that selects :attr:`possible_core` and makes its rows; empty for none."""
        core = self.possible_core
        if core is None:
            return ""
        if (self.rank_at, self.shares, self.frames) == ("merger_out", "equal", None):
            return core.digest
        context = (
            self.rank_at if self.shares == "equal" else f"{self.rank_at} {self.shares}"
        )
        if self.frames is not None:
            context += f" {self.frames.model_dump_json(exclude={'tokens'})}"
        return hashlib.sha256(f"{context} {core.digest}".encode()).hexdigest()

    def ranked(self, tokens: VisualTokens) -> VisualTokens:
        """The tokens by which this state scores and compares them, before or after the merger."""
        return tokens.before_merger if self.rank_at == "merger_in" else tokens

    def shared(self, tokens: VisualTokens) -> VisualTokens:
        """The tokens as the base policy selects them: in tiles of equal shares, or in one tile."""
        return tokens.as_one_tile if self.shares == "free" else tokens

    def model_copy(
        self, *, update: Mapping[str, object] | None = None, deep: bool = False
    ) -> PruningState:
        """Copy with updated fields, as in pydantic; the cached digests are not copied."""
        copied = super().model_copy(update=update, deep=deep)
        for name in ("digest", "possible_core", "core_digest"):
            copied.__dict__.pop(name, None)
        return copied

    @property
    def orders_by_quality(self) -> bool:
        """Whether rows are ordered by token quality g, which must then be computed."""
        return RECIPES[self.reassembly.atom].order.name == "score"

    @property
    def reads_quality(self) -> bool:
        """Whether token quality g decides which tokens an exchange keeps, or the order of rows."""
        constraints = self.constraints
        return (
            self.orders_by_quality
            or constraints.selector.reads_quality(self.scoring.kernel)
            or any(pool.reads_quality for pool in constraints.pool)
        )

    @property
    def reads_kernel(self) -> bool:
        """Whether the similarity kernel decides which tokens an exchange keeps."""
        return self.constraints.selector.reads_kernel

    def needs(self, *, exchange: bool) -> frozenset[Need]:
        """Optional inputs that the state reads, with or without its exchange."""
        policies = (
            [self.base_policy]
            if self.core is None
            else [self.base_policy, self.core.policy]
        )
        needs = {
            need for p in policies for need in BASE_POLICIES[p.name].needs_of(p.params)
        }
        if self.rank_at == "merger_in":
            needs |= {"encoder", "merger_input"}
        calls: list[AtomCall] = [self.reassembly]
        if exchange or self.orders_by_quality:
            signals = [call for call in self.scoring.signals if call.weight > 0]
            calls += [
                self.source.tokens,
                *signals,
                self.scoring.fusion,
                *self.source.priors,
            ]
        if exchange:
            constraints = self.constraints
            calls += [self.scoring.kernel, *constraints.pool, constraints.selector]
        for call in calls:
            needs |= ATOMS.of(call).needs_of(call)
        return frozenset(needs)

    def budget_problems(
        self, minimum: int, maximum: int, *, video: bool = False
    ) -> list[Problem]:
        """Rules of the state that some K in these bounds breaks, for an image or a video."""
        pointer = "/budget"
        rule = self.budget
        if video and self.frames is not None:
            pointer = "/frames/tokens"
            rule = self.frames.tokens
        limit = rule.limit
        r_min = self.constraints.selector.explicit_r_min
        problems = []
        if limit is not None and maximum > limit:
            what = f"K = {maximum} is above the limit of the state, {limit}"
            fix = f"use K = {limit} or less, or a larger limit"
            problems.append(
                Problem(f"{pointer}/limit", what, fix, "limit_below_budget")
            )
        if r_min is not None and r_min > minimum:
            what = f"r_min = {r_min} reference tokens cannot be kept of K = {minimum}"
            fix = "set it to null, which means K - q_e, or use a larger K"
            where = "/constraints/selector/r_min"
            problems.append(Problem(where, what, fix, "r_min_above_budget"))
        return problems

    def without_exchange(self) -> PruningState:
        """The same state without exchange, merging and reordering: only its base policy acts."""
        selector = default_call(SelectorCall, "reference_strict_preservation_selector")
        constraints = self.constraints.model_copy(update={"selector": selector})
        reassembly = default_call(AtomCall, "mean_residual")
        return self.model_copy(
            update={"constraints": constraints, "reassembly": reassembly}
        )

    def document(self) -> dict[str, JsonValue]:
        """The state as a JSON object, with defaults."""
        document: dict[str, JsonValue] = self.model_dump(mode="json")
        return document

    def dumps(self) -> str:
        """The state as JSON text; loading it gives an equal state."""
        return self.model_dump_json(indent=2) + "\n"
