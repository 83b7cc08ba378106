"""Cost of a state: an upper estimate of the CPU time of one selection, atom by atom.

The cost bounds the states that requests bring, so it must be the same on every server and cost
nothing itself. Atoms and base policies declare their milliseconds at their most expensive
parameters, for an image of 576 tokens of width 4096 (1024 in the tower) of which 192 are kept. The
milliseconds were counted in torch calls (a microsecond each), numbers read or written (0.4 ns) and
multiply-adds (0.0175 ns). These are rates of one core, fitted to measurements of 57 states
(``docs/data/state-cost.csv``). Counting when a state arrives, on the meta device, would take ten
times as long as the selection.

The computation of a state's inputs is not included: it is at most one pass over the unpruned image,
which a request without pruning costs as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from vllm_autoprune.errors import StateError
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall
from vllm_autoprune.tpdsl.state import PruningState

FLAG = "--autoprune-request-cost"

DEFAULT_COST = 200.0
"""Milliseconds that a state of a request may cost; the shipped states cost 2 to 85."""

_COSINES = 18.5
_ROWS = 1.0
_MERGING = 12.8
_COVER = 8.7
"""Milliseconds of the cosines between all tokens, of copying the kept rows, of a reassembly that
merges, and of marking the tokens that a core covers."""


def _atom_costs(state: PruningState) -> Iterator[tuple[str, float]]:
    """Each atom of a state with its milliseconds on one core; repeated atoms are repeated.

    K is that of the declared costs, whatever the state's budget, because requests may ask for
    another K.
    """
    core = state.core
    base = state.base_policy.name
    cosines = False
    if core is not None:
        yield core.policy.name, BASE_POLICIES[core.policy.name].cost
        if core.cover > 0:
            cosines = True
            yield "cover of the core", _COVER
    if core is None or core.share < 1:
        yield base, BASE_POLICIES[base].cost
        calls = _scoring_calls(state)
        for call in calls:
            yield call.atom, _call_cost(call, base)
        yield state.reassembly.atom, _ROWS if state.reassembly.idle else _MERGING
        cosines |= bool(calls) or base == "cdpruner" or not state.reassembly.idle
    if cosines:
        yield "cosines between all tokens", _COSINES


def _scoring_calls(state: PruningState) -> list[AtomCall]:
    """The atoms that run only if a state exchanges tokens or orders rows by quality."""
    exchanges = state.constraints.selector.bounds(MAX_BUDGET)[0] > 0
    if not exchanges and not state.orders_by_quality:
        return []
    scoring = state.scoring
    calls: list[AtomCall] = [signal for signal in scoring.signals if signal.weight > 0]
    calls += [prior for prior in state.source.priors if not prior.idle]
    if exchanges:
        calls += state.constraints.pool
        calls.append(state.constraints.selector)
        if state.constraints.selector.reads_kernel:
            calls.append(scoring.kernel)
    return calls


def _call_cost(call: Any, base: str) -> float:
    """Milliseconds of an atom and of the atoms and base policies that it runs."""
    milliseconds = ATOMS[call.atom].cost
    if call.atom == "external_policy":
        milliseconds += BASE_POLICIES[call.policy].cost
    elif call.atom == "native_teacher_mask_prior":
        milliseconds += BASE_POLICIES[base].cost
    elif call.atom == "multi_source_pool_builder":
        milliseconds += sum(ATOMS[source.atom].cost for source in call.sources)
    return milliseconds


def state_cost(state: PruningState) -> float:
    """Milliseconds of one selection by a state: the sum over its atoms."""
    return sum(milliseconds for _, milliseconds in _atom_costs(state))


_TOKENS = 576
"""Tokens of the image for which costs are declared."""


def item_cost(state: PruningState, tokens: int, frames: int = 0) -> float:
    """Milliseconds of one selection from an image of N tokens, or from a video of T frames.

    A base policy without a score has to put nearly all tokens of each frame in an order, for which
    greedy policies take the cube of their number. 4.5 is the largest factor that was measured
    (scope, one frame of 4,096 tokens, 42 s); most are far below. A state that exchanges tokens of a
    video compares all pairs of its tokens.
    """
    size = tokens / _TOKENS
    factor = max(1.0, size)
    if frames > 0:
        if BASE_POLICIES[state.base_policy.name].score is None:
            factor += 4.5 * frames * (size / frames) ** 3
        if state.constraints.selector.bounds(MAX_BUDGET)[0] > 0:
            factor += size**2 / 10
    return factor * state_cost(state)


def item_bound(bound: float, tokens: int) -> float:
    """Milliseconds that a selection from N tokens may take; ``bound`` is that of 576 tokens."""
    return bound * max(1.0, tokens / _TOKENS)


@lru_cache(maxsize=256)
def require_affordable(state: PruningState, bound: float) -> None:
    """Raise :class:`StateError` if a selection by the state costs more than ``bound``."""
    costs: dict[str, list[float]] = {}
    for atom, milliseconds in _atom_costs(state):
        costs.setdefault(atom, []).append(milliseconds)
    total = sum(map(sum, costs.values()))
    if total <= bound:
        return
    dearest = sorted(costs.items(), key=lambda item: -sum(item[1]))[:3]
    named = ", ".join(
        f"{len(calls)} x {atom} ({sum(calls):.0f} ms)" for atom, calls in dearest
    )
    what = (
        f"one selection is predicted to take {total:.0f} ms of one CPU core, and a request's state "
        f"may take {bound:.0f}; the dearest atoms: {named}"
    )
    fix = f"use fewer or cheaper atoms, or serve with a higher {FLAG}"
    raise StateError.of("", what, fix, kind="cost", subject="state")
