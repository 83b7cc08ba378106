"""Search space of proposals as a sequence of named choices, made at random or by a sampler.

Options and ranges come from the atom registry, so new atoms are searched without changes here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Literal, get_args

from pydantic import JsonValue

from offline_search.components import (
    BASE,
    CORE,
    RANK_AT,
    Choice,
    ChoiceSource,
    Components,
    JsonObject,
    atom_calls,
)
from offline_search.settings import MAX_QUOTA, Library, Space
from vllm_autoprune.tpdsl.atoms.pools import JoinedPool, PartitionCall
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.reference import CORE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, Group
from vllm_autoprune.tpdsl.state import Core, PruningState
from vllm_autoprune.tpdsl.tokens import RankAt

# Not searched: guards against division by zero, a bound that follows from q_e, and a weight that
# changes no pick.
_FIXED_PARAMETERS = ("eps", "r_min", "iters", "keep_weight")


class RandomSource:
    """Choices drawn uniformly at random."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def option(self, name: str, options: Sequence[str]) -> str:
        """An option, all equally likely."""
        return self._rng.choice(options)

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """A number, uniform over its range."""
        if integer:
            return self._rng.randint(round(low), round(high))
        return round(self._rng.uniform(low, high), 4)


@dataclass(frozen=True, slots=True)
class NumericParameter:
    """A bounded numeric parameter at a path within the components of a state."""

    path: tuple[str | int, ...]
    low: float
    high: float
    integer: bool

    @property
    def name(self) -> str:
        """The path, separated by slashes."""
        return "/".join(map(str, self.path))

    @property
    def is_quota(self) -> bool:
        """Whether this is q_e, which is chosen on a logarithmic scale."""
        return self.path[-1] == "q_e"


def sample_proposal(
    source: ChoiceSource,
    budget: int,
    core: bool = False,
    rank_at: bool = False,
    bases: Sequence[str] = (),
    library: Library = "searched",
    space: Space = "all",
) -> JsonObject:
    """A complete proposal: every atom and parameter of the space chosen.

    With ``core``, it may have one, with ``rank_at`` it says where tokens are ranked, and with
    ``bases`` which of them it refines; all other
    choices are made before, as without. With the library of the paper it has no extension.
    """
    if space == "all":
        proposal = _sample_components(source, budget, library)
    else:
        proposal = draw_components(source, space)
    if core and source.option("with core", ("no", "yes")) == "yes":
        proposal[CORE] = _sample_core(source)
    if rank_at:
        proposal[RANK_AT] = source.option(RANK_AT, get_args(RankAt))
    if bases:
        proposal[BASE] = {"name": source.option(BASE, bases)}
    return proposal


def _sample_components(source: ChoiceSource, budget: int, library: Library) -> JsonObject:
    """Components from the whole language, q_e among powers of two."""
    scorers = atom_names("scoring", library)
    signals = [
        _sample_call(source, name, budget)
        for name in scorers
        if source.option(f"with {name}", ("no", "yes")) == "yes"
    ]
    pools = _flat_pools(library)
    chosen = [name for name in pools if source.option(f"with {name}", ("no", "yes")) == "yes"]
    return {
        "scoring": {
            "signals": [*signals] or [_sample_call(source, scorers[0], budget)],
            "kernel": _sample_group(source, "similarity_kernel", budget, library),
            "fusion": _sample_group(source, "score_fusion", budget, library),
        },
        "constraints": {
            "pool": [_sample_call(source, name, budget) for name in chosen or pools[:1]],
            "selector": _sample_group(source, "selection_constraints", budget, library),
        },
        "reassembly": _sample_group(source, "reassembly", budget, library),
    }


def _sample_core(source: ChoiceSource) -> JsonObject:
    core: JsonObject = {"policy": {"name": source.option("core.policy", CORE_POLICIES)}}
    for name, (low, high, integer) in _core_bounds().items():
        core[name] = source.number(f"core.{name}", low, high, integer)
    return core


def _sample_group(source: ChoiceSource, group: Group, budget: int, library: Library) -> JsonObject:
    return _sample_call(source, source.option(group, atom_names(group, library)), budget)


def _sample_call(source: ChoiceSource, atom: str, budget: int) -> JsonObject:
    call: JsonObject = {"atom": atom}
    for name, schema in _parameter_schemas(atom).items():
        if name in _FIXED_PARAMETERS:
            continue
        choice = f"{atom}.{name}"
        if name == "q_e":
            call[name] = int(source.option(choice, _quota_options(budget)))
        elif isinstance(words := schema.get("enum"), list) and name != "sign":
            call[name] = source.option(choice, [str(word) for word in words])
        elif schema.get("type") == "boolean":
            call[name] = source.option(choice, ("false", "true")) == "true"
        elif (bounds := _bounds(schema)) is not None:
            if _is_optional(schema) and source.option(f"{choice} set", ("no", "yes")) == "no":
                call[name] = None
                continue
            low, high, integer = bounds
            value = source.number(choice, low, high, integer)
            call[name] = int(value) if integer else value
    return call


def choices_of_state(
    state: PruningState,
    budget: int,
    core: bool = False,
    rank_at: bool = False,
    bases: Sequence[str] = (),
    library: Library = "searched",
    space: Space = "all",
) -> dict[str, Choice]:
    """The choices for which :func:`sample_proposal` gives the proposal nearest to a state."""
    if space == "all":
        choices = _choices_of_components(state, budget, library)
    else:
        choices = choices_in_spaces(state)
    if core:
        choices |= _choices_of_core(state.core)
    if bases:
        choices[BASE] = state.base_policy.name
    return choices | {RANK_AT: state.rank_at} if rank_at else choices


def _choices_of_components(state: PruningState, budget: int, library: Library) -> dict[str, Choice]:
    """Recover the random choices from components: the inverse of :func:`_sample_components`.

    A union of pools stands for its first source; partitions and repeated signals have no choice.
    """
    choices: dict[str, Choice] = {}
    pools = [c.sources[0] if isinstance(c, JoinedPool) else c for c in state.constraints.pool]
    calls: Sequence[tuple[list[str], Sequence[AtomCall]]] = (
        (atom_names("scoring", library), state.scoring.signals),
        (_flat_pools(library), pools),
    )
    for names, listed in calls:
        by_atom = {call.atom: call for call in listed}
        choices |= {f"with {name}": "yes" if name in by_atom else "no" for name in names}
        for name in names:
            choices |= _choices_of_call(by_atom[name], budget) if name in by_atom else {}
    groups: dict[Group, AtomCall] = {
        "similarity_kernel": state.scoring.kernel,
        "score_fusion": state.scoring.fusion,
        "selection_constraints": state.constraints.selector,
        "reassembly": state.reassembly,
    }
    for group, call in groups.items():
        choices[group] = call.atom
        choices |= _choices_of_call(call, budget)
    return choices


def _choices_of_core(core: Core | None) -> dict[str, Choice]:
    """Recover the random choices from a core: the inverse of :func:`_sample_core`."""
    if core is None:
        return {"with core": "no"}
    numbers = core.model_dump(include=set(_core_bounds()))
    numbers = {f"core.{name}": number for name, number in numbers.items()}
    return {"with core": "yes", "core.policy": core.policy.name, **numbers}


def _choices_of_call(call: AtomCall, budget: int) -> dict[str, Choice]:
    """Recover the random choices from a call: the inverse of :func:`_sample_call`."""
    values = dict(call)  # with defaults that a dump leaves out
    choices: dict[str, Choice] = {}
    for name, schema in _parameter_schemas(call.atom).items():
        choice = _choice_of_value(name, schema, values[name], budget)
        if choice is not None:
            choices[f"{call.atom}.{name}"] = choice
        if _is_optional(schema):
            choices[f"{call.atom}.{name} set"] = "no" if values[name] is None else "yes"
    return choices


def _choice_of_value(name: str, schema: JsonObject, value: JsonValue, budget: int) -> Choice | None:
    if name in _FIXED_PARAMETERS or name == "sign":
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if name == "q_e" and isinstance(value, int):
        return _nearest_quota(value, budget)
    searched = "enum" in schema or _bounds(schema) is not None
    return value if isinstance(value, int | float | str) and searched else None


def quota_scale(budget: int) -> list[int]:
    """Searched values of q_e at a budget: zero, powers of two, and the whole budget.

    At most what the language allows.
    """
    most = min(budget, MAX_QUOTA)
    return [0, *(2**power for power in range(10) if 2**power < most), most]


def _quota_options(budget: int) -> list[str]:
    return [str(quota) for quota in quota_scale(budget)]


def _nearest_quota(value: float, budget: int) -> str:
    return min(_quota_options(budget), key=lambda quota: abs(int(quota) - value))


def numeric_parameters(state: PruningState) -> dict[NumericParameter, float]:
    """The numbers of a state that can change without changing its structure."""
    return dict(_numbers_below(Components.from_state(state).to_json(), ()))


def _numbers_below(
    value: JsonValue, path: tuple[str | int, ...]
) -> Iterator[tuple[NumericParameter, float]]:
    """Every numeric parameter below ``path`` and its value, in document order."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers_below(item, (*path, index))
    if not isinstance(value, dict):
        return
    atom = value.get("atom")
    schemas = _parameter_schemas(atom) if isinstance(atom, str) else {}
    core = _core_bounds() if path == (CORE,) else {}
    for name, item in value.items():
        bounds = _bounds(schemas[name]) if name in schemas else core.get(name)
        if bounds is None:
            yield from _numbers_below(item, (*path, name))
        elif name not in _FIXED_PARAMETERS and isinstance(item, int | float):
            yield NumericParameter((*path, name), *bounds), item


def atom_names(group: Group, library: Library) -> list[str]:
    """Atoms of a group that a search of a library varies, in registry order."""
    names = ATOMS.names(group)
    return [name for name in names if library != "paper" or ATOMS[name].origin != "extension"]


def excluded_atoms(library: Library, space: Space) -> frozenset[str]:
    """Atoms that a language model is not offered."""
    if space != "all":
        return frozenset(ATOMS.names()) - {call.atom for call in atom_calls(released_policy())}
    own = (name for name in ATOMS.names() if ATOMS[name].origin == "extension")
    return frozenset(own if library == "paper" else ())


def _flat_pools(library: Library) -> list[str]:
    """Pool builders that take no other pool and no partition; they are combined in a list."""
    names = atom_names("candidate_pool", library)
    return [name for name in names if not (_is_partition(name) or _takes_pools(name))]


def _is_partition(atom: str) -> bool:
    return issubclass(ATOMS[atom].call, PartitionCall)


def _takes_pools(atom: str) -> bool:
    return any(schema.get("type") == "array" for schema in _parameter_schemas(atom).values())


@cache
def _core_bounds() -> dict[str, tuple[float, float, bool]]:
    """Bounds of the numbers of a core."""
    schemas = Core.model_json_schema()["properties"]
    bounds = {name: _bounds(schema) for name, schema in schemas.items()}
    return {name: limits for name, limits in bounds.items() if limits is not None}


@cache
def _parameter_schemas(atom: str) -> dict[str, JsonObject]:
    properties = ATOMS[atom].call.model_json_schema()["properties"]
    return {name: schema for name, schema in properties.items() if name != "atom"}


def _is_optional(schema: JsonObject) -> bool:
    return {"type": "null"} in _alternatives(schema)


def _alternatives(schema: JsonObject) -> list[JsonObject]:
    """What a parameter may be: a number or null, for a number that may be left out."""
    choices = schema.get("anyOf", [schema])
    assert isinstance(choices, list)
    return [choice for choice in choices if isinstance(choice, dict)]


def _bounds(schema: JsonObject) -> tuple[float, float, bool] | None:
    schema = _alternatives(schema)[0]
    low, high = schema.get("minimum"), schema.get("maximum")
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return None
    return low, high, schema.get("type") == "integer"


_CENTRALITY, _REDUNDANCY = "spatial_centrality_prior", "redundancy_density_penalty"

_NO_YES = ("no", "yes")
_WEIGHTS = (0.05, 1.0)
"""Range of a signal's weight; the fusion divides weights by their sum."""

_STRENGTH_OF_SEVERAL = 0.003
"""Largest residual strength where q_e is 2 or more."""


@dataclass(frozen=True, slots=True)
class ReleasedSpace:
    """What is searched of the released policy; its other parts stay as they are.

    ``ranges`` hold inclusive bounds of numbers, ``fixed`` numbers that differ from the released
    ones. ``signals`` are those of the policy, any of them with any weights, or a single one. r_min
    is K - q_e throughout, because a larger one is the same policy as a smaller q_e.
    """

    ranges: Mapping[str, tuple[float, float]]
    signals: Literal["fixed", "any", "single"]
    fixed: dict[str, float] = field(default_factory=dict)


_NUMBERS = {
    "q_e": (0, 3),
    "lam": (0.04, 0.22),
    "keep_weight": (0.1, 0.8),
    "power": (0.7, 1.5),
    "strength": (0.0, 0.006),
}
_BIAS = {"bias": (0.35, 0.95)}
_LAM, _KEEP_WEIGHT, _POWER = (
    {"lam": (0.05, 0.5)},
    {"keep_weight": (0.0, 0.6)},
    {"power": (0.5, 1.8)},
)

SPACES: Mapping[Space, ReleasedSpace] = {
    "numbers": ReleasedSpace(_NUMBERS, "fixed"),
    "released": ReleasedSpace(_NUMBERS | _BIAS, "any"),
    "without-diversity": ReleasedSpace(_BIAS | _KEEP_WEIGHT | _POWER, "any", {"lam": 0.0}),
    "without-fusion": ReleasedSpace(_BIAS | _LAM | _KEEP_WEIGHT | _POWER, "single"),
    "without-anchoring": ReleasedSpace(
        _BIAS | _LAM | _POWER, "any", {"q_e": MAX_QUOTA, "keep_weight": 0.0}
    ),
}


@cache
def released_policy() -> PruningState:
    """The state `autoprune`."""
    return load_state("autoprune")


def draw_components(source: ChoiceSource, space: Space) -> JsonObject:
    """The components of a state of a space."""
    searched, released = SPACES[space], Components.from_state(released_policy())
    calls = released.constraints.selector, released.reassembly
    numbers = dict(calls[0]) | dict(calls[1]) | searched.fixed
    for name, (low, high) in searched.ranges.items():
        if name != "bias":
            integer = name == "q_e"
            number = source.number(name, low, high, integer)
            numbers[name] = int(number) if integer else number
    if numbers["q_e"] >= 2:
        numbers["strength"] = min(numbers["strength"], _STRENGTH_OF_SEVERAL)
    selector, reassembly = (
        call.model_copy(update={n: v for n, v in numbers.items() if n in call.parameters()})
        for call in calls
    )
    signals = _draw_signals(source, searched, released.scoring.signals)
    changed = released.with_scoring(signals=signals).with_constraints(selector=selector)
    return changed.model_copy(update={"reassembly": reassembly}).to_json()


def _draw_signals(
    source: ChoiceSource, searched: ReleasedSpace, signals: Sequence[AtomCall]
) -> tuple[AtomCall, ...]:
    if searched.signals == "fixed":
        return tuple(signals)
    drawn: list[AtomCall] = []
    single = searched.signals == "single"
    if single:
        names = [s.atom for s in signals if s.atom != _REDUNDANCY]
        used = {source.option("signal", names)}
    else:
        used = {s.atom for s in signals if source.option(f"with {s.atom}", _NO_YES) == "yes"}
    for signal in signals:
        if signal.atom not in (used or {signals[0].atom}):
            continue
        weight = 1.0 if single else source.number(f"{signal.atom}.weight", *_WEIGHTS, False)
        update = {"weight": weight}
        if signal.atom == _CENTRALITY:
            update["bias"] = source.number("bias", *searched.ranges["bias"], False)
        drawn.append(signal.model_copy(update=update))
    return tuple(drawn)


def choices_in_spaces(state: PruningState) -> dict[str, Choice]:
    """The choices for which :func:`draw_components` gives the state nearest to any state.

    What this lacks is that of the released policy.
    """
    released = released_policy()
    known = [signal.atom for signal in released.scoring.signals]
    signals = [signal for signal in state.scoring.signals if signal.atom in known]
    signals = signals or list(released.scoring.signals)
    choices: dict[str, Choice] = {
        f"with {name}": "yes" if name in {signal.atom for signal in signals} else "no"
        for name in known
    }
    choices |= {f"{signal.atom}.weight": signal.weight for signal in signals}
    choices["signal"] = max(signals, key=lambda s: (s.atom != _REDUNDANCY, s.weight)).atom
    for part in (released, state):
        centrality = [s for s in part.scoring.signals if s.atom == _CENTRALITY]
        for call in (*centrality, part.reassembly, part.constraints.selector):
            # Not a dump, which leaves defaults out.
            numbers = {name: value for name, value in call if name in _NUMBERS | _BIAS}
            choices |= {name: value for name, value in numbers.items() if value is not None}
    return choices


def project(state: PruningState, space: Space) -> JsonObject:
    """Components of the nearest state of a space: fixed parts overwritten, numbers clipped."""
    return draw_components(_ClippingSource(choices_in_spaces(state)), space)


class _ClippingSource:
    """Choices that are known: clipped to their range, the lowest or foremost where unknown."""

    def __init__(self, choices: Mapping[str, Choice]) -> None:
        self._choices = choices

    def option(self, name: str, options: Sequence[str]) -> str:
        """The known option, if it is offered."""
        value = str(self._choices.get(name))
        return value if value in options else options[0]

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """The known number within its range."""
        value = min(high, max(low, float(self._choices.get(name, low))))
        return round(value) if integer else value


def describe_space(space: Space) -> str:
    """What is searched, as a sentence of a prompt; empty for the whole language."""
    if space == "all":
        return ""
    searched = SPACES[space]
    parts = [f"{name} {low:g} to {high:g}" for name, (low, high) in searched.ranges.items()]
    parts += {"fixed": [], "any": ["signals and their weights"], "single": ["the one signal"]}[
        searched.signals
    ]
    return f"Only these are yours to choose, the rest is overwritten: {', '.join(parts)}. "
