"""Registry of base policies (pi_P), the interface that each implements, and what policies select.

The policies themselves are in :mod:`vllm_autoprune.base_policies`. A policy returns K = P + E rows
per image: the rows of P kept tokens, and E extra rows that correspond to no single token (E is 0
for most policies).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema
from torch import Tensor

from vllm_autoprune.ops.rowwise import (
    gather_rows,
    indices_from_mask,
    mask_from_indices,
    positions_in_order,
)
from vllm_autoprune.tpdsl.registry import StatePart
from vllm_autoprune.tpdsl.tokens import Need, VisualTokens


class PolicyParams(StatePart):
    """Parameters of a base policy."""

    def layers_read(self, layers: int) -> int:
        """Number of layers that run over all N tokens, of ``layers`` of a language model."""
        return 0


class BasePolicyCall(StatePart):
    """A base policy with its parameters, as written in a state."""

    name: str
    params: PolicyParams = PolicyParams()


@dataclass(frozen=True, slots=True)
class ReferenceSelection:
    """Reference selection T_P of B images: K = P + E rows, with the same P and E in every image."""

    picks: Tensor
    """``(B, P)`` int64 in pick order, unique in each row."""
    merged: Tensor | None = None
    """``(B, P, D)``, which replaces the rows of the picks if the policy merges other tokens into
    them."""
    extra: Tensor | None = None
    """``(B, E, D)``: rows that correspond to no single token, such as the mean of all others. They
    come last and are never exchanged."""

    def rows(self, tokens: VisualTokens) -> Tensor:
        """Rows ``(B, N, D)`` of all tokens; the rows of picks include what was merged into them."""
        if self.merged is None:
            return tokens.features
        where = self.picks[:, :, None].expand_as(self.merged)
        return tokens.features.scatter(1, where, self.merged.to(tokens.features.dtype))


@dataclass(frozen=True, slots=True)
class Given:
    """Tokens that are kept already, from which a selection continues."""

    indices: Tensor
    """``(B, A)``: indices of the given tokens, unique in each row."""
    closed: Tensor
    """``(B, N)`` bool: tokens that may not be picked, which include the given ones."""
    covered: Tensor
    """``(B, N)`` bool: the given tokens and those that were merged into their rows, which are not
    merged again."""
    max_closed: int
    """Largest number of closed tokens of any image."""

    @classmethod
    def none(cls, tokens: VisualTokens) -> Given:
        """No given tokens: a selection starts from nothing."""
        device = tokens.features.device
        indices = torch.empty(tokens.batch, 0, dtype=torch.int64, device=device)
        closed = torch.zeros(
            tokens.batch, tokens.count, dtype=torch.bool, device=device
        )
        return cls(indices, closed, closed, 0)

    @classmethod
    def after(cls, tokens: VisualTokens, indices: Tensor) -> Given:
        """The tokens at ``(B, A)`` as given tokens of a later selection.

        All tokens count as covered: those that were not kept are merged into these already, so
        nothing is merged into the tokens of the later selection.
        """
        closed = mask_from_indices(indices, tokens.count)
        return cls(indices, closed, torch.ones_like(closed), indices.shape[1])

    def next_tile(self, tokens: VisualTokens) -> int:
        """Index of the tile that is next if the given tokens were taken from the tiles in turn."""
        return self.indices.shape[1] % tokens.grid.tiles


@dataclass(frozen=True, slots=True)
class BasePolicy:
    """One human-designed token selector, as :func:`base_policy` declares it."""

    name: str
    call: type[BasePolicyCall]
    """Model of a call of this policy in a state."""
    needs: frozenset[Need]
    """Every input that the policy reads with some parameters."""
    doc: str
    """First line of its documentation."""
    cost: float
    """Milliseconds of a selection, without computing its inputs
    (:mod:`~vllm_autoprune.tpdsl.cost`)."""
    function: Callable[..., ReferenceSelection]
    """(params, tokens, K) -> exactly K rows."""
    continuation: Callable[..., Tensor] | None = None
    """(params, tokens, K, given tokens) -> picks ``(B, K)``, for a greedy method."""
    reads: Callable[..., frozenset[Need]] | None = None
    """params -> the inputs that a call reads, if its parameters decide that."""
    core: type[BasePolicyCall] | None = None
    """Model of a call, in a state's core, of the form that reads no question; None if there is no
    such form."""
    score: Callable[..., Tensor] | None = None
    """(params, tokens) -> score ``(B, N)``, for a video policy, which keeps the largest scores."""

    @property
    def default_params(self) -> PolicyParams:
        """The parameters of a call that gives no parameters."""
        return self.call.model_validate({"name": self.name}).params

    def question_free_params(self, params: PolicyParams) -> PolicyParams:
        """``params`` converted to the form that reads no question."""
        assert self.core is not None
        model = type(self.core.model_validate({"name": self.name}).params)
        fields = type(params).model_fields
        fixed = {
            name
            for name in fields
            if repr(fields[name]) != repr(model.model_fields[name])
        }
        return model.model_validate(params.model_dump(exclude=fixed))

    @property
    def reads_instruction(self) -> bool:
        """Whether a call that gives no parameters reads the question."""
        return not self.needs_of(self.default_params).isdisjoint(INSTRUCTION_NEEDS)

    def needs_of(self, params: PolicyParams) -> frozenset[Need]:
        """Optional inputs that the policy reads with these parameters."""
        return self.needs if self.reads is None else self.reads(params)

    def select(
        self, params: PolicyParams, tokens: VisualTokens, budget: int
    ) -> ReferenceSelection:
        """Reference selection T_P of exactly K rows; needs K <= N."""
        return self.function(params, tokens, budget)

    def select_given(
        self, params: PolicyParams, tokens: VisualTokens, budget: int, start: Given
    ) -> Tensor:
        """Picks ``(B, K)`` among the tokens that are not closed, in pick order.

        Greedy policies continue from the given tokens. For other policies the result is their first
        picks that are not closed, without what they merge into them.
        """
        if self.continuation is not None:
            picks: Tensor = self.continuation(params, tokens, budget, start)
        else:
            # With this many picks, at least ``budget`` are not closed; a policy needs K < N.
            wanted = budget + start.max_closed
            maximum = tokens.count - 1
            selected = self.function(params, tokens, min(wanted, maximum))
            if selected.extra is not None:
                wanted += selected.extra.shape[1]
                selected = self.function(params, tokens, min(wanted, maximum))
            picks = selected.picks
        # The first picks that are not closed, then other tokens, and closed tokens last.
        places = positions_in_order(picks, ~start.closed) + start.closed.to(torch.int64)
        return places.argsort(dim=1, stable=True)[:, :budget]

    def select_picks(
        self, params: PolicyParams, tokens: VisualTokens, budget: int
    ) -> Tensor:
        """K picks ``(B, K)`` of single tokens, without what is merged into them; needs K < N."""
        at_once = replace(self, continuation=None)
        return at_once.select_given(params, tokens, budget, Given.none(tokens))


BASE_POLICIES: dict[str, BasePolicy] = {}

INSTRUCTION_NEEDS: frozenset[Need] = frozenset({"instruction", "words", "language"})
"""Inputs that differ between two questions about one image."""

P = TypeVar("P", bound=PolicyParams)
_Select = Callable[[P, VisualTokens, int], ReferenceSelection]
_Continue = Callable[[P, VisualTokens, int, Given], Tensor]


def base_policy(
    params: type[P],
    *,
    cost: float,
    needs: frozenset[Need] = frozenset(),
    continuation: _Continue[P] | None = None,
    reads: Callable[[P], frozenset[Need]] | None = None,
    core: type[P] | None = None,
    score: Callable[[P, VisualTokens], Tensor] | None = None,
) -> Callable[[_Select[P]], _Select[P]]:
    """Decorator: register a function as the base policy of its name without the underscore.

    The function maps (params, tokens, K) to exactly K rows per image, for K < N. ``continuation``
    returns the picks ``(B, K)`` of a greedy method that continues from given tokens. ``reads``
    returns the inputs that a call reads, if its parameters decide that. ``core`` are the parameters
    of the form that reads no question, for a policy whose ``needs`` include the question.
    """

    def register(function: _Select[P]) -> _Select[P]:
        name = function.__name__.removeprefix("_")
        if name in BASE_POLICIES:
            raise ValueError(f"base policy {name!r} is declared twice")
        doc = (function.__doc__ or "").strip().splitlines()[0]

        def call_of(title: str, private: type[PolicyParams]) -> type[BasePolicyCall]:
            # The JSON Schema names the parameters without the underscore of their class.
            public = private.__name__.removeprefix("_")
            model = create_model(public, __base__=private, __doc__=private.__doc__)
            return create_model(
                title,
                __base__=BasePolicyCall,
                __doc__=doc,
                name=(Literal[name], ...),  # type: ignore[arg-type]  # not static
                params=(model, model()),
            )

        call = call_of(f"{name.capitalize()}BasePolicy", params)
        core_call = None
        if needs.isdisjoint(INSTRUCTION_NEEDS):
            core_call = call
        elif core is not None:
            core_call = call_of(f"{name.capitalize()}CorePolicy", core)
        BASE_POLICIES[name] = BasePolicy(
            name,
            call,
            needs,
            doc,
            cost,
            function,
            continuation,
            reads,
            core_call,
            score,
        )
        return function

    return register


class _OneBasePolicy:
    """Field annotation: a tagged union of the registered base policies, or of their core forms."""

    def __init__(self, *, core: bool = False) -> None:
        self._core = core

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        choices = {
            name: handler.generate_schema(call)
            for name, policy in BASE_POLICIES.items()
            if (call := policy.core if self._core else policy.call) is not None
        }
        return core_schema.tagged_union_schema(choices, discriminator="name")


AnyBasePolicy = Annotated[BasePolicyCall, _OneBasePolicy()]
QuestionFreePolicy = Annotated[BasePolicyCall, _OneBasePolicy(core=True)]
"""A base policy that keeps the same tokens for every question."""


FALLBACKS = ("none", "reference", "uniform", "zeros")
"""Fallback codes by index. 0: the state was applied. 1: the base policy's selection is kept,
because the scores were not finite. 2: evenly spaced tokens are kept, because the inputs of the base
policy were not finite either. 3: a server could not encode the image, and its rows are zeros."""


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """Kept tokens of B images."""

    indices: Tensor
    """``(B, P)``: indices of the kept tokens, ascending."""
    reference: ReferenceSelection
    """The base policy's selection."""
    fallback: Tensor
    """``(B,)`` uint8, see :data:`FALLBACKS`."""
    quality: Tensor | None = None
    """``(B, N)``: token quality g; None if the policy reads no scores."""
    mergeable: Tensor | None = None
    """``(B, N)`` bool: tokens that reassembly may merge into kept ones; None: all other tokens."""


@dataclass(frozen=True, slots=True)
class RefinedTokens:
    """Refined visual tokens T_v* of B images."""

    features: Tensor
    """``(B, K, D)``: rows for the language model, with the E extra rows last."""
    indices: Tensor
    """``(B, P)``: index of the token of each row that is not extra."""
    reference: Tensor
    """``(B, P)``: the base policy's picks, in pick order."""
    exchanged: Tensor
    """``(B,)``: number of reference tokens that were replaced."""
    fallback: Tensor
    """``(B,)`` uint8, see :data:`FALLBACKS`."""
    quality: Tensor | None
    """``(B, N)``: token quality g; None if the policy reads no scores."""

    @classmethod
    def keep_all(cls, tokens: VisualTokens) -> RefinedTokens:
        """Keep all N tokens unchanged."""
        device = tokens.features.device
        indices = torch.arange(tokens.count, device=device).expand(tokens.batch, -1)
        none = torch.zeros(tokens.batch, dtype=torch.int64, device=device)
        return cls(
            tokens.features, indices, indices, none, none.to(torch.uint8), quality=None
        )

    def joined(self, delta: RefinedTokens) -> RefinedTokens:
        """This core and its delta as one result, the core's rows first."""
        return RefinedTokens(
            features=torch.cat([self.features, delta.features], dim=1),
            indices=torch.cat([self.indices, delta.indices], dim=1),
            reference=torch.cat([self.reference, delta.reference], dim=1),
            exchanged=self.exchanged + delta.exchanged,
            fallback=torch.maximum(self.fallback, delta.fallback),
            quality=delta.quality,
        )

    def in_order(self, order: Tensor, count: int) -> RefinedTokens:
        """The kept rows, sorted by the place of their token in ``order`` ``(B, P)``.

        Rows whose token is not in it come last, before the extra ones. ``count`` is N.
        """
        mask = mask_from_indices(self.indices, count)
        position = positions_in_order(order, mask).gather(1, self.indices)
        moved = position.argsort(dim=1, stable=True)
        rows, extra = self.features.split([moved.shape[1], self.extra], dim=1)
        features = torch.cat([gather_rows(rows, moved), extra], dim=1)
        return replace(self, features=features, indices=self.indices.gather(1, moved))

    def places(self, count: int) -> Tensor:
        """Position ``(B, K)`` of each row among ``count`` = N tokens.

        An extra row has the position of tokens that are not kept: a single one is at their median,
        and E extra rows are at the medians of E equal parts of them.
        """
        if self.extra == 0:
            return self.indices
        remaining = count - self.indices.shape[1]
        dropped = indices_from_mask(~mask_from_indices(self.indices, count), remaining)
        turn = torch.arange(self.extra, device=dropped.device)
        return torch.cat(
            [self.indices, dropped[:, (2 * turn + 1) * remaining // (2 * self.extra)]],
            dim=1,
        )

    @property
    def extra(self) -> int:
        """E, the number of rows that correspond to no single token."""
        return self.features.shape[1] - self.reference.shape[1]
