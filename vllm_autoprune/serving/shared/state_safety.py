"""Safety check of a state before it is served (Algorithm 1, line 4)."""

from __future__ import annotations

import logging

from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.executor.check import safety_check
from vllm_autoprune.tpdsl.executor.materialize import materialize
from vllm_autoprune.tpdsl.states.state import PruningState

logger = logging.getLogger("vllm.autoprune")

CHECKED_BUDGET = 256
"""Nobody must wait for a very large K: promises are kept or broken at a smaller one."""

CHECKED_REQUEST_BUDGET = 64
"""The same for states of requests: they are checked in the API server, between its requests."""


def replace_unsafe_state(state: PruningState, budget: int) -> PruningState:
    """The state to serve at a budget; raises :class:`StateError` where there is none.

    A state that fails its safety check is served as its base policy where it lists
    ``fallback_to_selection``; the log says so.
    """
    least = state.constraints.selector.insists_on or 0
    policy = materialize(state, max(min(budget, CHECKED_BUDGET), least))
    record = safety_check(policy)
    if record.valid:
        return state
    told = "; ".join(f"{v.name}: {v.detail}" for v in record.failures())
    if not policy.falls_back:
        fix = 'fix the state, or list "fallback_to_selection" under safety'
        problem = Problem("/safety", f"the safety check fails ({told})", fix, "safety")
        raise StateError(f"state {state.name!r}", [problem])
    logger.warning(
        "State %r fails its safety check (%s): serving its base policy.", state.name, told
    )
    return state.without_exchange()
