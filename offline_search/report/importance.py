"""Parameter importance: the share of the objectives' variance that each parameter explains."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from pydantic import JsonValue

from offline_search.report.search_report import CandidateRow
from vllm_autoprune.statistics import Floats

MIN_CANDIDATES = 10
"""Candidates with an objective below which no importance is computed."""
_BINS = 4
"""Groups, of about equal size, into which the values of a number are sorted."""
_SHOWN = 12
_ABSENT, _PRESENT = "absent", "present"
_INFREQUENT = 2
"""Groups of fewer candidates than this say nothing about a value."""


@dataclass(frozen=True)
class ParameterImportance:
    """One parameter: its share of variance, its values, and the best of them."""

    name: str
    share: float
    values: int
    best: str
    best_mean: float
    best_count: int


def rank_parameters(rows: Sequence[CandidateRow]) -> list[ParameterImportance]:
    """Parameters by adjusted R squared of a one-way analysis of variance, highest first.

    Numbers are grouped by quartiles, atoms by name, and an atom that a state lacks is a value too.
    Parameters whose share is not above what chance gives are left out.
    """
    measured = [(row, row.result.objective) for row in rows if row.result.objective is not None]
    if len(measured) < MIN_CANDIDATES:
        return []
    parameters = [dict(_list_parameters(row.components or {})) for row, _ in measured]
    objectives = [objective for _, objective in measured]
    ranked = []
    for name in sorted({name for own in parameters for name in own}):
        importance = _measure(name, [own.get(name) for own in parameters], objectives)
        if importance is not None and importance.share > 0:
            ranked.append(importance)
    return sorted(ranked, key=lambda one: (-one.share, one.name))[:_SHOWN]


def _measure(
    name: str, values: Sequence[JsonValue], objectives: Sequence[float]
) -> ParameterImportance | None:
    groups: dict[str, list[float]] = {}
    for label, objective in zip(_label_values(values), objectives, strict=True):
        groups.setdefault(label, []).append(objective)
    present = groups.keys() - {_ABSENT}
    if len(present) == 1 and present != {_PRESENT}:
        return None  # it tells the same as the presence of its atom
    total = float(np.var(objectives) * len(objectives))
    if len(groups) < 2 or len(objectives) <= len(groups) or max(objectives) == min(objectives):
        return None
    within = sum(float(np.var(own) * len(own)) for own in groups.values())
    free = len(objectives) - len(groups)
    share = 1 - (within / free) / (total / (len(objectives) - 1))
    frequent = {label: own for label, own in groups.items() if len(own) >= _INFREQUENT}
    if not frequent:
        return None
    best = max(frequent, key=lambda label: (float(np.mean(groups[label])), label))
    mean = round(float(np.mean(groups[best])), 6)
    return ParameterImportance(name, round(share, 6), len(groups), best, mean, len(groups[best]))


def _label_values(values: Sequence[JsonValue]) -> list[str]:
    """Numbers of more than a few different values by their quarter, anything else by itself."""
    numbers = sorted({float(v) for v in values if _is_number(v)})
    if len(numbers) <= _BINS:
        return [_ABSENT if value is None else _label(value) for value in values]
    every = np.array(sorted(float(v) for v in values if _is_number(v)))
    edges = np.unique(np.quantile(every, np.linspace(0, 1, _BINS + 1), method="nearest"))
    return [_label_bin(float(value), edges) if _is_number(value) else _ABSENT for value in values]


def _label_bin(value: float, edges: Floats) -> str:
    place = min(int(np.searchsorted(edges, value, side="left")), len(edges) - 1)
    low, high = edges[max(place - 1, 0)], edges[max(place, 1)]
    return f"{low:.3g} to {high:.3g}"


def _label(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _is_number(value: JsonValue) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _list_parameters(
    components: Mapping[str, JsonValue], prefix: str = ""
) -> Iterator[tuple[str, JsonValue]]:
    """Names and values of everything that a state chooses, nested fields joined by dots."""
    for name, value in components.items():
        path = f"{prefix}{name}"
        if isinstance(value, list):
            for item in value:
                if isinstance(item, dict) and isinstance(atom := item.get("atom"), str):
                    yield f"{path}: {atom}", _PRESENT
                    rest = {key: each for key, each in item.items() if key != "atom"}
                    yield from _list_parameters(rest, f"{atom}.")
        elif isinstance(value, dict):
            if isinstance(atom := value.get("atom"), str):
                yield path, atom
                rest = {key: each for key, each in value.items() if key != "atom"}
                yield from _list_parameters(rest, f"{atom}.")
            else:
                yield from _list_parameters(value, f"{path}.")
        elif value is not None:
            yield path, value
