"""Search space of proposals: a sequence of named choices, which are random or a sampler's.
Options and ranges come from the atom registry, so new atoms are searched without changes here.
"""

from __future__ import annotations

from functools import cache
from typing import get_args

from pydantic import JsonValue

from offline_search.choices import NO_YES, Choice, ChoiceSource
from offline_search.components import (
    BASE,
    CORE,
    RANK_AT,
    JsonObject,
)
from offline_search.released_space import (
    choices_of_released,
    draw_released,
    released_atoms,
)
from offline_search.settings import MAX_QUOTA, Settings
from vllm_autoprune.tpdsl.atoms.pools import JoinedPool, PartitionCall
from vllm_autoprune.tpdsl.base_policy import INSTRUCTION_NEEDS
from vllm_autoprune.tpdsl.reference import CORE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, Group
from vllm_autoprune.tpdsl.state import Core, PruningState
from vllm_autoprune.tpdsl.tokens import RankAt

# These parameters are not searched: guards against division by zero, a bound that follows from q_e,
# and a weight that changes no pick.
_FIXED_PARAMETERS = ("eps", "r_min", "iters", "keep_weight")

_Bounds = tuple[float, float, bool]
"""Inclusive bounds of a number, and whether the number is an integer."""


def sample_proposal(source: ChoiceSource, settings: Settings) -> JsonObject:
    """Sample a complete proposal, with every atom and parameter of the search's space.

    Core, place of ranking and base policy are drawn last, so that a search with them draws the same
    other choices as a search without.
    """
    if settings.space == "all":
        proposal = _draw_components(source, settings)
    else:
        proposal = draw_released(source, settings.space)
    if settings.core and source.option("with core", NO_YES) == "yes":
        core: JsonObject = {
            "policy": {"name": source.option("core.policy", CORE_POLICIES)}
        }
        for name, bounds in _core_bounds().items():
            core[name] = source.number(f"core.{name}", *bounds)
        proposal[CORE] = core
    if settings.rank_at:
        proposal[RANK_AT] = source.option(RANK_AT, get_args(RankAt))
    if settings.bases:
        proposal[BASE] = {"name": source.option(BASE, settings.bases)}
    return proposal


def choices_of_state(state: PruningState, settings: Settings) -> dict[str, Choice]:
    """The choices for which :func:`sample_proposal` returns the proposal nearest to ``state``."""
    if settings.space == "all":
        choices = _choices_of_components(state, settings)
    else:
        choices = choices_of_released(state)
    if settings.core:
        choices["with core"] = NO_YES[state.core is not None]
    if settings.core and state.core is not None:
        choices["core.policy"] = state.core.policy.name
        numbers = state.core.model_dump(include=set(_core_bounds()))
        choices |= {f"core.{name}": number for name, number in numbers.items()}
    if settings.bases:
        choices[BASE] = state.base_policy.name
    return choices | {RANK_AT: state.rank_at} if settings.rank_at else choices


def _draw_components(source: ChoiceSource, settings: Settings) -> JsonObject:
    """Draw components from the whole language, with powers of two for q_e."""

    def call(atom: str) -> JsonObject:
        values: JsonObject = {"atom": atom}
        for name, schema in _searched_parameters(atom).items():
            choice = f"{atom}.{name}"
            if _is_optional(schema) and source.option(f"{choice} set", NO_YES) == "no":
                values[name] = None
            elif name == "q_e":
                values[name] = int(
                    source.option(choice, _quota_options(settings.source_budget))
                )
            elif isinstance(words := schema.get("enum"), list):
                values[name] = source.option(choice, [str(word) for word in words])
            elif schema.get("type") == "boolean":
                values[name] = source.option(choice, ("false", "true")) == "true"
            elif bounds := _bounds(schema):
                number = source.number(choice, *bounds)
                values[name] = int(number) if bounds[2] else number
        return values

    def any_of(group: Group) -> JsonObject:
        return call(source.option(group, atom_names(group, settings)))

    def takes_part(atom: str) -> bool:
        return source.option(f"with {atom}", NO_YES) == "yes"

    scorers = atom_names("scoring", settings)
    pools = _flat_pools(settings)
    signals: list[JsonValue] = [call(name) for name in scorers if takes_part(name)]
    chosen = [name for name in pools if takes_part(name)]
    return {
        "scoring": {
            "signals": signals or [call(scorers[0])],
            "kernel": any_of("similarity_kernel"),
            "fusion": any_of("score_fusion"),
        },
        "constraints": {
            "pool": [call(name) for name in chosen or pools[:1]],
            "selector": any_of("selection_constraints"),
        },
        "reassembly": any_of("reassembly"),
    }


def _choices_of_components(
    state: PruningState, settings: Settings
) -> dict[str, Choice]:
    """Recover the choices from components: the inverse of :func:`_draw_components`.

    A union of pools is replaced by its first source; partitions and repeated signals are dropped.
    """
    pools = [
        c.sources[0] if isinstance(c, JoinedPool) else c for c in state.constraints.pool
    ]
    listed: dict[str, AtomCall] = {
        call.atom: call for call in (*state.scoring.signals, *pools)
    }
    groups: dict[Group, AtomCall] = {
        "similarity_kernel": state.scoring.kernel,
        "score_fusion": state.scoring.fusion,
        "selection_constraints": state.constraints.selector,
        "reassembly": state.reassembly,
    }
    optional = (*atom_names("scoring", settings), *_flat_pools(settings))
    choices: dict[str, Choice] = {
        f"with {name}": NO_YES[name in listed] for name in optional
    }
    choices |= {group: call.atom for group, call in groups.items()}
    for call in (*listed.values(), *groups.values()):
        values = dict(call)  # includes defaults, which a dump leaves out
        for name, schema in _searched_parameters(call.atom).items():
            choice = f"{call.atom}.{name}"
            value = values[name]
            if _is_optional(schema):
                choices[f"{choice} set"] = NO_YES[value is not None]
            if name == "q_e":
                options = _quota_options(settings.source_budget)
                choices[choice] = min(options, key=lambda q: abs(int(q) - value))
            elif value is not None:
                choices[choice] = (
                    str(value).lower() if isinstance(value, bool) else value
                )
    return choices


def _quota_options(budget: int) -> list[str]:
    """Searched values of q_e: zero, powers of two, and K, limited to what the language allows."""
    maximum = min(budget, MAX_QUOTA)
    powers = [2**exponent for exponent in range(10)]
    return [*map(str, (0, *(power for power in powers if power < maximum), maximum))]


def excluded_atoms(settings: Settings) -> frozenset[str]:
    """Names of atoms that are not offered to a language model."""
    if settings.space != "all":
        return frozenset(ATOMS.names()) - released_atoms(settings.space)
    return frozenset(name for name in ATOMS.names() if not _is_offered(name, settings))


def atom_names(group: Group, settings: Settings) -> list[str]:
    """Names of the atoms of a group that a search of the whole language uses, in registry order."""
    return [name for name in ATOMS.names(group) if _is_offered(name, settings)]


def _is_offered(name: str, settings: Settings) -> bool:
    atom = ATOMS[name]
    if settings.question_free and not atom.needs.isdisjoint(INSTRUCTION_NEEDS):
        return False
    return not atom.videos and (
        settings.library != "paper" or atom.origin != "extension"
    )


def _flat_pools(settings: Settings) -> list[str]:
    """Pool builders that take no other pool and no partition; they are combined in a list."""
    names = atom_names("candidate_pool", settings)
    return [
        name
        for name in names
        if not issubclass(ATOMS[name].call, JoinedPool | PartitionCall)
    ]


@cache
def _core_bounds() -> dict[str, _Bounds]:
    """Bounds of a core's numbers by name."""
    schemas = Core.model_json_schema()["properties"]
    bounds = {name: _bounds(schema) for name, schema in schemas.items()}
    return {name: limits for name, limits in bounds.items() if limits is not None}


@cache
def _searched_parameters(atom: str) -> dict[str, JsonObject]:
    return {
        name: schema
        for name, schema in ATOMS[atom].call.model_json_schema()["properties"].items()
        if name not in (*_FIXED_PARAMETERS, "atom", "sign")
        and ("enum" in schema or schema.get("type") == "boolean" or _bounds(schema))
    }


def _is_optional(schema: JsonObject) -> bool:
    return {"type": "null"} in _alternatives(schema)


def _alternatives(schema: JsonObject) -> list[JsonObject]:
    """Schemas of the types that a parameter accepts, such as number and null if it is optional."""
    choices = schema.get("anyOf", [schema])
    assert isinstance(choices, list)
    return [choice for choice in choices if isinstance(choice, dict)]


def _bounds(schema: JsonObject) -> _Bounds | None:
    schema = _alternatives(schema)[0]
    low = schema.get("minimum")
    high = schema.get("maximum")
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return None
    return low, high, schema.get("type") == "integer"
