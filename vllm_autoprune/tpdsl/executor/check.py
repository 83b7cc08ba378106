"""SafetyCheck: run a policy on synthetic images and record whether its guarantees hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vllm_autoprune.tpdsl.atoms.safety import (
    CHECKS,
    VERDICTS,
    DeterminismCall,
    Expectation,
    SafetyRecord,
    Verdict,
)
from vllm_autoprune.tpdsl.executor.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.executor.probes import synthetic_probes
from vllm_autoprune.tpdsl.executor.refine import refine
from vllm_autoprune.tpdsl.tokens import VisualTokens

MAX_PROBED_BUDGET = 640
"""Largest K that is checked; a policy with a larger K is checked at this one instead.

A probe has N > K tokens and N x N cosines, which at K = 65536 would take 34 GB. Since r_min and q_e
are at most 640, every guarantee of a policy already applies at this K.
"""


def safety_check(
    policy: PruningPolicy, probes: Sequence[VisualTokens] | None = None
) -> SafetyRecord:
    """d_alpha^(K) = SafetyCheck(pi, K): the five verdicts over all probes (equation 7).

    Never raises: a policy that raises fails every verdict, with the exception as detail. Without
    ``probes``, a K above :data:`MAX_PROBED_BUDGET` is checked at that K, which the record mentions.
    """
    full_budget = policy.budget
    if not probes and full_budget > MAX_PROBED_BUDGET:
        policy = materialize(policy.state, MAX_PROBED_BUDGET)
    verdicts: dict[str, Verdict] = {}
    for tokens in probes or synthetic_probes(policy.budget):
        for verdict in _check_probe(policy, tokens):
            if verdict.name not in verdicts or not verdict.ok:
                verdicts[verdict.name] = verdict
    if policy.budget < full_budget:
        count = verdicts["exact_count"]
        detail = f"{count.detail}, checked in place of K = {full_budget}"
        verdicts["exact_count"] = dataclasses.replace(count, detail=detail)
    return SafetyRecord(tuple(verdicts[name] for name in VERDICTS))


def _check_probe(policy: PruningPolicy, tokens: VisualTokens) -> tuple[Verdict, ...]:
    calls = {call.atom: call for call in policy.state.safety}
    repeat = calls.get("deterministic")
    repeats = repeat.repeats if isinstance(repeat, DeterminismCall) else 2
    try:
        sized = policy.at(tokens.count, tokens.grid.tiles)
        budget = min(sized.budget, tokens.count)
        expected = Expectation(budget, min(sized.r_min, budget), sized.quota)
        runs = [refine(policy, tokens) for _ in range(repeats)]
        verdicts: list[Verdict] = []
        for check in CHECKS:
            verdicts += check(calls.get(check.__name__), tokens, runs, expected)
        return tuple(verdicts)
    except Exception as error:  # any failure of the policy is a result of this check
        return tuple(Verdict(name, False, f"{type(error).__name__}: {error}") for name in VERDICTS)
