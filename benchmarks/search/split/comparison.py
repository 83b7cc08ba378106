"""The winners on the test split: accuracy, and paired differences with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from pydantic import JsonValue

from benchmarks.common.report import Table
from benchmarks.search.split.candidates import describe, family_of
from offline_search.evaluation.answers import Answers
from vllm_autoprune import PruningState, materialize
from vllm_autoprune.statistics import ClusterBootstrap, Estimate, Floats, estimate, verdict_of


@dataclass(frozen=True)
class Entrant:
    """A state that is compared: its label, and its answers by K."""

    label: str
    state: PruningState
    answers: Mapping[int, Answers]


@dataclass(frozen=True)
class Row:
    """One state at one K; differences in points of accuracy to the other rows, by label."""

    label: str
    family: str
    budget: int
    core: int
    state: PruningState
    accuracy: Estimate
    logprob: Estimate
    differences: Mapping[str, Estimate]

    def as_json(self) -> dict[str, JsonValue]:
        """The row with the whole state."""
        return {
            "label": self.label,
            "family": self.family,
            "budget": self.budget,
            "core": self.core,
            "state": self.state.model_dump(mode="json", exclude={"provenance"}),
            "accuracy": asdict(self.accuracy),
            "logprob": asdict(self.logprob),
            "differences": {name: asdict(one) for name, one in self.differences.items()},
        }


def compare(entrants: Sequence[Entrant], budget: int, images: Sequence[str]) -> list[Row]:
    """The rows at K, paired by question and resampled by image."""
    bootstrap = ClusterBootstrap(images)
    present = [one for one in entrants if budget in one.answers]
    right = {one.label: _percent_right(one.answers[budget]) for one in present}
    return [
        Row(
            label=one.label,
            family=family_of(one.state, budget),
            budget=budget,
            core=materialize(one.state, budget).core,
            state=one.state,
            accuracy=estimate(bootstrap.mean(right[one.label])).rounded(2),
            logprob=estimate(bootstrap.mean(one.answers[budget].logprob)).rounded(4),
            differences={
                other: estimate(bootstrap.mean(right[one.label] - right[other])).rounded(2)
                for other in right
                if other != one.label
            },
        )
        for one in present
    ]


def _percent_right(answers: Answers) -> Floats:
    return 100 * np.asarray(answers.right, dtype=np.float64)


def tables(rows: Sequence[Row], references: Sequence[str]) -> Iterator[Table]:
    """One table for each K; ``references`` are the labels that every row is compared with."""
    for budget in dict.fromkeys(row.budget for row in rows):
        columns = ["", "kind", "K_c", "% right (95 %)", *(f"less {name}" for name in references)]
        cells = [
            [
                row.label,
                row.family,
                str(row.core),
                _interval(row.accuracy, ""),
                *(_difference(row, name) for name in references),
            ]
            for row in rows
            if row.budget == budget
        ]
        align = "llr" + "r" * (len(columns) - 3)
        yield Table(f"K = {budget}", columns, cells, align)


def verdicts(rows: Sequence[Row]) -> Table:
    """By K, whether the best state with a core is worse than the others by more than chance."""
    cells = []
    for row in rows:
        if row.label == "best split":
            for other in ("best unsplit", "best question-free"):
                gap = row.differences[other]
                cells.append(
                    [str(row.budget), other, _interval(gap, "+"), verdict_of(gap.high >= 0)]
                )
    columns = ("K", "best split less", "points (95 %)", "not worse than the interval allows")
    return Table("Promise: the best split is as good", columns, cells, "rlrl")


def winners(rows: Sequence[Row]) -> Table:
    """What each row keeps and how."""
    cells = [[str(row.budget), row.label, describe(row.state)] for row in rows]
    return Table("The states", ("K", "", "state"), cells, "rll")


def _difference(row: Row, name: str) -> str:
    return _interval(row.differences[name], "+") if name in row.differences else "-"


def _interval(figure: Estimate, sign: str) -> str:
    return f"{figure.value:{sign}.1f} ({figure.low:{sign}.1f} to {figure.high:{sign}.1f})"
