"""Searched components of a state, alpha = (S, C, R), as JSON."""

from __future__ import annotations

from pydantic import JsonValue

from offline_search.settings import Settings
from vllm_autoprune.tpdsl.atoms.source import Source
from vllm_autoprune.tpdsl.state import Constraints, PruningState

JsonObject = dict[str, JsonValue]

COMPONENTS: tuple[str, ...] = ("scoring", "constraints", "reassembly")
"""Fields of a state that are searched; base policy, budget and safety checks are settings."""

CORE = "core"
RANK_AT = "rank_at"
BASE = "base_policy"
"""Names of the optional components, which are searched if the settings say so."""

DEFAULT_KERNEL: JsonObject = {"atom": "pairwise_cosine_kernel"}
"""The kernel of a proposal without one, as proposals are whose selector reads no kernel."""


def searched_components(settings: Settings) -> tuple[str, ...]:
    """Names of the components that a search varies, except the base policy."""
    names = COMPONENTS
    if settings.library == "paper":
        names = ("source", "budget", *COMPONENTS, "safety")
    optional = {CORE: settings.core, RANK_AT: settings.rank_at}
    return (*names, *(name for name, searched in optional.items() if searched))


def components_json(state: PruningState) -> JsonObject:
    """The components of a state, defaults included."""
    body: JsonObject = state.model_dump(
        mode="json", include={*COMPONENTS, CORE, RANK_AT}
    )
    return {name: body[name] for name in (*COMPONENTS, CORE, RANK_AT) if name in body}


def compact_json(state: PruningState, bases: bool = False) -> JsonObject:
    """The components of a state as a prompt shows them, without a kernel that nothing reads.

    Defaults that add little are left out too. ``bases``: whether to add the base policy, for a
    search that has several to choose from.
    """
    included = {"source", *COMPONENTS, CORE, RANK_AT}
    body: JsonObject = state.model_dump(
        mode="json", include=included, exclude_defaults=True
    )
    leave_out_kernel(body, state)
    constraints = state.constraints
    compact: JsonObject = {
        "pool": [
            call.model_dump(mode="json", exclude_defaults=True)
            for call in constraints.pool
        ],
        "selector": constraints.selector.model_dump(mode="json", exclude={"r_min"}),
    }
    default = Constraints.model_fields["partition"].get_default(
        call_default_factory=True
    )
    if constraints.partition != default:
        compact["partition"] = constraints.partition.model_dump(
            mode="json", exclude_defaults=True
        )
    body |= {
        "constraints": compact,
        "reassembly": state.reassembly.model_dump(mode="json"),
    }
    # Only its name is shown, because its parameters are not searched.
    return {**body, BASE: {"name": state.base_policy.name}} if bases else body


def leave_out_kernel(body: JsonObject, state: PruningState) -> None:
    """Remove the kernel from the components of a state if nothing reads it."""
    scoring = body["scoring"]
    if isinstance(scoring, dict) and not state.reads_kernel:
        scoring.pop("kernel")


def structure(state: PruningState) -> tuple[str, ...]:
    """Structure of a state: names of its atoms in order and of its policies, and place of ranking.

    Two states of one structure differ only in numbers.
    """
    scoring = state.scoring
    constraints = state.constraints
    calls = (
        *scoring.signals,
        scoring.kernel,
        scoring.fusion,
        *constraints.pool,
        constraints.partition,
        constraints.selector,
        state.reassembly,
    )
    source = (
        (state.source.tokens, *state.source.priors) if state.source != Source() else ()
    )
    core = () if state.core is None else (f"core={state.core.policy.name}",)
    rank = () if state.rank_at == "merger_out" else (f"{RANK_AT}={state.rank_at}",)
    base = f"{BASE}={state.base_policy.name}"
    return (*(call.atom for call in (*source, *calls)), *core, *rank, base)
