"""Search space of proposals as a sequence of named choices, made at random or by a sampler.

Options and ranges come from the atom registry, so new atoms are searched without changes here. The
smaller spaces search some parts of the released policy (`autoprune`): ``numbers`` is the space that
AutoPrune's authors searched, ``released`` the same with signals and weights free, and each ablation
of theirs is a search in a space of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Literal, Protocol, get_args

from pydantic import JsonValue

from offline_search.components import (
    BASE,
    CORE,
    RANK_AT,
    JsonObject,
    components_json,
    structure,
)
from offline_search.settings import MAX_QUOTA, Settings, Space
from vllm_autoprune.tpdsl.atoms.pools import JoinedPool, PartitionCall
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.reference import CORE_POLICIES
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall, Group
from vllm_autoprune.tpdsl.state import Core, PruningState
from vllm_autoprune.tpdsl.tokens import RankAt

# Not searched: guards against division by zero, a bound that follows from q_e, and a weight that
# changes no pick.
_FIXED_PARAMETERS = ("eps", "r_min", "iters", "keep_weight")

_NO_YES = ("no", "yes")

_STEP_WIDTH = 0.2
"""Standard deviation of the change of a number, as a share of the parameter's range."""

_Bounds = tuple[float, float, bool]
"""Inclusive bounds of a number, and whether it is an integer."""

Choice = float | str


class ChoiceSource(Protocol):
    """Makes named choices; one name always has the same options or range."""

    def option(self, name: str, options: Sequence[str]) -> str:
        """One of several options."""

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """A number between two inclusive bounds."""


@dataclass(frozen=True, slots=True)
class RandomSource:
    """Choices of one or several parents, some of them changed; uniform where no parent has one.

    With the probability ``rate`` an option is changed to any, and with twice that a number by a
    normally distributed step within its range.
    """

    rng: Random
    parents: Sequence[Mapping[str, Choice]] = ()
    rate: float = 0.0

    def option(self, name: str, options: Sequence[str]) -> str:
        """The option of a parent, or any."""
        value = self._inherit(name)
        if value is None or self.rng.random() < self.rate:
            return self.rng.choice(options)
        return str(value)

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """The number of a parent or one near it, or any of its range."""
        value = self._inherit(name)
        if value is None and integer:
            return self.rng.randint(round(low), round(high))
        if value is None:
            return round(self.rng.uniform(low, high), 4)
        if self.rng.random() >= 2 * self.rate:
            return float(value)
        changed = min(
            high, max(low, float(value) + self.rng.gauss(0, _STEP_WIDTH * (high - low)))
        )
        return round(changed) if integer else round(changed, 4)

    def _inherit(self, name: str) -> Choice | None:
        choices = [parent[name] for parent in self.parents if name in parent]
        return self.rng.choice(choices) if choices else None


def sample_proposal(source: ChoiceSource, settings: Settings) -> JsonObject:
    """A complete proposal: every atom and parameter of the search's space chosen.

    Core, place of ranking and base policy come last, so that all other choices are as without.
    """
    if settings.space == "all":
        proposal = _draw_components(source, settings)
    else:
        proposal = _draw_released(source, settings.space)
    if settings.core and source.option("with core", _NO_YES) == "yes":
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
    """The choices for which :func:`sample_proposal` gives the proposal nearest to a state."""
    if settings.space == "all":
        choices = _choices_of_components(state, settings)
    else:
        choices = _choices_of_released(state)
    if settings.core:
        choices["with core"] = _NO_YES[state.core is not None]
    if settings.core and state.core is not None:
        choices["core.policy"] = state.core.policy.name
        numbers = state.core.model_dump(include=set(_core_bounds()))
        choices |= {f"core.{name}": number for name, number in numbers.items()}
    if settings.bases:
        choices[BASE] = state.base_policy.name
    return choices | {RANK_AT: state.rank_at} if settings.rank_at else choices


def _draw_components(source: ChoiceSource, settings: Settings) -> JsonObject:
    """Components from the whole language, q_e among powers of two."""

    def call(atom: str) -> JsonObject:
        values: JsonObject = {"atom": atom}
        for name, schema in _searched_parameters(atom).items():
            choice = f"{atom}.{name}"
            if _is_optional(schema) and source.option(f"{choice} set", _NO_YES) == "no":
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
        return source.option(f"with {atom}", _NO_YES) == "yes"

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

    A union of pools stands for its first source; partitions and repeated signals have no choice.
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
        f"with {name}": _NO_YES[name in listed] for name in optional
    }
    choices |= {group: call.atom for group, call in groups.items()}
    for call in (*listed.values(), *groups.values()):
        values = dict(call)  # with defaults that a dump leaves out
        for name, schema in _searched_parameters(call.atom).items():
            choice = f"{call.atom}.{name}"
            value = values[name]
            if _is_optional(schema):
                choices[f"{choice} set"] = _NO_YES[value is not None]
            if name == "q_e":
                options = _quota_options(settings.source_budget)
                choices[choice] = min(options, key=lambda q: abs(int(q) - value))
            elif value is not None:
                choices[choice] = (
                    str(value).lower() if isinstance(value, bool) else value
                )
    return choices


def _quota_options(budget: int) -> list[str]:
    """Searched values of q_e: zero, powers of two, and K, at most what the language allows."""
    maximum = min(budget, MAX_QUOTA)
    powers = [2**exponent for exponent in range(10)]
    return [*map(str, (0, *(power for power in powers if power < maximum), maximum))]


def excluded_atoms(settings: Settings) -> frozenset[str]:
    """Atoms that a language model is not offered."""
    if settings.space != "all":
        return frozenset(ATOMS.names()) - set(structure(_released_policy()))
    return frozenset(name for name in ATOMS.names() if not _is_offered(name, settings))


def atom_names(group: Group, settings: Settings) -> list[str]:
    """Atoms of a group that a search of any state varies, in registry order."""
    return [name for name in ATOMS.names(group) if _is_offered(name, settings)]


def _is_offered(name: str, settings: Settings) -> bool:
    atom = ATOMS[name]
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
    """Bounds of the numbers of a core."""
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
    """What a parameter may be: a number or null, for a number that may be left out."""
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


_CENTRALITY = "spatial_centrality_prior"
_REDUNDANCY = "redundancy_density_penalty"

_WEIGHTS = (0.05, 1.0)
"""Range of a signal's weight; the fusion divides weights by their sum."""

_STRENGTH_OF_SEVERAL = 0.003
"""Largest residual strength where q_e is 2 or more."""


@dataclass(frozen=True, slots=True)
class _ReleasedSpace:
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
_LAM = {"lam": (0.05, 0.5)}
_POWER = {"power": (0.5, 1.8)}
_KEEP_WEIGHT = {"keep_weight": (0.0, 0.6)}

_SPACES: Mapping[Space, _ReleasedSpace] = {
    "numbers": _ReleasedSpace(_NUMBERS, "fixed"),
    "released": _ReleasedSpace(_NUMBERS | _BIAS, "any"),
    "without-diversity": _ReleasedSpace(
        _BIAS | _KEEP_WEIGHT | _POWER, "any", {"lam": 0.0}
    ),
    "without-fusion": _ReleasedSpace(_BIAS | _LAM | _KEEP_WEIGHT | _POWER, "single"),
    "without-anchoring": _ReleasedSpace(
        _BIAS | _LAM | _POWER, "any", {"q_e": MAX_QUOTA, "keep_weight": 0.0}
    ),
}


@cache
def _released_policy() -> PruningState:
    return load_state("autoprune")


def _draw_released(source: ChoiceSource, space: Space) -> JsonObject:
    """The components of a state of a smaller space."""
    searched = _SPACES[space]
    released = _released_policy()
    calls = released.constraints.selector, released.reassembly
    numbers = dict(calls[0]) | dict(calls[1]) | searched.fixed
    for name, (low, high) in searched.ranges.items():
        if name != "bias":
            number = source.number(name, low, high, name == "q_e")
            numbers[name] = int(number) if name == "q_e" else number
    if numbers["q_e"] >= 2:
        numbers["strength"] = min(numbers["strength"], _STRENGTH_OF_SEVERAL)
    selector, reassembly = (
        call.model_copy(
            update={n: v for n, v in numbers.items() if n in call.parameters()}
        )
        for call in calls
    )
    signals: Sequence[AtomCall] = released.scoring.signals
    if searched.signals != "fixed":
        single = searched.signals == "single"
        if single:
            names = [signal.atom for signal in signals if signal.atom != _REDUNDANCY]
            used = [source.option("signal", names)]
        else:
            names = [signal.atom for signal in signals]
            used = [
                n for n in names if source.option(f"with {n}", _NO_YES) == "yes"
            ] or names[:1]
        drawn: list[AtomCall] = []
        for signal in signals:
            if signal.atom not in used:
                continue
            weight = (
                1.0
                if single
                else source.number(f"{signal.atom}.weight", *_WEIGHTS, False)
            )
            update = {"weight": weight}
            if signal.atom == _CENTRALITY:
                update["bias"] = source.number("bias", *searched.ranges["bias"], False)
            drawn.append(signal.model_copy(update=update))
        signals = drawn
    parts = {
        "scoring": released.scoring.model_copy(update={"signals": tuple(signals)}),
        "constraints": released.constraints.model_copy(update={"selector": selector}),
        "reassembly": reassembly,
    }
    return components_json(released.model_copy(update=parts))


def _choices_of_released(state: PruningState) -> dict[str, Choice]:
    """The choices for which :func:`_draw_released` gives the state nearest to any state.

    What this lacks is that of the released policy.
    """
    released = _released_policy()
    names = [signal.atom for signal in released.scoring.signals]
    signals = [signal for signal in state.scoring.signals if signal.atom in names]
    signals = signals or list(released.scoring.signals)
    used = {signal.atom for signal in signals}
    choices: dict[str, Choice] = {
        f"with {name}": _NO_YES[name in used] for name in names
    }
    choices |= {f"{signal.atom}.weight": signal.weight for signal in signals}
    choices["signal"] = max(
        signals, key=lambda s: (s.atom != _REDUNDANCY, s.weight)
    ).atom
    for part in (released, state):
        centrality = [s for s in part.scoring.signals if s.atom == _CENTRALITY]
        for call in (*centrality, part.reassembly, part.constraints.selector):
            # Not a dump, which leaves defaults out.
            numbers = {name: value for name, value in call if name in _NUMBERS | _BIAS}
            choices |= {
                name: value for name, value in numbers.items() if value is not None
            }
    return choices


def project(state: PruningState, space: Space) -> JsonObject:
    """Components of the nearest state of a space: fixed parts overwritten, numbers clipped."""
    return _draw_released(ClippedChoices(_choices_of_released(state)), space)


class ClippedChoices:
    """Choices that are known, clipped to their range; elsewhere the first option, or the middle."""

    def __init__(self, choices: Mapping[str, Choice]) -> None:
        self._choices = choices

    def option(self, name: str, options: Sequence[str]) -> str:
        """The known option."""
        value = str(self._choices.get(name))
        return value if value in options else options[0]

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """The nearest number of the range."""
        value = min(high, max(low, float(self._choices.get(name, (low + high) / 2))))
        return round(value) if integer else value


def describe_space(space: Space) -> str:
    """What is searched, as a sentence of a prompt; empty for the whole language."""
    if space == "all":
        return ""
    searched = _SPACES[space]
    parts = [
        f"{name} {low:g} to {high:g}" for name, (low, high) in searched.ranges.items()
    ]
    parts += {
        "fixed": [],
        "any": ["signals and their weights"],
        "single": ["the one signal"],
    }[searched.signals]
    return (
        f"Only these are yours to choose, the rest is overwritten: {', '.join(parts)}. "
    )
