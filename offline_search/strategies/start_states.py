"""Start states of a search: the base policy alone, the paper's state, and a minimal example."""

from __future__ import annotations

from offline_search.candidates.components import BASE, CORE, RANK_AT, Components, JsonObject
from offline_search.candidates.proposal import assemble_state
from offline_search.candidates.search_space import atom_names
from offline_search.settings import MAX_QUOTA, Settings
from vllm_autoprune.tpdsl.states.load import load_state
from vllm_autoprune.tpdsl.states.state import Core, PruningState

WARM_START_SHARES = (0.5, 0.75)
"""Shares of the core of warm starts, in a search of cores."""


def base_state(settings: Settings) -> PruningState:
    """The base policy alone, as a state of this search."""
    return paper_state(settings).without_exchange()


def paper_state(settings: Settings, quota: int = 2) -> PruningState:
    """The paper's selected structure on this search's base policy and budget."""
    source = Components.from_state(load_state("autoprune"))
    update = {"q_e": min(quota, settings.source_budget), "r_min": None}
    selector = source.constraints.selector.model_copy(update=update)
    return assemble_state(source.with_constraints(selector=selector).to_json(), settings)


def minimal_state(settings: Settings) -> PruningState:
    """The simplest state that exchanges tokens, which is the example of the first prompt."""
    return _one_signal_state("visual_token_norm_saliency", 1, settings)


def _one_signal_state(name: str, quota: int, settings: Settings) -> PruningState:
    components: JsonObject = {
        "scoring": {
            "signals": [{"atom": name, "weight": 1.0}],
            "kernel": {"atom": "pairwise_cosine_kernel"},
            "fusion": {"atom": "weighted_sum_fusion"},
        },
        "constraints": {
            "pool": [{"atom": "quality_pool_builder"}],
            "selector": {"atom": "reference_residual_exchange_selector", "q_e": quota},
        },
        "reassembly": {"atom": "mean_residual"},
    }
    return assemble_state(components, settings)


def warm_start_states(settings: Settings) -> list[PruningState]:
    """The paper's structure at its q_e and at K, then every signal alone with q_e = K.

    Which signals matter differs from model to model: alone, a signal shows it in one evaluation,
    among several it takes many. q_e is K because with a weak base policy a full exchange may be
    best. A search of cores starts with two of them as well, after the paper's own state, and a
    search of where tokens are ranked with that state ranking before the merger. A search of base
    policies has each alone, where any state may be a candidate.
    """
    source = Components.from_state(paper_state(settings))
    largest_quota = min(settings.source_budget, MAX_QUOTA)
    bases = [
        assemble_state({**source.to_json(), BASE: {"name": name}}, settings).without_exchange()
        for name in (settings.other_bases if settings.space == "all" else ())
    ]
    variants = []
    if settings.core:
        cores = [Core.model_validate({"share": share}) for share in WARM_START_SHARES]
        variants += [source.model_copy(update={CORE: core}) for core in cores]
    if settings.rank_at:
        variants.append(source.model_copy(update={RANK_AT: "merger_in"}))
    states = [
        paper_state(settings),
        *bases,
        *(assemble_state(components.to_json(), settings) for components in variants),
        paper_state(settings, largest_quota),
        *(
            _one_signal_state(name, largest_quota, settings)
            for name in atom_names("scoring", settings.library)
        ),
    ]
    # With a small K or in a small space, some of them are equal.
    return list({state.digest: state for state in states}.values())
