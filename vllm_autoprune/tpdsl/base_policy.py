"""Base policies (pi_P) as states name them: the registry and what one has to offer.

Knows nothing about any single policy: they live in ``vllm_autoprune.base_policies``, above.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema
from torch import Tensor

from vllm_autoprune.errors import SelectionError
from vllm_autoprune.tpdsl.atom import literal
from vllm_autoprune.tpdsl.tokens import Need, VisualTokens


class BasePolicyParams(BaseModel):
    """Parameters of a base policy; most have few, because they are taken as published."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class BasePolicyCall(BaseModel):
    """A base policy as a state writes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    params: BasePolicyParams = BasePolicyParams()


P = TypeVar("P", bound=BasePolicyParams)


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference selection T_P of B images: K = P + E rows, each image the same P and E.

    picks ``(B, P)`` int64 in pick order, unique in each row; merged ``(B, P, D)`` are the picks'
    rows where the policy merges others into them, None where they stay as they are; extra
    ``(B, E, D)`` are rows that stand for no single token (a mean of the rest, say): they come
    last and are never exchanged.
    """

    picks: Tensor
    merged: Tensor | None = None
    extra: Tensor | None = None

    def rows(self, tokens: VisualTokens) -> Tensor:
        """``(B, N, D)``: every token's row, a pick's with what was merged into it."""
        if self.merged is None:
            return tokens.features
        where = self.picks[:, :, None].expand_as(self.merged)
        return tokens.features.scatter(1, where, self.merged.to(tokens.features.dtype))


@dataclass(frozen=True, slots=True)
class Native:
    """What a method's published code returns: its own count and order of rows, image by image.

    indices: ``(n_i,)`` int64 each, -1 for a row that stands for no single token; features:
    ``(n_i, Dv)`` each, at the level where the method works (before the projector for merging
    methods), or None where it only selects.
    """

    indices: tuple[Tensor, ...]
    features: tuple[Tensor, ...] | None = None


Select = Callable[[P, VisualTokens, int], Reference]
"""(params, tokens, K) -> exactly K rows an image; needs K < N."""

RunNative = Callable[[P, VisualTokens, int | None], Native]
"""(params, tokens, K) -> what the published code makes of it, which need not be K rows.

K is None where the method is to find its own count; those that have none refuse it.
"""


@dataclass(frozen=True, slots=True)
class BasePolicy:
    """One human-designed selector behind the common interface."""

    name: str
    call: type[BasePolicyCall]
    needs: frozenset[Need]
    doc: str
    function: Callable[..., Reference]
    published: Callable[..., Native] | None = None

    def select(self, params: BasePolicyParams, tokens: VisualTokens, budget: int) -> Reference:
        """The reference selection T_P, exactly K rows; needs K <= N."""
        return self.function(params, tokens, budget)

    def native(
        self, params: BasePolicyParams, tokens: VisualTokens, budget: int | None = None
    ) -> Native:
        """What the method's published code returns, where that differs from exactly K rows.

        For recordings and research: unlike :meth:`select` it may wait for the device. ``budget``
        None lets a method find its own count; :class:`SelectionError` where it has none.
        """
        if self.published is not None:
            return self.published(params, tokens, budget)
        picks = self.select(params, tokens, counted(self.name, budget)).picks
        return Native(tuple(picks))


def counted(name: str, budget: int | None) -> int:
    """The budget, or an error that says that this method has no count of its own."""
    if budget is None:
        raise SelectionError(f"{name} has no count of its own: give a budget K")
    return budget


BASE_POLICIES: dict[str, BasePolicy] = {}


def base_policy(
    params: type[P],
    *,
    needs: frozenset[Need] = frozenset(),
    native: RunNative[P] | None = None,
) -> Callable[[Select[P]], Select[P]]:
    """Enter the decorated function as the base policy of its own name.

    ``native`` is the method as published, where it returns something else than K picks.
    """

    def enter(function: Select[P]) -> Select[P]:
        name = function.__name__
        if name in BASE_POLICIES:
            raise ValueError(f"base policy {name!r} is declared twice")
        doc = (function.__doc__ or "").strip().splitlines()[0]
        call = create_model(
            f"{name.capitalize()}BasePolicy",
            __base__=BasePolicyCall,
            __doc__=doc,
            name=(literal(name), ...),
            params=(params, params()),
        )
        BASE_POLICIES[name] = BasePolicy(name, call, needs, doc, function, native)
        return function

    return enter


class _AnyBasePolicy:
    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        choices = {
            name: handler.generate_schema(policy.call) for name, policy in BASE_POLICIES.items()
        }
        return core_schema.tagged_union_schema(choices, discriminator="name")


AnyBasePolicy = Annotated[BasePolicyCall, _AnyBasePolicy()]
