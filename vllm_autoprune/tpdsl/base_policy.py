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

Select = Callable[[P, VisualTokens, int], Tensor]
"""(params, tokens, K) -> the reference selection in pick order, ``(B, K)`` int64, unique rows."""


@dataclass(frozen=True, slots=True)
class BasePolicy:
    """One human-designed selector behind the common interface."""

    name: str
    call: type[BasePolicyCall]
    needs: frozenset[Need]
    doc: str
    function: Callable[..., Tensor]

    def select(self, params: BasePolicyParams, tokens: VisualTokens, budget: int) -> Tensor:
        """The reference selection T_P, ``(B, K)`` in pick order; needs K <= N."""
        return self.function(params, tokens, budget)


BASE_POLICIES: dict[str, BasePolicy] = {}


def base_policy(
    params: type[P], *, needs: frozenset[Need] = frozenset()
) -> Callable[[Select[P]], Select[P]]:
    """Enter the decorated function as the base policy of its own name."""

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
        BASE_POLICIES[name] = BasePolicy(name, call, needs, doc, function)
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
