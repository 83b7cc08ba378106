"""Safety checks: atoms that a state lists, and the record of their verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from vllm_autoprune.ops.rowwise import mask_from_indices
from vllm_autoprune.tpdsl.base_policy import RefinedTokens
from vllm_autoprune.tpdsl.registry import AtomCall, OneOf, atom
from vllm_autoprune.tpdsl.tokens import VisualTokens

SafetyCall = Annotated[AtomCall, OneOf("safety_checks", bare=True)]

VERDICTS = ("exact_count", "valid_indices", "finite_scores", "shapes", "determinism")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One of the five verdicts, with the observed values."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class SafetyRecord:
    """d_alpha: the result of SafetyCheck (section "Materialize" of the paper)."""

    verdicts: tuple[Verdict, ...]

    @property
    def valid(self) -> bool:
        """Whether every verdict is positive."""
        return all(verdict.ok for verdict in self.verdicts)

    def failures(self) -> tuple[Verdict, ...]:
        """The negative verdicts."""
        return tuple(verdict for verdict in self.verdicts if not verdict.ok)


@dataclass(frozen=True, slots=True)
class Expectation:
    """Guarantees of a policy at one budget."""

    budget: int
    r_min: int
    quota: int


class DeterminismCall(AtomCall):
    """Parameters of deterministic."""

    repeats: int = Field(2, ge=2, le=5, description="number of runs that are compared")


@atom("safety_checks")
def _preserve_budget(
    call: AtomCall, tokens: VisualTokens, runs: Sequence[RefinedTokens], expected: Expectation
) -> tuple[Verdict, ...]:
    """Always checked, listed or not: K unique indices, r_min reference tokens, q_e exchanges."""
    run = runs[0]
    images, picked = run.indices.shape
    counted = (images, picked + run.extra) == (tokens.batch, expected.budget) and picked > 0
    detail = f"{images} images of {picked} tokens and {run.extra} extra rows, K = {expected.budget}"
    count = Verdict("exact_count", counted, detail)
    if not counted:
        return (count, Verdict("valid_indices", False, "not checked: the count is wrong"))
    inside = bool(((run.indices >= 0) & (run.indices < tokens.count)).all())
    unique = bool((run.indices.sort(dim=1).values.diff(dim=1) > 0).all())
    distinct = bool((run.reference.sort(dim=1).values.diff(dim=1) > 0).all())
    detail = f"in range: {inside}, unique: {unique}, reference unique: {distinct}"
    ok = inside and unique and distinct
    if ok:
        member = mask_from_indices(run.indices, tokens.count)
        kept = int(member.gather(1, run.reference).sum(dim=1).min()) + run.extra
        detail += f", reference tokens kept: {kept} of at least {expected.r_min}"
        ok = kept >= expected.r_min and expected.budget - kept <= expected.quota
    return (count, Verdict("valid_indices", ok, detail))


@atom("safety_checks")
def _no_shape_change(
    call: AtomCall, tokens: VisualTokens, runs: Sequence[RefinedTokens], expected: Expectation
) -> tuple[Verdict, ...]:
    """Always checked, listed or not: finite scores, K x D finite rows of the input's dtype."""
    run = runs[0]
    shape = (tokens.batch, expected.budget, tokens.features.shape[2])
    same = (
        tuple(run.features.shape) == shape
        and run.features.dtype == tokens.features.dtype
        and run.features.device == tokens.features.device
    )
    rows = bool(run.features.isfinite().all())
    fallbacks = int((run.fallback != 0).sum())
    return (
        Verdict(
            "finite_scores", rows and not fallbacks, f"finite rows: {rows}, fell back: {fallbacks}"
        ),
        Verdict("shapes", same, f"features {tuple(run.features.shape)}, expected {shape}"),
    )


@atom("safety_checks", DeterminismCall)
def _deterministic(
    call: DeterminismCall,
    tokens: VisualTokens,
    runs: Sequence[RefinedTokens],
    expected: Expectation,
) -> tuple[Verdict, ...]:
    """Always checked, listed or not: runs give the same bits; listing it sets their number."""
    same = all(
        torch.equal(runs[0].indices, run.indices) and torch.equal(runs[0].features, run.features)
        for run in runs[1:]
    )
    return (Verdict("determinism", same, f"{len(runs)} runs, all equal: {same}"),)


@atom("safety_checks")
def _fallback_to_selection(
    call: AtomCall, tokens: VisualTokens, runs: Sequence[RefinedTokens], expected: Expectation
) -> tuple[Verdict, ...]:
    """If the state fails its safety check, serve the base policy's selection instead."""
    return ()


CHECKS: tuple[Callable[..., tuple[Verdict, ...]], ...] = (
    _preserve_budget,
    _no_shape_change,
    _deterministic,
)
