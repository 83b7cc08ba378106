"""Statistics of the candidates of finished searches, and of searches by their proposer.

The two tables of the paper that its searches are judged by: *search stability across random seeds*
(valid, best, mean, minimum and standard deviation of a run's candidates), and *effect of different
LLM proposers*.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from offline_search.ledger import WinnerRecord, read_ledger
from offline_search.report import read_report
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.report import Table


class RunStatistics(FrozenModel):
    """Candidates of one run, by their objectives on the search split."""

    ledger: str
    strategy: str
    proposer: str
    seed: int
    unit: str
    candidates: int
    valid: int = Field(description="candidates that loaded and passed the safety check")
    measured: int = Field(
        description="of those, measured in full, or with the tokens of one that was"
    )
    best: float | None
    mean: float | None
    minimum: float | None
    deviation: float | None = Field(description="sample standard deviation")
    winner: WinnerRecord | None = Field(default=None, exclude=True)

    @classmethod
    def read(cls, path: Path) -> RunStatistics:
        """Those of a ledger; raises :class:`SearchError` for one of no search."""
        report = read_report(read_ledger(path))
        results = {trial.name: trial.result for trial in report.trials}
        # A candidate with the tokens of an earlier one has its objective.
        twins = [
            results.get(result.same_as or name) for name, result in results.items()
        ]
        scores = [twin.score for twin in twins if twin and twin.score is not None]
        settings = report.settings
        return cls(
            ledger=path.name,
            strategy=settings.strategy,
            proposer=settings.proposer or "none",
            seed=settings.seed,
            unit=settings.objective_unit,
            candidates=len(results),
            valid=sum(not result.failed for result in results.values()),
            measured=len(scores),
            best=max(scores, default=None),
            mean=statistics.mean(scores) if scores else None,
            minimum=min(scores, default=None),
            deviation=statistics.stdev(scores) if len(scores) > 1 else None,
            winner=report.winner,
        )


class ProposerStatistics(FrozenModel):
    """Runs of one proposer that have a winner: its scores on the test split, means over runs.

    Objectives of different units are not added, so that a proposer has a row for each unit.
    """

    proposer: str
    unit: str
    runs: int
    objective: float
    gain: float = Field(description="objective less the base policy's")
    accuracy: float
    mme_total: float


def summarize_proposers(runs: Sequence[RunStatistics]) -> list[ProposerStatistics]:
    """A row for each proposer and unit, in the order in which they first appear."""
    rows: list[ProposerStatistics] = []
    for name, unit in dict.fromkeys((run.proposer, run.unit) for run in runs):
        tests = [
            run.winner.test
            for run in runs
            if (run.proposer, run.unit) == (name, unit) and run.winner
        ]
        if tests:
            rows.append(
                ProposerStatistics(
                    proposer=name,
                    unit=unit,
                    runs=len(tests),
                    objective=statistics.mean(test.objective.value for test in tests),
                    gain=statistics.mean(test.gain.value for test in tests),
                    accuracy=statistics.mean(test.accuracy for test in tests),
                    mme_total=statistics.mean(test.mme_total for test in tests),
                )
            )
    return rows


def format_runs(
    runs: Sequence[RunStatistics], proposers: Sequence[ProposerStatistics]
) -> str:
    """Both tables in Markdown."""
    rows = [
        [
            run.ledger,
            run.strategy,
            run.proposer,
            str(run.seed),
            f"{run.valid} of {run.candidates}",
            str(run.measured),
            *map(_format, (run.best, run.mean, run.minimum, run.deviation)),
            run.unit,
        ]
        for run in runs
    ]
    head = ["ledger", "strategy", "proposer", "seed", "valid", "measured"]
    head += ["best", "mean", "minimum", "deviation", "unit"]
    candidates = Table("Candidates of each run", head, rows, "lllrrrrrrrl")
    rows = [
        [
            row.proposer,
            str(row.runs),
            _format(row.objective),
            _format(row.gain),
            row.unit,
            f"{100 * row.accuracy:.1f}",
            f"{row.mme_total:.2f}",
        ]
        for row in proposers
    ]
    head = ["proposer", "runs", "test objective", "gain over base"]
    head += ["unit", "accuracy %", "MME total"]
    winners = Table("Winners of each proposer", head, rows, "lrrrlrr")
    note = "Objectives of candidates are on the questions that each was asked."
    return "\n".join([candidates.markdown(), "", winners.markdown(), "", note]) + "\n"


def _format(value: float | None) -> str:
    return "" if value is None else f"{value:+.4f}"
