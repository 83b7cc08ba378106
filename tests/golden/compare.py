"""Comparison of picks and rows with recorded ones; a problem is one line of text.

Where the published loop gives NaN or duplicates, picks are compared as far as they count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum

import torch
from torch import Tensor

from tests.golden.case import Case
from vllm_autoprune.tpdsl.tokens import VisualTokens


def same_until_rank(case: Case, tokens: VisualTokens, picks: Tensor) -> Iterator[str]:
    """Compare CDPruner's picks ``(T, K)`` up to the numerical rank of the kernel.

    No pick is compared if the note names no residual, or if relevance is constant: the published
    code then divides zero by zero before its first pick.
    """
    bound = residual_bound(case)
    if bound is None:
        return
    quality = published_relevance(tokens)
    if not bool(quality.isfinite().all()):
        return
    features = tokens.by_tile(tokens.features).double()
    wanted = case.recorded("order")
    for tile, order in enumerate(picks):
        own = quality.reshape(len(picks), -1)[tile]
        sound = sum(bool(left > bound) for left in residuals(features[tile], own, order.tolist()))
        if order[:sound].tolist() != wanted[tile, :sound].tolist():
            yield f"the first {sound} picks of tile {tile}, which still count, are others"


def same_until_duplicates(case: Case, features: Tensor, picks: Tensor) -> Iterator[str]:
    """Compare DivPrune's first picks; duplicates of a token count as equal."""
    count = first_picks(case)
    if count is None:
        return
    alike = (features[:, None, :] == features[None, :, :]).all(dim=2)
    kind = alike.to(torch.uint8).argmax(dim=1)  # the first token that equals it
    wanted = case.recorded("order").flatten()
    if kind[picks[:count]].tolist() != kind[wanted[:count]].tolist():
        yield f"the first {count} picks are others, even up to duplicates"


def published_relevance(tokens: VisualTokens) -> Tensor:
    """``(N,)`` float64 relevance of the first image; not finite where all tokens are alike."""
    given = tokens.require_instruction()
    patches, text = given.patches[0].double(), given.text[0].double()
    patches = patches / patches.norm(dim=-1, keepdim=True)
    raw = given.sign * (patches @ (text / text.norm(dim=-1, keepdim=True)).T).mean(dim=1)
    spread = raw.max() - raw.min()
    return (raw - raw.min() + 1e-6) / torch.where(spread < 1e-12, torch.nan, spread)


def residuals(features: Tensor, quality: Tensor, picks: list[int]) -> Iterator[float]:
    """Gain of each pick in order: squared residual of q_j u_j outside the span of earlier picks."""
    left = features / features.norm(dim=1, keepdim=True) * quality[:, None]
    lowest = float("inf")
    for pick in picks:
        lowest = min(lowest, float(left[pick].square().sum()))
        yield lowest
        direction = left[pick] / left[pick].norm()
        left = left - (left @ direction)[:, None] * direction


class Demand(Enum):
    """Part of the output that must equal the published one."""

    ORDER = "order"
    SET = "set"
    SOUND = "sound"
    """Nothing: the right number of unique indices in range, and finite rows."""


def demand(case: Case) -> Demand:
    """Order if it is stable, else the set if that is; less for degenerate cases."""
    if not case.note and case.recipe.get("stable_order", True):
        return Demand.ORDER
    return Demand.SET if case.recipe.get("stable_set", False) else Demand.SOUND


def residual_bound(case: Case) -> float | None:
    """The X of "before the first index whose float64 residual <= X", where the note says so."""
    actual = re.search(r"residual\s*<=\s*([0-9.eE+-]*[0-9])", case.note)
    return None if actual is None else float(actual[1])


def first_picks(case: Case) -> int | None:
    """The n of "the first n picks up to duplicate classes", where the note says so."""
    actual = re.search(r"first (\d+) picks", case.note)
    return None if actual is None else int(actual[1])


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
