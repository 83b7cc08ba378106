"""Safety checks: the atoms a state lists, and the record that says valid or why not.

Knows nothing about how a policy selects: it looks only at what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from vllm_autoprune.tpdsl.atom import AtomCall, OneOf, atom
from vllm_autoprune.tpdsl.numerics import mask_of
from vllm_autoprune.tpdsl.outcome import Refined
from vllm_autoprune.tpdsl.tokens import VisualTokens

SafetyCall = Annotated[AtomCall, OneOf("safety_checks", bare=True)]

VERDICTS = ("exact_count", "valid_indices", "finite_scores", "shapes", "determinism")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One of the five verdicts, with what was seen."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class SafetyRecord:
    """d_alpha: the outcome of SafetyCheck (section "Materialize" of the paper)."""

    verdicts: tuple[Verdict, ...]

    @property
    def valid(self) -> bool:
        """True when every verdict holds."""
        return all(verdict.ok for verdict in self.verdicts)

    def failures(self) -> tuple[Verdict, ...]:
        """The verdicts that do not hold."""
        return tuple(verdict for verdict in self.verdicts if not verdict.ok)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a policy promises at one budget."""

    budget: int
    r_min: int
    quota: int


class DeterminismCall(AtomCall):
    """Parameters of deterministic."""

    repeats: int = Field(2, ge=2, le=5, description="executions that are compared")


@atom("safety_checks")
def preserve_budget(
    call: AtomCall, tokens: VisualTokens, runs: Sequence[Refined], want: Expectation
) -> tuple[Verdict, ...]:
    """Exactly K unique in-range indices, at least r_min of the reference, at most q_e swaps."""
    run = runs[0]
    images, picked = run.indices.shape
    counted = (images, picked + run.extra) == (tokens.batch, want.budget) and picked > 0
    told = f"{images} images of {picked} tokens and {run.extra} further rows, K = {want.budget}"
    count = Verdict("exact_count", counted, told)
    if not counted:
        return (count, Verdict("valid_indices", False, "not looked at: the count is wrong"))
    inside = bool(((run.indices >= 0) & (run.indices < tokens.count)).all())
    unique = bool((run.indices.sort(dim=1).values.diff(dim=1) > 0).all())
    distinct = bool((run.reference.sort(dim=1).values.diff(dim=1) > 0).all())
    detail = f"in range: {inside}, unique: {unique}, reference unique: {distinct}"
    ok = inside and unique and distinct
    if ok:
        member = mask_of(run.indices, tokens.count)
        kept = int(member.gather(1, run.reference).sum(dim=1).min()) + run.extra
        detail += f", reference tokens kept: {kept} of at least {want.r_min}"
        ok = kept >= want.r_min and want.budget - kept <= want.quota
    return (count, Verdict("valid_indices", ok, detail))


@atom("safety_checks")
def no_shape_change(
    call: AtomCall, tokens: VisualTokens, runs: Sequence[Refined], want: Expectation
) -> tuple[Verdict, ...]:
    """K x D rows of the input's dtype and device, finite, from finite scores."""
    run = runs[0]
    expected = (tokens.batch, want.budget, tokens.features.shape[2])
    same = (
        tuple(run.features.shape) == expected
        and run.features.dtype == tokens.features.dtype
        and run.features.device == tokens.features.device
    )
    rows = bool(run.features.isfinite().all())
    fell = int((run.fallback != 0).sum())
    return (
        Verdict("finite_scores", rows and fell == 0, f"finite rows: {rows}, fell back: {fell}"),
        Verdict("shapes", same, f"features {tuple(run.features.shape)}, expected {expected}"),
    )


@atom("safety_checks", DeterminismCall)
def deterministic(
    call: DeterminismCall, tokens: VisualTokens, runs: Sequence[Refined], want: Expectation
) -> tuple[Verdict, ...]:
    """Repeated runs on the same input give the same indices and the same bits."""
    first = runs[0]
    same = all(
        torch.equal(first.indices, run.indices) and torch.equal(first.features, run.features)
        for run in runs[1:]
    )
    return (Verdict("determinism", same, f"{len(runs)} runs, all equal: {same}"),)


@atom("safety_checks")
def fallback_to_selection(
    call: AtomCall, tokens: VisualTokens, runs: Sequence[Refined], want: Expectation
) -> tuple[Verdict, ...]:
    """An invalid policy serves the base policy's selection instead of being refused."""
    return ()


CHECKS: tuple[Callable[..., tuple[Verdict, ...]], ...] = (
    preserve_budget,
    no_shape_change,
    deterministic,
)
