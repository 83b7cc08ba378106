"""Safety check of a state before it is served (Algorithm 1, line 4)."""

from __future__ import annotations

import itertools
import logging

from vllm_autoprune.errors import StateError
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.safety import MAX_PROBED_BUDGET, safety_check
from vllm_autoprune.tpdsl.state import PruningState

_logger = logging.getLogger("vllm.autoprune")

_MAX_WARNINGS = 16
"""Maximum number of warnings of a process, because clients could fill its log with unsafe states.
"""

_warnings = itertools.count(1)


def replace_unsafe_state(state: PruningState, budget: int) -> PruningState:
    """The state to serve at a budget: ``state``, or its base policy if the safety check fails.

    A failing state that lists ``fallback_to_selection`` is replaced, with a warning in the log; for
    any other, :class:`StateError` is raised.
    """
    probed = state
    selector = state.constraints.selector
    if (selector.explicit_r_min or 0) > budget:
        # A request's state is checked at a smaller K, because the check takes seconds at hundreds
        # of tokens. If its r_min exceeds that K, r_min follows from q_e there, as for a state
        # without r_min.
        selector = selector.model_copy(update={"r_min": None})
        constraints = state.constraints.model_copy(update={"selector": selector})
        probed = state.model_copy(update={"constraints": constraints})
    policy = materialize(probed, min(budget, MAX_PROBED_BUDGET))
    record = safety_check(policy)
    if record.valid:
        return state
    failures = "; ".join(f"{v.name}: {v.detail}" for v in record.failures())
    if not policy.falls_back:
        fix = 'fix the state, or list "fallback_to_selection" under safety'
        what = f"the safety check fails ({failures})"
        subject = f"state {state.name!r}"
        raise StateError.of("/safety", what, fix, kind="safety", subject=subject)
    number = next(_warnings)
    if number <= _MAX_WARNINGS:
        message = "State %r fails its safety check (%s): serving its base policy."
        if number == _MAX_WARNINGS:
            message += " Further states that fail are not logged."
        _logger.warning(message, state.name, failures)
    return state.without_exchange()
