"""Where a search may begin: the base policy alone, and the paper's state at several quotas.

Knows nothing about strategies.
"""

from __future__ import annotations

from collections.abc import Sequence

from offline_search.proposal import COMPONENTS, JsonObject, assembled
from offline_search.settings import Settings
from vllm_autoprune.tpdsl.states.load import load_state
from vllm_autoprune.tpdsl.states.state import PruningState

QUOTAS = (2, 4, 1)
"""q_e of warm starts, the paper's choice first; q_e = 0 is the base policy, measured anyway."""


def base_state(settings: Settings) -> PruningState:
    """The base policy alone, as a state of this search."""
    return paper_state(settings).without_exchange()


def paper_state(settings: Settings, quota: int = 2) -> PruningState:
    """The structure that the paper selected, on this search's base policy and budget."""
    return edited(load_state("autoprune"), settings, quota=quota)


def plain_state(settings: Settings) -> PruningState:
    """The simplest state that exchanges anything: shows the form, and gives no answer away."""
    body: JsonObject = {
        "scoring": {
            "signals": [{"atom": "visual_token_norm_saliency", "weight": 1.0}],
            "kernel": {"atom": "pairwise_cosine_kernel"},
            "fusion": {"atom": "weighted_sum_fusion"},
        },
        "constraints": {
            "pool": [{"atom": "quality_pool_builder"}],
            "selector": {"atom": "reference_residual_exchange_selector", "q_e": 1},
        },
        "reassembly": {"atom": "mean_residual"},
    }
    return assembled(body, settings, "candidate")


def warm_starts(settings: Settings) -> Sequence[PruningState]:
    """The paper's structure at several quotas and with all of K, then its first signal alone.

    With q_e = K a weak base policy holds nobody back; how weak it is nobody knows before.
    """
    source = paper_state(settings)
    wanted = dict.fromkeys(min(quota, settings.source_budget) for quota in (*QUOTAS, 10**6))
    quotas = [edited(source, settings, quota=quota) for quota in wanted]
    first = source.scoring.signals[0].model_dump(mode="json")
    return [*quotas, edited(source, settings, signals=[{**first, "weight": 1.0}])]


def edited(
    state: PruningState,
    settings: Settings,
    *,
    quota: int | None = None,
    signals: Sequence[JsonObject] | None = None,
) -> PruningState:
    """A state of this search with another quota, or other signals."""
    body: JsonObject = state.model_dump(mode="json", include=set(COMPONENTS))
    scoring, constraints = body["scoring"], body["constraints"]
    assert isinstance(scoring, dict) and isinstance(constraints, dict)
    selector = constraints["selector"]
    assert isinstance(selector, dict)
    if quota is not None:
        selector |= {"q_e": min(quota, settings.source_budget), "r_min": None}
    if signals is not None:
        scoring["signals"] = list(signals)
    return assembled(body, settings, "candidate")
