"""Smaller search spaces, in which only some parts of the released policy (`autoprune`) vary.

``numbers`` is the space that AutoPrune's authors searched; ``released`` also varies signals and
weights. Each of the authors' ablations is a space of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from offline_search.choices import NO_YES, Choice, ChoiceSource, ClippedChoices
from offline_search.components import (
    BASE,
    COMPONENTS,
    JsonObject,
    components_json,
    optional_components,
    structure,
)
from offline_search.settings import MAX_QUOTA, Settings, Space
from vllm_autoprune.errors import Problem
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.reference import render_language
from vllm_autoprune.tpdsl.registry import ATOMS, AtomCall
from vllm_autoprune.tpdsl.state import PruningState
from vllm_autoprune.tpdsl.transfer import list_changes

_CENTRALITY = "spatial_centrality_prior"
_REDUNDANCY = "redundancy_density_penalty"

_WEIGHTS = (0.05, 1.0)
"""Range of a signal's weight; the fusion divides weights by their sum."""

SignalChoice = Literal["fixed", "any", "single"]
"""Signals of a smaller space: the released policy's own, any of these with any weights, or one."""

_STRENGTH_OF_SEVERAL = 0.003
"""Largest residual strength if q_e is 2 or more."""


@dataclass(frozen=True, slots=True)
class _ReleasedSpace:
    """Parts of the released policy that a space varies; all other parts are as released.

    ``ranges`` has inclusive bounds of numbers, ``fixed`` has numbers that differ from the released
    ones. r_min is always K - q_e, because a larger r_min is equivalent to a smaller q_e.
    """

    ranges: Mapping[str, tuple[float, float]]
    signals: SignalChoice
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


def draw_released(source: ChoiceSource, space: Space) -> JsonObject:
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
                n for n in names if source.option(f"with {n}", NO_YES) == "yes"
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


def choices_of_released(state: PruningState) -> dict[str, Choice]:
    """The choices for which :func:`draw_released` gives the state nearest to ``state``.

    Parts that ``state`` lacks are those of the released policy.
    """
    released = _released_policy()
    names = [signal.atom for signal in released.scoring.signals]
    signals = [signal for signal in state.scoring.signals if signal.atom in names]
    signals = signals or list(released.scoring.signals)
    used = {signal.atom for signal in signals}
    choices: dict[str, Choice] = {
        f"with {name}": NO_YES[name in used] for name in names
    }
    choices |= {f"{signal.atom}.weight": signal.weight for signal in signals}
    choices["signal"] = max(
        signals, key=lambda s: (s.atom != _REDUNDANCY, s.weight)
    ).atom
    for part in (released, state):
        centrality = [s for s in part.scoring.signals if s.atom == _CENTRALITY]
        for call in (*centrality, part.reassembly, part.constraints.selector):
            # The call is iterated, because a dump would leave out defaults.
            numbers = {name: value for name, value in call if name in _NUMBERS | _BIAS}
            choices |= {
                name: value for name, value in numbers.items() if value is not None
            }
    return choices


def project(state: PruningState, space: Space) -> JsonObject:
    """Components of the nearest state of a space: fixed parts overwritten, numbers clipped."""
    return draw_released(ClippedChoices(choices_of_released(state)), space)


def released_atoms(space: Space) -> frozenset[str]:
    """Atoms that a language model is offered in a smaller space."""
    atoms = set(structure(_released_policy()))
    if _SPACES[space].signals == "single":
        atoms.discard(_REDUNDANCY)
    return frozenset(atoms)


def choice_of_signals(space: Space) -> SignalChoice:
    """Which signals a proposal of a smaller space may have."""
    return _SPACES[space].signals


def list_problems_of_space(
    state: PruningState, nearest: PruningState, settings: Settings
) -> list[Problem]:
    """Problems of a state's parts that a smaller space lacks; the fix is that of ``nearest``.

    A q_e that acts as that of ``nearest``, as one above K may, is no problem.
    """
    selector = state.constraints.selector
    other = nearest.constraints.selector
    quotas = {call.bounds(settings.source_budget)[0] for call in (selector, other)}
    if "q_e" in selector.parameters() and len(quotas) == 1:
        selector = selector.model_copy(update={"q_e": dict(other)["q_e"]})
        constraints = state.constraints.model_copy(update={"selector": selector})
        state = state.model_copy(update={"constraints": constraints})
    before, after = (
        {name: components_json(compared)[name] for name in COMPONENTS}
        for compared in (state, nearest)
    )
    problems: list[Problem] = []
    for change in list_changes(before, after):
        written = json.dumps(change.before)
        if change.kind == "removed":
            problems.append(
                Problem(change.where, f"{written} is not in this space", "leave it out")
            )
        elif change.kind != "reordered":
            what = (
                "is missing"
                if change.kind == "added"
                else f"{written} is not in this space"
            )
            problems.append(
                Problem(change.where, what, f"write {json.dumps(change.after)}")
            )
    return problems


def describe_space(settings: Settings) -> str:
    """Description of a smaller space: what is searched, its atoms, and their free numbers."""
    searched = _SPACES[settings.space]
    released = _released_policy()
    ranges = {
        name: f"{low:g} to {high:g}" for name, (low, high) in searched.ranges.items()
    }
    if "q_e" in searched.ranges:
        low, high = searched.ranges["q_e"]
        ranges["q_e"] = f"integer {low:g} to {min(high, settings.source_budget):g}"
    # Policies are printed without numbers that are the default.
    for call in (released.constraints.selector, released.reassembly):
        for name in ranges.keys() & type(call).model_fields.keys():
            default = type(call).model_fields[name].default
            low, high = searched.ranges[name]
            if default is not None and low <= default <= high:
                ranges[name] += f", by default {default:g}"
    signals = [
        call
        for call in released.scoring.signals
        if searched.signals != "single" or call.atom != _REDUNDANCY
    ]
    weight = f"{_WEIGHTS[0]:g} to {_WEIGHTS[1]:g}"
    choice = {
        "fixed": "Signals, all of them:",
        "any": f"Signals, any of them, at least one, each with a weight of {weight}, by default 1; "
        "the fusion divides weights by their sum:",
        "single": "Signals, exactly one of them; its weight is 1:",
    }[searched.signals]
    selector = released.constraints.selector
    others = (
        released.scoring.kernel,
        released.scoring.fusion,
        *released.constraints.pool,
        selector.model_copy(
            update={
                name: value
                for name, value in searched.fixed.items()
                if name in selector.parameters()
            }
        ),
        released.reassembly,
    )
    chosen = optional_components(settings)
    optional = [name for name in chosen if name != BASE]
    also = f", and {', '.join(chosen)}" if chosen else ""
    lines = [
        f"Only what is named here with a range is yours to choose{also}. All else is fixed, as "
        "in every policy that a prompt prints whole, and a policy that differs in it, leaves a "
        "range, or leaves out a number without a default is refused.",
        "",
        choice,
        "",
        *(
            _describe_released(call, ranges, searched.signals == "fixed")
            for call in signals
        ),
        "",
        "Kernel, fusion, pool, selector and reassembly:",
        "",
        *(_describe_released(call, ranges) for call in others),
    ]
    if "q_e" in searched.fixed:
        lines += ["", "A q_e above K acts as K."]
    if searched.fixed.get("lam") == 0:
        lines += ["", "Where lam is 0, power changes no pick either."]
    if "strength" in ranges:
        lines += [
            "",
            f"Where q_e is 2 or more, the reassembly's strength is at most {_STRENGTH_OF_SEVERAL}.",
        ]
    if optional:
        lines.append(render_language(optional).rstrip())
    return "\n".join(lines)


def _describe_released(
    call: AtomCall, ranges: Mapping[str, str], has_fixed_weight: bool = False
) -> str:
    """Description of an atom as the fixed parameters make it, with its free and fixed numbers."""
    untold = ("atom",) if has_fixed_weight else ("atom", "weight")
    parameters: list[str] = []
    for name, value in call:
        parameter = type(call).model_fields[name]
        # Of a number, what null would mean is not said, because it is refused.
        meaning = str(parameter.description).partition("; null:")[0]
        if name in ranges:
            parameters.append(f"{name} {ranges[name]} ({meaning})")
        elif name == "q_e" or (name not in untold and value != parameter.default):
            fixed = f"{name} is fixed at {json.dumps(value)}"
            if isinstance(value, int | float) and not isinstance(value, bool):
                fixed += f" ({meaning})"
            parameters.append(fixed)
    text = f"- {call.atom}: {ATOMS.describe(call)}"
    return f"{text} {'; '.join(parameters)}" if parameters else text
