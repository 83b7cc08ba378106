"""Materialize and SafetyCheck of a candidate, and what it does to a probe set.

Knows nothing about proposals or scores.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence

import torch

from offline_search.records import Judged
from offline_search.settings import Settings
from vllm_autoprune.errors import AutopruneError, ProblemsError
from vllm_autoprune.tpdsl.executor.check import safety_check
from vllm_autoprune.tpdsl.executor.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.executor.probes import synthetic_probes
from vllm_autoprune.tpdsl.executor.refine import refine
from vllm_autoprune.tpdsl.states.state import PruningState
from vllm_autoprune.tpdsl.tokens import VisualTokens

Probes = Sequence[VisualTokens]
"""Images as the served model sees them. Where there are none, only equal digests are the same."""

_TIMED, _REPEATS = 2, 5
"""Probes whose selection is timed, and how often."""


def judge(state: PruningState, settings: Settings, probes: Probes) -> Judged:
    """The verdict on a state at every budget of the search; nothing escapes."""
    problems: list[str] = []
    policy = None
    for budget in settings.budgets:
        try:
            policy = materialize(state, budget)
        except AutopruneError as error:
            problems += _told(error)
            continue
        failed = [verdict for verdict in safety_check(policy).verdicts if not verdict.ok]
        problems += [f"{verdict.name} at K = {budget}: {verdict.detail}" for verdict in failed]
    if problems or policy is None:
        return Judged(digest=state.digest, valid=False, problems=tuple(problems))
    first = materialize(state, settings.source_budget)
    return Judged(
        digest=state.digest,
        valid=True,
        quota=first.quota,
        r_min=first.r_min,
        behaviour=behaviour(state, settings.budgets, probes),
        latency=latency(state, settings, probes) if "latency" in settings.objectives else None,
    )


@torch.no_grad()
def behaviour(state: PruningState, budgets: Sequence[int], probes: Probes) -> str:
    """SHA-256 of the rows that enter the language model for every probe; empty without probes.

    Rows, not only indices: two states may keep the same tokens and merge the rest into them
    differently, and that is another behaviour.
    """
    if not probes:
        return ""
    digest = hashlib.sha256()
    for budget in budgets:
        policy = materialize(state, budget)
        for tokens in probes:
            refined = refine(policy.at(tokens.count, tokens.grid.tiles), tokens)
            digest.update(refined.indices.numpy().tobytes())
            digest.update(refined.features.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def latency(state: PruningState, settings: Settings, probes: Probes) -> float:
    """Milliseconds of one selection: the median of some, mean over budgets and probes.

    In two digits: what differs by less is noise, and would be a front of its own. Without probes
    the selections are of made-up images.
    """
    seen = probes or synthetic_probes(settings.source_budget)[:_TIMED]
    medians = []
    for budget in settings.budgets:
        policy = materialize(state, budget)
        for tokens in seen[:_TIMED]:
            at = policy.at(tokens.count, tokens.grid.tiles)
            times = [_seconds(at, tokens) for _ in range(_REPEATS)]
            medians.append(1000 * statistics.median(times) / len(tokens.features))
    return float(f"{statistics.mean(medians):.2g}")


def _seconds(policy: PruningPolicy, tokens: VisualTokens) -> float:
    began = time.perf_counter()
    refine(policy, tokens)
    return time.perf_counter() - began


def _told(error: AutopruneError) -> list[str]:
    if isinstance(error, ProblemsError):
        return [str(problem) for problem in error.problems]
    return [str(error)]
