"""The shipped states, most of them derived from ``policies/autoprune.json``.

That source has the structure that the paper selected (its table of the materialized composition at
K = 32). The paper prints no fusion weights; the weights are ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from vllm_autoprune import PruningState, load_state
from vllm_autoprune.backbones import BACKBONE_SHAPES
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.transfer import instruction_free, transfer

SOURCE = "autoprune"

SEARCH_RESULTS: Mapping[str, str] = {
    "minillava": "mini-LLaVA",
    "minillava-split": "mini-LLaVA",
    "miniqwen": "mini-Qwen3-VL",
}
"""States that a search produced, and the model it measured them on; like the source, they are read
from ``policies/``."""

BUDGETS: Mapping[str, Sequence[int]] = {
    "llava-1.5-7b": (16, 32, 64, 128),
    "llava-next-7b": (160, 320, 640),
    "qwen2.5-vl-7b": (32, 64, 128, 256),
}
"""The budgets and backbones for which the paper reports the selected state."""

QUOTAS = (0, 1, 2, 4, 8, 16, 32)
"""The paper's values of q_e at K = 32."""

RELEASED = (
    "The policy that the paper's authors released, number for number: AIM-ResearchLab/AutoPrune, "
    "openevolve/policies/final/autoprune_llava15_mme_k32_merge.yaml."
)

JsonObject = dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Entry:
    """One shipped state and the family it belongs to."""

    family: str
    state: PruningState

    @property
    def carries_evidence(self) -> bool:
        """Whether accuracy measured on mini-LLaVA belongs into the state's file.

        Not for a transferred state, which is for another backbone and another K than were measured,
        nor for one that a search found on another model: its evidence is of both yardsticks.
        """
        found_on = SEARCH_RESULTS.get(self.state.name, "mini-LLaVA")
        return self.family != "transfer" and found_on == "mini-LLaVA"


def build_states(source: PruningState, search_results: Sequence[PruningState]) -> list[Entry]:
    """Every shipped state by family, the source first; see :data:`SEARCH_RESULTS`."""
    provenance = source.provenance.model_copy(update={"found_by": RELEASED})
    source = source.model_copy(update={"provenance": provenance})
    return [
        Entry("source", source),
        *(Entry("search result", state) for state in search_results),
        *(Entry("transfer", state) for state in _transferred(source)),
        *(Entry("base policy", _base_policy(source, name)) for name in BASE_POLICIES),
        Entry("control", _norm(source)),
        *(Entry("ablation", state) for state in _ablations(source)),
        *(Entry("instruction-free", state) for state in _instruction_free(source)),
        Entry("shared core", _shared_core(source)),
    ]


def _transferred(source: PruningState) -> Iterator[PruningState]:
    for backbone, budgets in BUDGETS.items():
        for budget in budgets:
            name = f"{SOURCE}-{backbone}-k{budget}"
            yield transfer(source, budget, BACKBONE_SHAPES[backbone], name).state


def _base_policy(source: PruningState, policy: str) -> PruningState:
    """A base policy alone: the K tokens that the published method selects, without exchanges."""
    return _edited(
        source,
        policy,
        {
            "base_policy": {"name": policy, "params": {}},
            "scoring": _UNUSED_SCORING,
            "reassembly": {"atom": "mean_residual"},
            "constraints": {
                "pool": [{"atom": "quality_pool_builder"}],
                "selector": {"atom": "reference_strict_preservation_selector"},
            },
        },
        f"The base policy {policy} alone. {BASE_POLICIES[policy].doc}",
        "The authors of the method; parameters as they published them where nothing else is said.",
    )


def _norm(source: PruningState) -> PruningState:
    """The simplest policy: the K tokens of largest norm."""
    return _edited(
        source,
        "norm",
        {
            "base_policy": {"name": "divprune", "params": {}},
            "scoring": {**_UNUSED_SCORING, "signals": [{"atom": "visual_token_norm_saliency"}]},
            "constraints": {
                "pool": [{"atom": "quality_pool_builder"}],
                "selector": {"atom": "quality_topk_selector"},
            },
            "reassembly": {"atom": "mean_residual"},
        },
        "Control: the K tokens of largest norm. What a policy is worth is what it gains over this.",
        "This project.",
    )


def _ablations(source: PruningState) -> Iterator[PruningState]:
    """The selected policy with each of the paper's values of the exchange quota."""
    constraints = _object(_document(source)["constraints"])
    selector = _object(constraints["selector"])
    for quota in QUOTAS:
        swept: JsonObject = {**selector, "q_e": quota, "r_min": None}
        yield _edited(
            source,
            f"ablation-quota-{quota}",
            {"constraints": {**constraints, "selector": swept}},
            f"Sweep of the exchange quota: q_e = {quota}, r_min = K - q_e.",
        )


def _instruction_free(source: PruningState) -> Iterator[PruningState]:
    """The source without the question, so that all questions about an image share its KV blocks.

    Base policies need no such variants: divprune is the one of cdpruner, and so on.
    """
    yield instruction_free(source, "instruction-free").state


def _shared_core(source: PruningState) -> PruningState:
    """CDPruner of which half of K is the same for every question, for traffic that repeats images.

    Nothing is merged, and nothing in it was tuned on a model.
    """
    alone = _base_policy(source, "cdpruner")
    return _edited(
        alone,
        "shared-core",
        {"core": {"share": 0.5, "policy": {"name": "divprune", "params": {}}}},
        "Half of K by divprune, the same for every question about an image; the other half by "
        "cdpruner given these.",
        "The authors of the two methods; the split is ours.",
    )


_UNUSED_SCORING: JsonObject = {
    "signals": [{"atom": "visual_token_norm_saliency", "weight": 0.0}],
    "kernel": {"atom": "pairwise_cosine_kernel"},
    "fusion": {"atom": "weighted_product_fusion"},
}
"""Scoring for a state that never scores; the schema requires one signal."""


def _edited(
    source: PruningState,
    name: str,
    changes: Mapping[str, JsonValue],
    notes: str,
    found_by: str = RELEASED,
) -> PruningState:
    provenance: JsonObject = {"found_by": found_by, "notes": notes}
    data = {**_document(source), "name": name, "provenance": provenance, **changes}
    return load_state(data)


def _document(source: PruningState) -> JsonObject:
    data: JsonObject = json.loads(source.dumps())
    return data


def _object(value: JsonValue) -> JsonObject:
    assert isinstance(value, dict)
    return value
