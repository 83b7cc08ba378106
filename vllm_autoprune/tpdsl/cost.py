"""Cost of a state: an upper estimate of the CPU time of one selection, atom by atom.

It bounds the states that requests bring, so it must be the same on every server and cost nothing
itself: a table has the milliseconds of each atom at its dearest parameters, for an image of 576
tokens of width 4096 (1024 in the tower) of which 192 are kept. They were counted in torch calls (a
microsecond each), numbers read or written (0.4 ns) and multiply-adds (0.0175 ns), rates of one core
that were fitted to measurements of 57 states (``docs/data/state-cost.csv``). Counting when a state
arrives, on the meta device, would take ten times as long as the selection.

The computation of a state's inputs is not included: it is at most one pass over the unpruned image,
which a request without pruning costs as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET
from vllm_autoprune.tpdsl.state import PruningState

FLAG = "--autoprune-request-cost"

DEFAULT_COST = 200.0
"""Milliseconds that a state of a request may cost; those that ship cost 2 to 85."""

POLICY_COSTS = {
    "cdpruner": 8.5,
    "cen_cdpruner": 33.6,
    "cen_divprune": 34.9,
    "dart": 3.4,
    "divprune": 28.8,
    "fastv": 0.6,
    "fsr": 41.3,
    "holov": 8.8,
    "idpruner": 29.5,
    "mmtok": 26.6,
    "prumerge_plus": 13.9,
    "prunesid": 83.6,
    "pyramiddrop": 0.6,
    "scope": 25.3,
    "sparsevlm": 0.6,
    "trim": 8.1,
    "visionzip": 8.9,
}
"""Milliseconds of each base policy, given its inputs."""

ATOM_COSTS = {
    "instruction_guided_visual_relevance": 3.8,
    "attention_proxy_saliency": 0.1,
    "spatial_centrality_prior": 0.1,
    "redundancy_density_penalty": 1.3,
    "local_contrast_saliency": 1.1,
    "visual_token_norm_saliency": 2.9,
    "cluster_centroid_representativeness": 3.6,
    "global_mean_representativeness": 0.2,
    "channel_entropy_informativeness": 13.3,
    "reference_selection_confidence": 0.1,
    "local_detail_energy": 13.6,
    "mean_dissimilarity_saliency": 9.5,
    "reference_mask_prior": 0.1,
    "external_policy": 0.1,  # and its policy
    "native_teacher_mask_prior": 0.1,  # and the base policy
    "quality_pool_builder": 0.1,
    "spatial_coverage_pool_builder": 0.2,
    "diversity_pool_builder": 2.7,
    "multi_source_pool_builder": 0.1,  # and its sources
    "reference_residual_exchange_selector": 5.8,
    "reference_margin_gated_exchange_selector": 0.1,
    "reference_strict_preservation_selector": 0.1,
    "quality_topk_selector": 0.1,
    "reference_strict_margin_exchange_selector": 9.6,
    "maximal_marginal_relevance_pool_selector": 9.6,
    "anchor_controlled_pool_dpp_selector": 7.6,
    "runtime_reference_anchor_pool_dpp_selector": 7.6,
    "constrained_pool_dpp_selector": 28.3,  # with the partition of dearest parameters
    "pairwise_cosine_kernel": 0.0,  # the cosines that are known
    "runtime_conditional_similarity_kernel": 0.0,
    "centred_cosine_kernel": 25.1,
}
"""Milliseconds of each atom that a selection runs, at its dearest parameters."""

_COSINES, _ROWS, _MERGING, _COVER = 18.5, 1.0, 12.8, 8.7
"""Milliseconds of the cosines between all tokens, of copying the kept rows, of a reassembly that
merges, and of what a core covers."""


def _atom_costs(state: PruningState) -> Iterator[tuple[str, float]]:
    """Each atom of a state with its milliseconds of one core; one that is listed twice comes twice.

    K is the budget of the table, whatever the state's own: requests may ask for another.
    """
    core, scoring = state.core, state.scoring
    base, exchanges = state.base_policy.name, state.constraints.selector.bounds(MAX_BUDGET)[0] > 0
    cosines = False
    if core is not None:
        yield core.policy.name, POLICY_COSTS[core.policy.name]
        if core.cover > 0:
            cosines = True
            yield "cover of the core", _COVER
    if core is None or core.share < 1:
        yield base, POLICY_COSTS[base]
        calls: list[Any] = []
        scores = exchanges or state.orders_by_quality
        cosines |= scores or base == "cdpruner" or not state.reassembly.idle
        if scores:
            calls += [signal for signal in scoring.signals if signal.weight > 0]
            calls += [prior for prior in state.source.priors if not prior.idle]
        if exchanges:
            calls += [*state.constraints.pool, state.constraints.selector, scoring.kernel]
        for call in calls:
            milliseconds = ATOM_COSTS[call.atom]
            if call.atom == "external_policy":
                milliseconds += POLICY_COSTS[call.policy]
            elif call.atom == "native_teacher_mask_prior":
                milliseconds += POLICY_COSTS[base]
            elif call.atom == "multi_source_pool_builder":
                milliseconds += sum(ATOM_COSTS[source.atom] for source in call.sources)
            yield call.atom, milliseconds
        yield state.reassembly.atom, _ROWS if state.reassembly.idle else _MERGING
    if cosines:
        yield "cosines between all tokens", _COSINES


def state_cost(state: PruningState) -> float:
    """Milliseconds of one selection by a state: the sum over its atoms."""
    return sum(milliseconds for _, milliseconds in _atom_costs(state))


@lru_cache(maxsize=256)
def require_affordable(state: PruningState, bound: float) -> None:
    """Raise :class:`StateError` for a state whose selection is predicted to cost more."""
    costs: dict[str, list[float]] = {}
    for atom, milliseconds in _atom_costs(state):
        costs.setdefault(atom, []).append(milliseconds)
    total = sum(map(sum, costs.values()))
    if total <= bound:
        return
    dearest = sorted(costs.items(), key=lambda item: -sum(item[1]))[:3]
    named = ", ".join(f"{len(each)} x {atom} ({sum(each):.0f} ms)" for atom, each in dearest)
    what = (
        f"one selection is predicted to take {total:.0f} ms of one CPU core, and a request's state "
        f"may take {bound:.0f}; the dearest atoms: {named}"
    )
    fix = f"use fewer or cheaper atoms, or serve with a higher {FLAG}"
    raise StateError("state", [Problem("", what, fix, "cost")])
