"""Token source and base policy: which features the residual looks at, and what it already knows.

Knows nothing about scores. The base policy itself is a field of its own; here are the token view
that signals, kernels and pools read, and the priors that token quality g is multiplied by.

Whatever the view, the rows that are kept are those after the projector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from torch import Tensor

from vllm_autoprune.tpdsl.atom import ATOMS, AtomCall, OneOf, atom, by_default, declare
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, BasePolicyCall
from vllm_autoprune.tpdsl.numerics import mask_of
from vllm_autoprune.tpdsl.tokens import Need, TileScope, VisualTokens


class ViewCall(AtomCall):
    """An atom that says which features stand for the tokens."""


class ProjectedView(ViewCall):
    """Parameters of vision_tokens@post_projector."""

    tile_scope: TileScope = Field("per_tile", description="where redundancy looks for likeness")


class EmbeddedView(ViewCall):
    """Parameters of vision_tokens@pre_llm."""

    tile_scope: TileScope = Field("global", description="where redundancy looks for likeness")


class TowerView(ViewCall):
    """Parameters of vision_tokens@vision_tower."""

    layer: int = Field(
        -2, ge=-2, le=-2, description="the layer that the model reads: no other is kept"
    )


class PriorCall(AtomCall):
    """An atom that token quality is multiplied by."""


class ReferencePrior(PriorCall):
    """Parameters of reference_mask_prior."""

    floor: float = Field(0.0, ge=0.0, le=0.9, description="prior of a token not selected")


class WeightedPrior(PriorCall):
    """A prior of 1 for the tokens of a selection and of 1 - weight for all others."""

    weight: float = Field(0.5, ge=0.0, le=1.0, description="what a token not selected loses")


class _Registered:
    """Annotation that admits the names of the registered base policies alone."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.literal_schema(list(BASE_POLICIES))


class ExternalPolicy(WeightedPrior):
    """Parameters of external_policy."""

    policy: Annotated[str, _Registered()] = Field(
        "cdpruner", description="a base policy, run with its parameters as published"
    )


@dataclass(frozen=True, slots=True)
class Known:
    """What priors look at: the tokens, the base policy, K, and its picks ``(B, P)`` in order."""

    tokens: VisualTokens
    policy: BasePolicyCall
    budget: int
    picks: Tensor


def _scoped(call: ProjectedView | EmbeddedView, tokens: VisualTokens) -> VisualTokens:
    # A copy would forget what is known of the tokens; within one tile the scope says nothing.
    if tokens.grid.tiles == 1 or tokens.tile_scope == call.tile_scope:
        return tokens
    return replace(tokens, tile_scope=call.tile_scope, known_cosine=tokens.cosine)


def _tower(call: TowerView, tokens: VisualTokens) -> VisualTokens:
    return replace(tokens, features=tokens.require_tower().patches, known_cosine=None)


declare(
    "vision_tokens@post_projector",
    "token_source_base_policy",
    ProjectedView,
    _scoped,
    doc="Look at the tokens after the projector, each tile on its own.",
)
declare(
    "vision_tokens@pre_llm",
    "token_source_base_policy",
    EmbeddedView,
    _scoped,
    doc="Look at the tokens as the language model receives them, all tiles of an image together.",
)
declare(
    "vision_tokens@vision_tower",
    "token_source_base_policy",
    TowerView,
    _tower,
    needs=frozenset({"tower"}),
    origin="listed",
    doc="Look at the tokens as the vision tower leaves them, before the projector.",
)


def _external_reads(call: ExternalPolicy) -> frozenset[Need]:
    return BASE_POLICIES[call.policy].needs if call.weight > 0 else frozenset()


@atom(
    "token_source_base_policy",
    ExternalPolicy,
    needs=frozenset().union(*(policy.needs for policy in BASE_POLICIES.values())),
    reads=_external_reads,
)
def external_policy(call: ExternalPolicy, known: Known) -> Tensor:
    """Run a second base policy, and lower the quality of every token that it does not pick."""
    second = BASE_POLICIES[call.policy]
    params = second.call.model_validate({"name": call.policy}).params
    picks = second.select(params, known.tokens, known.budget).picks
    return _prior(mask_of(picks, known.tokens.count), 1 - call.weight)


@atom("token_source_base_policy", WeightedPrior)
def native_teacher_mask_prior(call: WeightedPrior, known: Known) -> Tensor:
    """Lower the quality of every token that the base policy's published code would not keep."""
    teacher = BASE_POLICIES[known.policy.name]
    native = teacher.native(known.policy.params, known.tokens, known.budget)
    return _prior(_mask_of_each(native.indices, known.tokens.count), 1 - call.weight)


@atom("token_source_base_policy", ReferencePrior)
def reference_mask_prior(call: ReferencePrior, known: Known) -> Tensor:
    """Lower the quality of every token outside the reference selection."""
    return _prior(mask_of(known.picks, known.tokens.count), call.floor)


def _prior(selected: Tensor, floor: float) -> Tensor:
    return torch.where(selected, 1.0, floor)


def _mask_of_each(indices: Sequence[Tensor], count: int) -> Tensor:
    """``(B, count)`` from one list of tokens an image; -1 stands for no token."""
    # Rows without a token mark one token more than there are.
    rows = [mask_of(own.where(own >= 0, count)[None], count + 1) for own in indices]
    return torch.cat(rows)[:, :count]


View = Annotated[ViewCall, OneOf("token_source_base_policy", ViewCall)]
Prior = Annotated[PriorCall, OneOf("token_source_base_policy", PriorCall)]


class Source(BaseModel):
    """Context: what the residual looks at, and priors from whole selections."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    tokens: View = Field(
        default_factory=lambda: by_default(ViewCall, "vision_tokens@post_projector"),
        description="features that signals, kernels and pools read; none: after the projector",
    )
    priors: Annotated[tuple[Prior, ...], Field(max_length=8, strict=False)] = Field(
        default=(), description="what token quality is multiplied by"
    )


def is_idle(call: PriorCall) -> bool:
    """True where a prior changes nothing and so is not run."""
    return isinstance(call, WeightedPrior) and call.weight == 0


def view_of(call: ViewCall, tokens: VisualTokens) -> VisualTokens:
    """The tokens as a view shows them."""
    seen = ATOMS.of(call).function(call, tokens)
    assert isinstance(seen, VisualTokens)
    return seen


def run_prior(call: PriorCall, known: Known) -> Tensor:
    """Prior ``(B, N)`` float32 in [0, 1]."""
    prior = ATOMS.of(call).function(call, known)
    assert isinstance(prior, Tensor)
    return prior
