"""Results of the searches of a comparison and of their winners' confirmation, by name.

A ledger takes hundreds of kilobytes, a result two: those of published
tables are in the repository. A search whose result is known is not run again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field, JsonValue, TypeAdapter

from offline_search.components import Candidate, SelectionProgram
from offline_search.ledger import WinnerRecord, read_ledger
from offline_search.report import SearchReport, read_report
from offline_search.settings import Settings
from vllm_autoprune.errors import SearchError
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.tpdsl.loading import load_state

FILE, CONFIRMATION = "results.jsonl", "confirmation.json"

BASE = "base policy"
"""Name of the base policy alone among what was confirmed."""

_SCORES = "provenance"
"""Part of a winner's state that results leave out, because they have its scores themselves."""

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


class SearchResult(FrozenModel):
    """One search that has ended; without a winner where it gave up before anything was measured."""

    name: str
    settings: Settings
    candidates: int
    invalid: int = Field(description="candidates that were invalid or unsafe")
    replies: int = Field(description="replies of the language model")
    answers: int
    curve: tuple[float | None, ...]
    winner: Winner | None


def require_model(result: SearchResult, evaluator: str) -> None:
    """Raise :class:`SearchError` if a search was measured on another model than ``evaluator``.

    The name of an evaluator is that of its model, then that of its data.
    """
    searched, given = (
        name.partition(", data ")[0] for name in (result.settings.evaluator, evaluator)
    )
    if searched != given:
        raise SearchError(
            f"{result.name} was measured on {searched}, not on {given} -> give its model with "
            "--yardstick and --checkpoint"
        )


def search_name(strategy: str, seed: int) -> str:
    """Name of one search of a comparison."""
    return f"{strategy}-{seed}"


def ledger_path(folder: Path, strategy: str, seed: int) -> Path:
    """Ledger of one search of a comparison."""
    return folder / f"{search_name(strategy, seed)}.jsonl"


def read_results(folder: Path) -> dict[str, SearchResult]:
    """Results of the searches that have ended, by their names."""
    path = folder / FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    results = map(SearchResult.model_validate_json, lines)
    return {result.name: result for result in results}


def results_of(
    results: dict[str, SearchResult], strategy: str, seeds: Sequence[int]
) -> dict[int, SearchResult]:
    """Results of one strategy, by seed."""
    names = {seed: search_name(strategy, seed) for seed in seeds}
    return {seed: results[name] for seed, name in names.items() if name in results}


def has_ended(folder: Path, strategy: str, seed: int, settings: Settings) -> bool:
    """Whether the result of a search is known; raises :class:`SearchError` for other settings."""
    known = read_results(folder).get(search_name(strategy, seed))
    if known is not None and known.settings != settings:
        raise SearchError(
            f"{folder / FILE}: {search_name(strategy, seed)} has other settings -> give the same "
            "settings again, or another folder"
        )
    return known is not None


def add_result(folder: Path, strategy: str, seed: int) -> None:
    """Add the result of a search whose ledger is complete."""
    name = search_name(strategy, seed)
    report = read_report(read_ledger(ledger_path(folder, strategy, seed)))
    results = {**read_results(folder), name: _summarize(name, report)}
    lines = [results[key].model_dump_json() for key in sorted(results)]
    temporary = folder / f".{FILE}"
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(folder / FILE)


def _summarize(name: str, report: SearchReport) -> SearchResult:
    answers = report.rows[-1].spent if report.rows else 0
    return SearchResult(
        name=name,
        settings=report.settings,
        candidates=len(report.rows),
        invalid=report.statuses.get("invalid", 0) + report.statuses.get("unsafe", 0),
        replies=report.cost.replies,
        answers=answers,
        curve=tuple(_best_after(report, share * answers) for share in CURVE_SHARES),
        winner=None if report.winner is None else _summarize_winner(report.winner),
    )


def _summarize_winner(winner: WinnerRecord) -> Winner:
    state = winner.state and {name: winner.state[name] for name in winner.state if name != _SCORES}
    return Winner(
        digest=winner.digest,
        objective=winner.test.objective.value,
        gain=winner.test.gain.value,
        accuracy=winner.test.accuracy,
        state=state,
        program=winner.program,
    )


def _best_after(report: SearchReport, answers: float) -> float | None:
    """Best objective after a number of answers."""
    values = [value for spent, value in report.curve() if spent <= answers]
    return values[-1] if values else None


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
