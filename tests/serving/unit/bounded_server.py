"""Rules of a server, and the budgets that a request gets under them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.serving.unit.samples import served
from vllm_autoprune.serving.api.budgets import RequestBudgets, check_fields
from vllm_autoprune.serving.api.placeholders import TokenCount
from vllm_autoprune.serving.api.request import PruningRequest
from vllm_autoprune.serving.plan import ItemPlan
from vllm_autoprune.serving.request_rules import DetailBudgets, RequestRules
from vllm_autoprune.serving.served_state import ServedState

N = 144


def server(
    level: Any = "states", minimum: int = 1, maximum: int = 65536, **fields: Any
) -> ServedState:
    detail = fields.pop("detail", DetailBudgets())
    total = fields.pop("total", None)
    rules = RequestRules(level, minimum, maximum, detail=detail, total=total)
    return replace(served(), rules=rules, **fields)


def resolve(
    entry: object, *sizes: int, on: ServedState | None = None
) -> list[ItemPlan]:
    return resolve_images(
        entry, [TokenCount(size) for size in sizes or (N,)], on or server()
    )


def resolve_images(
    entry: object, images: list[TokenCount], on: ServedState
) -> list[ItemPlan]:
    request = PruningRequest.parse(entry)
    budgets = RequestBudgets(on, request, check_fields(on, request))
    return budgets.plan_images(images, on.rules.total)
