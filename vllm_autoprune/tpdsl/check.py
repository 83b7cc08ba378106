"""SafetyCheck: runs a policy on synthetic images and records whether it keeps its promises.

Knows nothing about the model to be served, beyond the token counts it is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vllm_autoprune.tpdsl.materialize import PruningPolicy, materialize
from vllm_autoprune.tpdsl.probes import synthetic_probes
from vllm_autoprune.tpdsl.refine import refine
from vllm_autoprune.tpdsl.safety import (
    CHECKS,
    VERDICTS,
    DeterminismCall,
    Expectation,
    SafetyRecord,
    Verdict,
)
from vllm_autoprune.tpdsl.tokens import VisualTokens

LARGEST_PROBED = 640
"""K above which a policy is looked at as it is at this K, so that no legal state makes one wait.

A probe has more than K tokens and N x N cosines: at K = 65536 they alone would take 34 GB. No
state's r_min or q_e is above 640, so what a policy promises is all there at this K.
"""


def safety_check(
    policy: PruningPolicy, probes: Sequence[VisualTokens] | None = None
) -> SafetyRecord:
    """d_alpha^(K) = SafetyCheck(pi, K): the five verdicts over all probes (equation 7).

    A policy that raises fails every verdict, with the reason as detail; nothing escapes. Without
    probes of the caller's, a K above :data:`LARGEST_PROBED` is checked at that K; the record says
    so.
    """
    asked = policy.budget
    if not probes and asked > LARGEST_PROBED:
        policy = materialize(policy.state, LARGEST_PROBED)
    seen: dict[str, Verdict] = {}
    for tokens in probes or synthetic_probes(policy.budget):
        for verdict in _look(policy, tokens):
            if verdict.name not in seen or not verdict.ok:
                seen[verdict.name] = verdict
    if policy.budget < asked:
        count = seen["exact_count"]
        detail = f"{count.detail}, looked at in place of K = {asked}"
        seen["exact_count"] = dataclasses.replace(count, detail=detail)
    return SafetyRecord(tuple(seen[name] for name in VERDICTS))


def _look(policy: PruningPolicy, tokens: VisualTokens) -> tuple[Verdict, ...]:
    calls = {call.atom: call for call in policy.state.safety}
    repeat = calls.get("deterministic")
    repeats = repeat.repeats if isinstance(repeat, DeterminismCall) else 2
    try:
        here = policy.at(tokens.count, tokens.grid.tiles)
        budget = min(here.budget, tokens.count)
        want = Expectation(budget, min(here.r_min, budget), here.quota)
        runs = [refine(policy, tokens) for _ in range(repeats)]
        found: list[Verdict] = []
        for check in CHECKS:
            found += check(calls.get(check.__name__), tokens, runs, want)
        return tuple(found)
    except Exception as error:  # a policy may fail in any way: that is what is being found out
        return tuple(Verdict(name, False, f"{type(error).__name__}: {error}") for name in VERDICTS)
