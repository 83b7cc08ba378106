"""Candidates of a search: proposals, the states that are made of them, and the first states."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Literal

from pydantic import Field, JsonValue

from offline_search.components import (
    BASE,
    DEFAULT_KERNEL,
    JsonObject,
    components_json,
    optional_components,
    searched_components,
)
from offline_search.released_space import (
    SignalChoice,
    choice_of_signals,
    list_problems_of_space,
    project,
)
from offline_search.search_space import excluded_atoms
from offline_search.settings import MAX_QUOTA, Settings
from vllm_autoprune.errors import Problem, StateError
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.tpdsl.atoms.pools import PartitionCall, PoolCall, SourceCall
from vllm_autoprune.tpdsl.atoms.source import FIXED_BUDGETS, BudgetCall
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, Group
from vllm_autoprune.tpdsl.state import SCHEMA, PruningState

Expectation = Literal["higher", "same", "lower"]
"""Expected score of a proposal, compared with its parent's."""

Stage = Literal["first", "open", "tied", "last"]
"""Stage of a search: ``first`` before anything is measured, ``tied`` if the best candidates are
tied, ``last`` in the last round, and ``open`` otherwise."""

PURPOSES: Mapping[str, str] = {
    "exploit": "the best candidate with other numbers",
    "ablate": "a candidate without one of its parts, or with that part replaced by a simpler one",
    "explore": "a structure that is not listed",
    "combine": "parts of two or more candidates",
    "worst_category": "a change for the category with the largest share of the loss",
}
"""Purposes that are requested of proposals, in this order, and their descriptions in prompts."""

_PURPOSES_IN_SMALL_SPACES: Mapping[SignalChoice, Mapping[str, str]] = {
    "fixed": {
        "ablate": "a candidate with one number set where its part does least, such as q_e or "
        "the reassembly's strength 0",
        "explore": "numbers far from those that are listed",
        "combine": "numbers of two or more candidates",
    },
    "any": {
        "ablate": "a candidate without one of its signals, or with one number set where its part "
        "does least",
        "explore": "signals that are not listed, or numbers far from those that are",
        "combine": "signals or numbers of two or more candidates",
    },
    "single": {
        "ablate": "a candidate with one number set where its part does least",
        "explore": "a signal that is not listed, or numbers far from those that are",
        "combine": "the signal of a candidate, with numbers of others",
    },
}
"""Descriptions that differ in a space in which all candidates have one structure, or few."""

_PURPOSES_OF: Mapping[Stage, Sequence[str]] = {
    "first": ("explore",),
    "open": tuple(PURPOSES),
    "tied": ("explore",),
    "last": ("exploit", "ablate", "combine"),
}
"""Purposes by stage. Variants of tied candidates would tell nothing; a new structure would come too
late in the last round."""

MAX_HYPOTHESIS = 200
"""Largest length of a hypothesis; a longer one is cut, because prompts repeat it."""

PROPOSALS = "proposals"
"""Name of the only field of a reply that is a list of proposals."""

BASE_PARENT = "base"
"""Name by which a proposal states the base policy alone as its parent."""


class Hypothesis(FrozenModel):
    """Purpose, reason and expectation of a proposal; the defaults if the reply has none."""

    purpose: str = ""
    text: str = Field(default="", max_length=MAX_HYPOTHESIS)
    expect: Expectation = "higher"


def describe_purposes(settings: Settings) -> Mapping[str, str]:
    """What each purpose means in a search."""
    if settings.space == "all":
        return PURPOSES
    purposes = dict(_PURPOSES_IN_SMALL_SPACES[choice_of_signals(settings.space)])
    optional = optional_components(settings)
    if optional:
        purposes["explore"] += f", or another {' or '.join(optional)}"
        purposes["combine"] += f"; {', '.join(optional)} may come from any of them"
    if settings.core:
        purposes["ablate"] += ", or without its core"
    return {**PURPOSES, **purposes}


def list_purposes(begin: int, count: int, stage: Stage) -> list[str]:
    """Purposes of ``count`` proposals, taken in turn from number ``begin`` on."""
    return list(islice(cycle(_PURPOSES_OF[stage]), begin, begin + count))


_SAFETY_CHECKS = (
    "preserve_budget",
    "no_shape_change",
    "deterministic",
    "fallback_to_selection",
)


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed candidate: its state, or the problems that make it invalid.

    ``origin`` names the source of the proposal, ``parents`` the earlier candidates that it was
    derived from.
    """

    origin: str
    state: PruningState | None
    problems: tuple[Problem, ...] = ()
    parents: tuple[str, ...] = ()
    hypothesis: Hypothesis | None = None


def assemble_state(
    components: Mapping[str, JsonValue], settings: Settings
) -> PruningState:
    """The state with these components.

    Base policy, budget and safety checks are the search's own where it does not vary them. Raises
    :class:`StateError`, also for parts that a smaller space lacks.
    """
    state = _load_components(components, settings)
    if settings.question_free:
        _refuse_reading(state, settings)
    if settings.space == "all":
        return state
    nearest = _project_state(state, settings)
    problems = list_problems_of_space(state, nearest, settings)
    if problems:
        raise StateError("proposal", problems)
    return nearest


def _refuse_reading(state: PruningState, settings: Settings) -> None:
    """Raise :class:`StateError` if a state reads the question at the search's K."""
    if materialize(state, settings.source_budget).reads_instruction:
        fix = "use atoms that the task lists, and no part that reads the question"
        raise StateError.of("", "reads the question", fix, subject="proposal")


def nearest_state(
    components: Mapping[str, JsonValue], settings: Settings
) -> PruningState:
    """The result of :func:`assemble_state`, moved to the nearest state of a smaller space."""
    state = _load_components(components, settings)
    return state if settings.space == "all" else _project_state(state, settings)


def _project_state(state: PruningState, settings: Settings) -> PruningState:
    """The nearest state of a smaller space; everything that is not searched is unchanged."""
    document: JsonObject = state.model_dump(mode="json")
    return load_state(json.dumps(document | project(state, settings.space)))


def _load_components(
    components: Mapping[str, JsonValue], settings: Settings
) -> PruningState:
    """The state with these components in any space; raises :class:`StateError` if invalid."""
    searched = searched_components(settings)
    parts = {name: components[name] for name in searched if name in components}
    if isinstance(scoring := parts.get("scoring"), dict):
        parts["scoring"] = {"kernel": DEFAULT_KERNEL, **scoring}
    if settings.bases and BASE in components:
        # Only the name is read, because parameters of base policies are not searched.
        choice = components[BASE]
        name = choice.get("name") if isinstance(choice, dict) else choice
        if name not in settings.bases:
            raise StateError.of(
                f"/{BASE}",
                f"{str(name)[:80]!r} is not offered",
                f"write {' or '.join(settings.bases)}",
                subject="proposal",
            )
        parts[BASE] = {"name": name}
    if settings.library == "paper":
        text = json.dumps(parts)
        fix = "write an atom of the list"
        problems = [
            Problem("", f"{name} is an extension", fix)
            for name in sorted(excluded_atoms(settings))
            if json.dumps(name) in text
        ]
        if problems:
            raise StateError("proposal", problems)
    # An atom that keeps exactly K tokens is preferred.
    count = settings.budgets[0]
    budget: JsonObject = {"atom": f"fixed_budget@{count}"}
    if count not in FIXED_BUDGETS:
        budget = BudgetCall.parse(count).model_dump(mode="json")
    if isinstance(proposed := parts.get("budget"), dict):
        budget["limit"] = proposed.get("limit")
    document: JsonObject = {
        "schema": SCHEMA,
        "name": "candidate",
        "base_policy": {"name": settings.base_policy},
        "positions": settings.positions,
        "safety": list(_SAFETY_CHECKS),
        **parts,
        "budget": budget,
        "provenance": {
            "found_by": f"vllm-autoprune search, strategy {settings.strategy}"
        },
    }
    try:
        return load_state(json.dumps(document))
    except StateError as error:
        problems = [_offer_names(problem, settings) for problem in error.problems]
        raise StateError(error.subject, problems) from None


_KINDS: Mapping[str, tuple[Group, type[AtomCall]]] = {
    "/scoring/signals/": ("scoring", AtomCall),
    "/scoring/kernel": ("similarity_kernel", AtomCall),
    "/scoring/fusion": ("score_fusion", AtomCall),
    "/constraints/pool/": ("candidate_pool", PoolCall),
    "/constraints/partition": ("candidate_pool", PartitionCall),
    "/constraints/selector": ("selection_constraints", AtomCall),
    "/reassembly": ("reassembly", AtomCall),
}
"""Groups and calls of the atoms that a part takes, by the beginning of its pointers."""

_MAX_NAMES = 24
"""Largest number of names that a problem lists; of more, it points at the list of the task."""


def _offer_names(problem: Problem, settings: Settings) -> Problem:
    """``problem``, with the names of atoms that the search offers if it suggests others."""
    kinds = [kind for part, kind in _KINDS.items() if problem.where.startswith(part)]
    if problem.kind != "unknown_name" or not kinds:
        return problem
    if "/sources/" in problem.where:
        kinds = [("candidate_pool", SourceCall)]
    left_out = excluded_atoms(settings)
    names = [name for name in ATOMS.of_kind(*kinds[0]) if name not in left_out]
    if any(repr(name) in problem.fix for name in names):
        return problem
    fix = "use one of those that the task lists for this part"
    if len(names) <= _MAX_NAMES:
        fix = f"use one of: {', '.join(names)}"
    return replace(problem, fix=fix)


def base_state(settings: Settings) -> PruningState:
    """The base policy alone, as a state of this search."""
    return paper_state(settings).without_exchange()


def paper_state(settings: Settings, quota: int = 2) -> PruningState:
    """The paper's selected structure on this search's base policy and budget.

    Of its signals, it has those that the search offers.
    """
    released = load_state("autoprune")
    left_out = excluded_atoms(settings)
    signals = tuple(
        call for call in released.scoring.signals if call.atom not in left_out
    )
    scoring = released.scoring.model_copy(update={"signals": signals})
    update = {"q_e": min(quota, settings.source_budget), "r_min": None}
    selector = released.constraints.selector.model_copy(update=update)
    constraints = released.constraints.model_copy(update={"selector": selector})
    changed = released.model_copy(
        update={"scoring": scoring, "constraints": constraints}
    )
    return nearest_state(components_json(changed), settings)


def minimal_state(
    settings: Settings, signal: str = "visual_token_norm_saliency", quota: int = 1
) -> PruningState:
    """A state with one signal; the default one is the example in the first prompt."""
    components: JsonObject = {
        "scoring": {
            "signals": [{"atom": signal, "weight": 1.0}],
            "kernel": {"atom": "pairwise_cosine_kernel"},
            "fusion": {"atom": "weighted_sum_fusion"},
        },
        "constraints": {
            "pool": [{"atom": "quality_pool_builder"}],
            "selector": {"atom": "reference_residual_exchange_selector", "q_e": quota},
        },
        "reassembly": {"atom": "mean_residual"},
    }
    return nearest_state(components, settings)


_RELEVANCE: JsonObject = {"atom": "instruction_guided_visual_relevance"}
_BASES_IN_ATOMS: Mapping[str, tuple[list[JsonValue], JsonObject, str, str]] = {
    "cdpruner": (
        [_RELEVANCE],
        {"atom": "pairwise_cosine_kernel"},
        "weighted_sum_fusion",
        "runtime_reference_anchor_pool_dpp_selector",
    ),
    "cen_cdpruner": (
        [_RELEVANCE, {"atom": "mean_dissimilarity_saliency"}],
        {"atom": "centred_cosine_kernel", "weighted": True},
        "weighted_product_fusion",
        "anchor_controlled_pool_dpp_selector",
    ),
    "norm": (
        [{"atom": "visual_token_norm_saliency"}],
        {"atom": "pairwise_cosine_kernel"},
        "weighted_sum_fusion",
        "quality_topk_selector",
    ),
}
"""Signals, kernel, fusion and selector that reproduce the picks of a base policy for an image of
one tile; other base policies cannot be written in atoms."""


def base_in_atoms(settings: Settings) -> PruningState | None:
    """The search's base policy as an exchange in atoms; None if it cannot be written in atoms."""
    parts = _BASES_IN_ATOMS.get(settings.base_policy)
    if parts is None:
        return None
    signals, kernel, fusion, selector = parts
    call: JsonObject = {"atom": selector}
    if selector != "quality_topk_selector":
        call["q_e"] = min(settings.source_budget, MAX_QUOTA)
    components: JsonObject = {
        "scoring": {"signals": signals, "kernel": kernel, "fusion": {"atom": fusion}},
        "constraints": {
            "pool": [{"atom": "quality_pool_builder", "pool_ratio": None}],
            "selector": call,
        },
        "reassembly": {"atom": "mean_residual"},
    }
    try:
        return assemble_state(components, settings)
    except StateError:  # the paper's library lacks one of its atoms
        return None
