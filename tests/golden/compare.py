"""Comparison of picks and rows with recorded ones; a problem is one line of text."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.golden.case import Case
from tests.golden.degenerate import Demand, demand

Problems = Iterator[str]


def compare_picks(case: Case, picks: Tensor, wanted: Tensor, count: int) -> Problems:
    """Picks ``(B, K)`` with those of the published code, as far as the case allows."""
    for row in picks:
        yield from find_unsound(row, count, case.recipe["N"])
    requested = demand(case)
    if requested is Demand.ORDER:
        yield from find_differences("order", picks, wanted)
    elif requested is Demand.SET:
        yield from find_differences("set", picks.sort(dim=1).values, wanted.sort(dim=1).values)


def find_unsound(picks: Tensor, count: int, tokens: int) -> Problems:
    if picks.numel() != count:
        yield f"{picks.numel()} indices instead of {count}"
    if picks.unique().numel() != picks.numel():
        yield "an index repeats"
    if picks.numel() and not 0 <= int(picks.min()) <= int(picks.max()) < tokens:
        yield f"an index lies outside of 0 to {tokens - 1}"


def find_differences(what: str, actual: Tensor, expected: Tensor) -> Problems:
    if actual.shape != expected.shape:
        yield f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    elif not torch.equal(actual, expected):
        wrong = int((actual != expected).sum())
        place = int((actual != expected).flatten().nonzero()[0])
        yield (
            f"{what}: {wrong} of {actual.numel()} differ, the first at {place}: "
            f"{int(actual.flatten()[place])} instead of {int(expected.flatten()[place])}"
        )


def find_distances(actual: Tensor, expected: Tensor, tolerance: float) -> Problems:
    if actual.shape != expected.shape:
        yield f"rows: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    elif not torch.allclose(actual.float(), expected.float(), rtol=tolerance, atol=tolerance):
        apart = float((actual.float() - expected.float()).abs().max())
        yield f"rows: {apart:.2g} apart, allowed {tolerance}"
