"""Results of the searches of a comparison and of their winners' confirmation, by name.

A ledger takes hundreds of kilobytes, a result two: those of published tables are in the repository.
A search whose result is known is not run again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from pydantic import Field, JsonValue, TypeAdapter

from offline_search.components import Candidate, SelectionProgram
from offline_search.ledger import read_ledger
from offline_search.report import read_report
from offline_search.settings import Settings, Space
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.tpdsl.loading import load_state

RESULTS, CONFIRMATION = "results.jsonl", "confirmation.json"

BASE = "base policy"
"""Name of the base policy alone among what was confirmed."""

CURVE_SHARES = (0.1, 0.2, 0.4, 1.0)
"""Shares of all answers after which the best objective on the search split is kept."""


class Winner(FrozenModel):
    """The winner of a search, with its scores on the test split; either a state or a program."""

    digest: str
    objective: float
    gain: float = Field(description="objective less the base policy's")
    accuracy: float
    state: dict[str, JsonValue] | None = None
    program: str = ""

    def load(self) -> Candidate:
        """The state or program."""
        if self.state is None:
            return SelectionProgram(self.program)
        return load_state(json.dumps(self.state))


class _SearchResult(FrozenModel):
    """One search that has ended; without a winner where it gave up before anything was measured."""

    name: str
    settings: Settings
    candidates: int
    invalid: int = Field(description="candidates that were invalid or unsafe")
    replies: int = Field(description="replies of the language model")
    answers: int
    curve: tuple[float | None, ...]
    winner: Winner | None


def search_name(arm: str, seed: int) -> str:
    """Name of one search of a comparison, and of its ledger."""
    return f"{arm}-{seed}"


def space_of(arm: str) -> Space:
    """The space of an arm: the whole language unless its name ends in another, as ``@numbers``."""
    return next((space for space in get_args(Space) if arm.endswith(f"@{space}")), "all")


def read_results(folder: Path) -> dict[str, _SearchResult]:
    """Results of the searches that have ended, by their names."""
    path = folder / RESULTS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {result.name: result for result in map(_SearchResult.model_validate_json, lines)}


def results_of(
    results: Mapping[str, _SearchResult], arm: str, seeds: Sequence[int]
) -> dict[int, _SearchResult]:
    """Results of one arm, by seed."""
    names = {seed: search_name(arm, seed) for seed in seeds}
    return {seed: results[name] for seed, name in names.items() if name in results}


def add_result(folder: Path, arm: str, seed: int) -> None:
    """Add the result of a search whose ledger is complete."""
    name = search_name(arm, seed)
    report = read_report(read_ledger(folder / f"{name}.jsonl"))
    answers = report.rows[-1].spent if report.rows else 0
    reached = [
        [best for spent, best in report.curve() if spent <= share * answers]
        for share in CURVE_SHARES
    ]
    winner, record = None, report.winner
    if record is not None:
        winner = Winner(
            digest=record.digest,
            objective=record.test.objective.value,
            gain=record.test.gain.value,
            accuracy=record.test.accuracy,
            # Without the provenance, which has the scores again.
            state=record.state and {k: v for k, v in record.state.items() if k != "provenance"},
            program=record.program,
        )
    result = _SearchResult(
        name=name,
        settings=report.settings,
        candidates=len(report.rows),
        invalid=report.statuses.get("invalid", 0) + report.statuses.get("unsafe", 0),
        replies=len(report.replies),
        answers=answers,
        curve=tuple(bests[-1] if bests else None for bests in reached),
        winner=winner,
    )
    results = {**read_results(folder), name: result}
    lines = [results[key].model_dump_json() for key in sorted(results)]
    temporary = folder / f".{RESULTS}"
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(folder / RESULTS)


class Confirmed(FrozenModel):
    """One winner or state: mean objective over its budgets, and accuracy."""

    questions: int
    evaluator: str
    digest: str
    objective: float
    accuracy: float
    blocks: tuple[float, ...] = Field(
        default=(),
        exclude_if=lambda blocks: not blocks,
        description="mean objective of each of several equal blocks of the questions",
    )


_CONFIRMED: TypeAdapter[dict[str, Confirmed]] = TypeAdapter(dict[str, Confirmed])


def read_confirmation(folder: Path) -> dict[str, Confirmed]:
    """What was measured so far, by name of the search."""
    path = folder / CONFIRMATION
    return _CONFIRMED.validate_json(path.read_bytes()) if path.exists() else {}


def write_confirmation(folder: Path, confirmed: Mapping[str, Confirmed]) -> None:
    """Write all that was measured so far."""
    (folder / CONFIRMATION).write_bytes(_CONFIRMED.dump_json(dict(confirmed), indent=1))
