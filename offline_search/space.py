"""The space of proposals as a sequence of choices, made by dice or by a sampler.

Knows nothing about who chooses, nor about any single atom: choices come from the registry, so an
atom that is declared tomorrow is drawn tomorrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Protocol

from pydantic import JsonValue

from offline_search.proposal import COMPONENTS, JsonObject
from vllm_autoprune.tpdsl.atoms.partitions import PartitionCall
from vllm_autoprune.tpdsl.registry import ATOMS, Group
from vllm_autoprune.tpdsl.states.state import PruningState

# Guards against division by zero, and a bound that follows from q_e: nothing to gain there.
_LEFT = ("eps", "r_min", "iters")


class Chooser(Protocol):
    """Makes choices; the same name always has the same options or range."""

    def option(self, name: str, options: Sequence[str]) -> str:
        """One of several words."""

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """A number between two bounds, both included."""


class Dice:
    """Choices drawn at random, each number uniform over its range."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def option(self, name: str, options: Sequence[str]) -> str:
        """Each equally likely."""
        return self._random.choice(options)

    def number(self, name: str, low: float, high: float, integer: bool) -> float:
        """Uniform; whole where asked for."""
        if integer:
            return self._random.randint(round(low), round(high))
        return round(self._random.uniform(low, high), 4)


@dataclass(frozen=True, slots=True)
class Knob:
    """A parameter that has a range; path leads to it within an alpha."""

    path: tuple[str | int, ...]
    low: float
    high: float
    integer: bool

    @property
    def name(self) -> str:
        """The path as one word."""
        return "/".join(map(str, self.path))


def composed(choose: Chooser, budget: int) -> JsonObject:
    """A whole alpha: every atom and parameter chosen, q_e on a scale of powers of two."""
    signals = [
        _call(choose, name, budget)
        for name in ATOMS.names("scoring")
        if choose.option(f"with {name}", ("no", "yes")) == "yes"
    ]
    first = ATOMS.names("scoring")[0]
    pools = _pools()
    wanted = [name for name in pools if choose.option(f"with {name}", ("no", "yes")) == "yes"]
    return {
        "scoring": {
            "signals": [*signals] or [_call(choose, first, budget)],
            "kernel": _one(choose, "similarity_kernel", budget),
            "fusion": _one(choose, "score_fusion", budget),
        },
        "constraints": {
            "pool": [_call(choose, name, budget) for name in wanted or pools[:1]],
            "selector": _one(choose, "selection_constraints", budget),
        },
        "reassembly": _one(choose, "reassembly", budget),
    }


def read_choices(state: PruningState, budget: int) -> dict[str, float | str]:
    """The choices by which :func:`composed` comes nearest to a state.

    What no choice stands for is left out: nested pools, partitions, a signal's second call.
    """
    body: JsonObject = state.model_dump(mode="json", include=set(COMPONENTS))
    scoring, constraints = body["scoring"], body["constraints"]
    assert isinstance(scoring, dict) and isinstance(constraints, dict)
    found: dict[str, float | str] = {}
    for names, held in (
        (ATOMS.names("scoring"), scoring["signals"]),
        (_pools(), constraints["pool"]),
    ):
        called = {str(_inside(call, "atom")): call for call in _listed(held)}
        found |= {f"with {name}": "yes" if name in called else "no" for name in names}
        for name in names:
            found |= _read(called[name], budget) if name in called else {}
    groups: dict[Group, JsonValue] = {
        "similarity_kernel": scoring["kernel"],
        "score_fusion": scoring["fusion"],
        "selection_constraints": constraints["selector"],
        "reassembly": body["reassembly"],
    }
    for group, call in groups.items():
        found[group] = str(_inside(call, "atom"))
        found |= _read(call, budget)
    return found


def _read(call: JsonValue, budget: int) -> dict[str, float | str]:
    """The choices that :func:`_call` would have made for one call."""
    assert isinstance(call, dict)
    atom, found = str(call["atom"]), dict[str, float | str]()
    for name, described in _parameters(atom).items():
        value = call.get(name)
        if name in _LEFT or name == "sign" or value is None:
            continue
        said = f"{atom}.{name}"
        if (quotas := _quotas(name, budget)) is not None:
            assert isinstance(value, int)
            found[said] = _nearest(quotas, value)
        elif isinstance(value, bool):
            found[said] = str(value).lower()
        elif isinstance(value, int | float | str) and (
            "enum" in described or _bounds(described) is not None
        ):
            found[said] = value
    return found


def _pools() -> list[str]:
    """Pools that stand in a row; those made of pools are what the others in a row stand for."""
    names = ATOMS.names("candidate_pool")
    return [name for name in names if not (_is_partition(name) or _is_nested(name))]


def _nearest(quotas: Sequence[str], value: float) -> str:
    return min(quotas, key=lambda quota: abs(int(quota) - value))


def _listed(value: JsonValue) -> list[JsonValue]:
    assert isinstance(value, list)
    return value


def _one(choose: Chooser, group: Group, budget: int) -> JsonObject:
    return _call(choose, choose.option(group, ATOMS.names(group)), budget)


def _call(choose: Chooser, atom: str, budget: int) -> JsonObject:
    call: JsonObject = {"atom": atom}
    for name, described in _parameters(atom).items():
        if name in _LEFT:
            continue
        said = f"{atom}.{name}"
        if (quotas := _quotas(name, budget)) is not None:
            call[name] = int(choose.option(said, quotas))
        elif isinstance(words := described.get("enum"), list) and name != "sign":
            call[name] = choose.option(said, [str(word) for word in words])
        elif described.get("type") == "boolean":
            call[name] = choose.option(said, ("false", "true")) == "true"
        elif (bounds := _bounds(described)) is not None:
            low, high, integer = bounds
            value = choose.number(said, low, high, integer)
            call[name] = int(value) if integer else value
    return call


def _quotas(name: str, budget: int) -> Sequence[str] | None:
    """Their words, where a parameter is the quota."""
    return [str(quota) for quota in quota_scale(budget)] if name == "q_e" else None


def quota_scale(budget: int) -> list[int]:
    """Values of q_e worth telling apart at a budget: none, powers of two, and all of it."""
    return [0, *(2**power for power in range(10) if 2**power < budget), budget]


def knobs(state: PruningState) -> list[Knob]:
    """Numbers of a state that a sampler may turn without changing its structure."""
    found: list[Knob] = []
    body: JsonObject = state.model_dump(mode="json", include=set(COMPONENTS))
    _search(body, (), found)
    return found


def turned(state: PruningState, choose: Chooser, budget: int) -> JsonObject:
    """The alpha of a state with all of its numbers chosen anew, and its quota."""
    body: JsonObject = state.model_dump(mode="json", include=set(COMPONENTS))
    for knob in knobs(state):
        holder: JsonValue = body
        for step in knob.path[:-1]:
            holder = _inside(holder, step)
        assert isinstance(holder, dict)
        last = str(knob.path[-1])
        quotas = _quotas(last, budget)
        if quotas is not None:
            holder[last] = int(choose.option(knob.name, quotas))
            continue
        value = choose.number(knob.name, knob.low, knob.high, knob.integer)
        holder[last] = int(value) if knob.integer else value
    return body


def read_knobs(state: PruningState, budget: int) -> dict[str, float | str]:
    """What a state itself chose, by the names that :func:`turned` asks for."""
    body: JsonValue = state.model_dump(mode="json", include=set(COMPONENTS))
    found: dict[str, float | str] = {}
    for knob in knobs(state):
        value: JsonValue = body
        for step in knob.path:
            value = _inside(value, step)
        assert isinstance(value, int | float)
        quotas = _quotas(str(knob.path[-1]), budget)
        if quotas is None:
            found[knob.name] = value
        else:
            found[knob.name] = _nearest(quotas, value)
    return found


def _inside(value: JsonValue, step: str | int) -> JsonValue:
    if isinstance(value, dict):
        return value[str(step)]
    assert isinstance(value, list) and isinstance(step, int)
    return value[step]


def _search(value: JsonValue, path: tuple[str | int, ...], found: list[Knob]) -> None:
    if isinstance(value, list):
        for index, item in enumerate(value):
            _search(item, (*path, index), found)
    elif isinstance(value, dict):
        atom = value.get("atom")
        known = _parameters(atom) if isinstance(atom, str) else {}
        for name, item in value.items():
            bounds = _bounds(known[name]) if name in known else None
            if bounds is None:
                _search(item, (*path, name), found)
            elif name not in _LEFT:
                found.append(Knob((*path, name), *bounds))


@cache
def _parameters(atom: str) -> dict[str, JsonObject]:
    properties = ATOMS[atom].call.model_json_schema()["properties"]
    return {name: described for name, described in properties.items() if name != "atom"}


def _bounds(described: JsonObject) -> tuple[float, float, bool] | None:
    low, high = described.get("minimum"), described.get("maximum")
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return None
    return low, high, described.get("type") == "integer"


def _is_partition(atom: str) -> bool:
    return issubclass(ATOMS[atom].call, PartitionCall)


def _is_nested(atom: str) -> bool:
    return any(described.get("type") == "array" for described in _parameters(atom).values())
