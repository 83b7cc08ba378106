"""Searched components of a state, alpha = (S, C, R): as JSON, and as changes of another state."""

from __future__ import annotations

import json

from pydantic import JsonValue

from offline_search.settings import Settings
from vllm_autoprune.tpdsl.atoms.source import Source
from vllm_autoprune.tpdsl.registry import ATOMS
from vllm_autoprune.tpdsl.state import Constraints, PruningState
from vllm_autoprune.tpdsl.transfer import Change, list_changes

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
    return (*names, *(name for name in optional_components(settings) if name != BASE))


def optional_components(settings: Settings) -> tuple[str, ...]:
    """Names of the optional components that a search varies."""
    optional = {
        CORE: settings.core,
        RANK_AT: settings.rank_at,
        BASE: bool(settings.bases),
    }
    return tuple(name for name, searched in optional.items() if searched)


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


def dump_json(document: JsonValue) -> str:
    """JSON without spaces."""
    return json.dumps(document, separators=(",", ":"))


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


# ---- changes ----


def describe_changes(old: PruningState, new: PruningState, bases: bool = False) -> str:
    """Changes that make one state of another; ``bases``: whether the base policy is among them."""
    before = _comparable_json(old, bases)
    changes = list_changes(before, _comparable_json(new, bases))
    texts = [_describe_change(change, before) for change in changes]
    return ", ".join(texts) or "no change"


def _comparable_json(state: PruningState, bases: bool) -> JsonObject:
    """The components of a state that act, to be compared with those of another."""
    body = components_json(state)
    leave_out_kernel(body, state)
    if state.core is not None:
        # Default parameters of its policy are printed nowhere else.
        policy = state.core.policy.model_dump(mode="json", exclude_defaults=True)
        body[CORE] = {**state.core.model_dump(mode="json"), "policy": policy}
    return {**body, BASE: {"name": state.base_policy.name}} if bases else body


def _describe_change(change: Change, old: JsonValue) -> str:
    """Text of a change of ``old``, with names of atoms in place of their positions."""
    names = list[str]()
    document = old
    parts = change.where.split("/")[1:]
    for depth, part in enumerate(parts, 1):
        if change.kind == "added" and depth == len(parts):
            document = change.after  # the last position is that in the new document
        elif isinstance(document, list):
            document = document[int(part)]
        elif isinstance(document, dict):
            document = document.get(part)
        if part.isdecimal() and isinstance(document, dict):
            part = str(document.get("atom", part))
        names.append(part)
    is_long = len(names) > 2 and names[0] != CORE
    name = " ".join(names[1:] if is_long else names)
    if change.kind == "added":
        return f"{name} added: {_format_value(_shorten(change.after))}"
    if change.kind != "changed":
        return f"{name} {change.kind}"
    if isinstance(change.before, dict | list) or isinstance(change.after, dict | list):
        return f"{name} = {dump_json(_shorten(change.after))}"
    return f"{name} {_format_value(change.before)} -> {_format_value(change.after)}"


def _format_value(value: JsonValue) -> str:
    """A JSON value as text, with numbers as short as possible."""
    return f"{value:g}" if isinstance(value, float) else dump_json(value)


def _shorten(value: JsonValue) -> JsonValue:
    """A call of an atom without its defaults; any other value is returned unchanged."""
    if not isinstance(value, dict) or value.get("atom") not in ATOMS.names():
        return value
    call = ATOMS[str(value["atom"])].call.model_validate(value)
    shortened: JsonValue = call.model_dump(mode="json", exclude_defaults=True)
    return shortened
