"""Smaller spaces of a search: the released policy (`autoprune`) with some of its parts searched.

``numbers`` is the space that AutoPrune's authors searched, ``released`` the same with signals and
weights free, and each ablation of theirs is a search in a space of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from offline_search.candidates.components import Choice, ChoiceSource, Components, JsonObject
from offline_search.settings import MAX_QUOTA, Space
from vllm_autoprune.tpdsl.registry import AtomCall
from vllm_autoprune.tpdsl.states.load import load_state
from vllm_autoprune.tpdsl.states.state import PruningState

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
