"""Token source and budget (B): what is scored, priors on quality, and the number K of kept tokens.

Priors multiply token quality g. The view decides only what is scored: the rows that are returned
are always those after the projector. K follows from N and the number of tiles in exact arithmetic,
so every process computes the same K before any model runs.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated

import torch
from pydantic import Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema
from torch import Tensor

from vllm_autoprune.errors import BudgetError
from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicyCall, PolicyParams
from vllm_autoprune.tpdsl.registry import (
    ATOMS,
    AtomCall,
    OneOf,
    StatePart,
    atom,
    default_call,
    run,
)
from vllm_autoprune.tpdsl.tokens import TileScope, VisualTokens


class ViewCall(AtomCall):
    """An atom that chooses the features by which tokens are scored and compared."""


_SCOPE = (
    "scope in which the signals of redundancy and mean dissimilarity and the diversity pool "
    "compare tokens; no other atom reads it"
)


class _ScopedView(ViewCall):
    """A view whose tokens are compared within tiles or across them."""

    tile_scope: TileScope = Field(description=_SCOPE)

    def describe(self, doc: str) -> str:
        """In which scope tokens are compared."""
        scope = "within" if self.tile_scope == "per_tile" else "across"
        return f"{doc.partition(';')[0]}; they are compared {scope} tiles."


class _ProjectedView(_ScopedView):
    """Parameters of vision_tokens@post_projector."""

    tile_scope: TileScope = Field("per_tile", description=_SCOPE)


class _EmbeddedView(_ScopedView):
    """Parameters of vision_tokens@pre_llm."""

    tile_scope: TileScope = Field("global", description=_SCOPE)


class _TowerView(ViewCall):
    """Parameters of vision_tokens@vision_tower."""

    layer: int = Field(
        -2,
        ge=-2,
        le=-2,
        description="layer of the vision tower that the projector reads; the only choice",
    )


class PriorCall(AtomCall):
    """An atom whose value multiplies token quality."""


class _ReferencePrior(PriorCall):
    """Parameters of reference_mask_prior."""

    floor: float = Field(
        0.0, ge=0.0, le=0.9, description="factor of tokens outside the selection"
    )


class _WeightedPrior(PriorCall):
    """A prior of 1 for the tokens of a selection and 1 - weight for all others."""

    weight: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="share of quality that tokens outside the selection lose",
    )

    @property
    def idle(self) -> bool:
        """Whether the prior is 1 everywhere."""
        return self.weight == 0

    def describe(self, doc: str) -> str:
        """What loses quality."""
        return "Changes no quality." if self.idle else doc


class _RegisteredPolicyName:
    """Annotation of a string that must be the name of a registered base policy."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.literal_schema(list(BASE_POLICIES))


class _ExternalPolicy(_WeightedPrior):
    """Parameters of external_policy."""

    policy: Annotated[str, _RegisteredPolicyName()] = Field(
        "cdpruner", description="a base policy, run with its default parameters"
    )

    def describe(self, doc: str) -> str:
        """Which base policy it runs."""
        return super().describe(doc.replace("a second base policy", self.policy))


@dataclass(frozen=True, slots=True)
class PriorInputs:
    """Inputs of a prior: tokens, base policy, K, and picks ``(B, P)`` in pick order."""

    tokens: VisualTokens
    policy: BasePolicyCall
    budget: int
    picks: Tensor


def _scoped(call: _ScopedView, tokens: VisualTokens) -> VisualTokens:
    # A copy would lose cached values; with a single tile both scopes are the same.
    if tokens.grid.tiles == 1 or tokens.tile_scope == call.tile_scope:
        return tokens
    return replace(
        tokens, tile_scope=call.tile_scope, known_cosine=lambda: tokens.cosine
    )


atom(
    "token_source_base_policy",
    _ProjectedView,
    name="vision_tokens@post_projector",
    doc="Score tokens by their features after the projector; tile_scope is within tiles.",
)(_scoped)
atom(
    "token_source_base_policy",
    _EmbeddedView,
    name="vision_tokens@pre_llm",
    doc="The same features as vision_tokens@post_projector, which enter the language model as they "
    "are; only the default tile_scope differs: across tiles.",
)(_scoped)


@atom(
    "token_source_base_policy",
    _TowerView,
    name="vision_tokens@vision_tower",
    needs=frozenset({"tower"}),
    origin="listed",
)
def _tower_view(call: _TowerView, tokens: VisualTokens) -> VisualTokens:
    """Score tokens by the output of the vision tower, before the projector."""
    patches = tokens.require_tower().patches
    return replace(tokens, features=patches, known_cosine=None, merged=None)


@atom(
    "token_source_base_policy",
    _ExternalPolicy,
    needs=frozenset().union(*(policy.needs for policy in BASE_POLICIES.values())),
    reads=lambda call: BASE_POLICIES[call.policy].needs_of(
        BASE_POLICIES[call.policy].default_params
    ),
    cost=0.1,
)
def _external_policy(call: _ExternalPolicy, inputs: PriorInputs) -> Tensor:
    """Run a second base policy and reduce the quality of every token that it does not pick."""
    params = BASE_POLICIES[call.policy].default_params
    return _prior_of(call.policy, params, inputs, call.weight)


@atom("token_source_base_policy", _WeightedPrior, cost=0.1)
def _native_teacher_mask_prior(call: _WeightedPrior, inputs: PriorInputs) -> Tensor:
    """As reference_mask_prior (floor = 1 - weight), for what the base policy alone serves at K."""
    return _prior_of(inputs.policy.name, inputs.policy.params, inputs, call.weight)


@atom("token_source_base_policy", _ReferencePrior, cost=0.1)
def _reference_mask_prior(call: _ReferencePrior, inputs: PriorInputs) -> Tensor:
    """Reduce the quality of every token outside the reference selection."""
    return torch.where(
        mask_from_indices(inputs.picks, inputs.tokens.count), 1.0, call.floor
    )


def _prior_of(
    policy: str, params: PolicyParams, inputs: PriorInputs, weight: float
) -> Tensor:
    """Prior ``(B, N)``: 1 for the tokens that a base policy keeps at K, else 1 - weight."""
    picks = BASE_POLICIES[policy].select(params, inputs.tokens, inputs.budget).picks
    return torch.where(mask_from_indices(picks, inputs.tokens.count), 1.0, 1 - weight)


View = Annotated[ViewCall, OneOf("token_source_base_policy", ViewCall)]
Prior = Annotated[PriorCall, OneOf("token_source_base_policy", PriorCall)]


class Source(StatePart):
    """Context: the token view, and priors from whole selections."""

    tokens: View = Field(
        default_factory=lambda: default_call(ViewCall, "vision_tokens@post_projector"),
        description="features that signals, kernels and pools read; default: after the projector",
    )
    priors: Annotated[tuple[Prior, ...], Field(max_length=8, strict=False)] = Field(
        default=(), description="factors on token quality"
    )


MAX_BUDGET = 65536
"""Largest K of an image."""

FIXED_BUDGETS = (16, 32, 64, 128, 160, 192, 256, 320, 512, 640)
"""The ten values of K in the paper's language."""


_BUDGET_PATTERN = re.compile(
    r"(\d{1,5})|(?:(\d{1,5}/\d{1,5})|(\d{1,3}(?:\.\d{1,4})?)%)(?::(\d{1,5})-(\d{1,5}))?",
    re.ASCII,
)

_VIDEO_BUDGET_PATTERN = re.compile(r"tokens_per_frame:(\d{1,5})", re.ASCII)

_EXACT = 10**6
"""Largest denominator of a share: two such fractions never have the same float."""


class BudgetCall(AtomCall):
    """Parameters of every budget atom: the largest K that flags and requests may ask for."""

    limit: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="largest K that a flag or a request may ask for; null: no limit",
    )

    def tokens_kept(self, tokens: int, tiles: int = 1) -> int:
        """K of an image of N tokens in T tiles; may exceed N."""
        return run(int, self, tokens, tiles)

    def range(self) -> tuple[int, int]:
        """Smallest and largest K of any image."""
        return _fixed_budget(self, 0, 1), _fixed_budget(self, 0, 1)

    def rule(self) -> int | str:
        """K, or where it depends on the image the smallest and largest K in words."""
        minimum, maximum = self.range()
        return maximum if minimum == maximum else f"{minimum} to {maximum}"

    @classmethod
    def parse(
        cls, value: object, where: str = "budget", *, video: bool = False
    ) -> BudgetCall:
        """Parse a budget as people write it: 64, or a share of N such as 1/8, 12.5% or 1/8:64-640.

        A share becomes a ratio_budget. With ``video``, tokens_per_frame:16 is accepted too and
        becomes a per_frame_budget. Raises :class:`BudgetError`, located at ``where``.
        """
        if isinstance(value, BudgetCall):
            return value
        is_count = type(value) is int and abs(value) < _EXACT
        text = f"{value}".strip() if is_count or isinstance(value, str) else ""
        if video and (match := _VIDEO_BUDGET_PATTERN.fullmatch(text)):
            with suppress(ValidationError):
                per_frame = {"atom": "per_frame_budget", "k": int(match[1])}
                call = ATOMS["per_frame_budget"].call.model_validate(per_frame)
                if isinstance(call, BudgetCall):
                    return call
        if match := _BUDGET_PATTERN.fullmatch(text):
            count, fraction, percent, floor, ceiling = match.groups()
            minimum = int(floor or count or 1)
            maximum = int(ceiling or count or MAX_BUDGET)
            with suppress(ZeroDivisionError, ValidationError):
                share = Fraction(percent) / 100 if percent else Fraction(fraction or 1)
                ratio = {"ratio": float(share), "floor": minimum, "ceiling": maximum}
                call = ATOMS["ratio_budget"].call.model_validate(
                    {"atom": "ratio_budget", **ratio}
                )
                if isinstance(call, BudgetCall) and minimum <= maximum:
                    return call
        what = f"{text[:40]!r} is not a budget" if text else "is not a budget"
        fix = f"give 1 to {MAX_BUDGET} tokens, a share from 1% such as 1/8 or 12.5%, or 1/8:64-640"
        fix += ", or tokens_per_frame:16" if video else ""
        raise BudgetError.of(where, what, fix, subject="budget")


class _RatioBudget(BudgetCall):
    """Parameters of ratio_budget."""

    ratio: float = Field(
        0.1, ge=0.01, le=1.0, description="share of an image's tokens that is kept"
    )
    floor: int = Field(16, ge=1, le=65536, description="smallest K")
    ceiling: int = Field(640, ge=1, le=65536, description="largest K")

    def range(self) -> tuple[int, int]:
        """Floor and ceiling; a floor above the ceiling is lowered to it."""
        return min(self.floor, self.ceiling), self.ceiling

    @property
    def share(self) -> Fraction:
        """The exact ratio: 0.3 of 10 tokens is 3, and 1/3, no float, of 144 tokens is 48."""
        return Fraction(self.ratio).limit_denominator(_EXACT)

    def rule(self) -> int | str:
        """Share of N with its bounds, as a budget flag takes it."""
        if self.floor >= self.ceiling:
            return self.ceiling
        top, bottom = self.share.as_integer_ratio()
        share = (
            f"{top}/{bottom}" if bottom < 10**5 else f"{float(100 * self.share):.4f}%"
        )
        bounded = (self.floor, self.ceiling) != (1, MAX_BUDGET)
        return f"{share}:{self.floor}-{self.ceiling}" if bounded else share


class _TileBudget(BudgetCall):
    k: int = Field(32, ge=1, le=65536, description="tokens kept per tile")
    ceiling: int = Field(640, ge=1, le=65536, description="largest K of an image")

    def range(self) -> tuple[int, int]:
        """K of a one-tile image, and the ceiling."""
        return min(self.k, self.ceiling), self.ceiling


class _FrameBudget(_TileBudget):
    """Parameters of per_frame_budget."""

    k: int = Field(16, ge=1, le=65536, description="tokens kept per frame")
    ceiling: int = Field(65536, ge=1, le=65536, description="largest K of a video")

    def rule(self) -> int | str:
        """Tokens per frame, as a budget flag takes them; with a ceiling, as the base class."""
        return (
            f"tokens_per_frame:{self.k}"
            if self.ceiling == MAX_BUDGET
            else super().rule()
        )


def _fixed_budget(call: BudgetCall, tokens: int, tiles: int) -> int:
    """Keep exactly K tokens, or all of an image that has fewer."""
    return int(call.atom.removeprefix("fixed_budget@"))


for _k in FIXED_BUDGETS:
    atom(
        "budget_control",
        BudgetCall,
        name=f"fixed_budget@{_k}",
        doc=f"Keep exactly K = {_k} tokens of an image, or all where it has fewer.",
    )(_fixed_budget)


@atom("budget_control", _RatioBudget, origin="extension")
def _ratio_budget(call: _RatioBudget, tokens: int, tiles: int) -> int:
    """Keep a fixed share of an image's tokens, rounded down and clamped to floor and ceiling."""
    return min(call.ceiling, max(call.floor, int(call.share * tokens)))


@atom("budget_control", _TileBudget, origin="extension")
def _per_tile_budget(call: _TileBudget, tokens: int, tiles: int) -> int:
    """Keep k tokens per tile of an image, at most the ceiling in all."""
    return min(call.ceiling, call.k * tiles)


atom(
    "budget_control",
    _FrameBudget,
    name="per_frame_budget",
    origin="extension",
    videos=True,
    doc="Keep k tokens per frame of a video, at most the ceiling in all; in some frames more.",
)(_per_tile_budget)


Budget = Annotated[BudgetCall, OneOf("budget_control", BudgetCall)]
