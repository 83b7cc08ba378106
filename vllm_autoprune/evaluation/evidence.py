"""Evidence against a state: budgets at which resizing images was measured to be better."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.evaluation.resizing import Comparison
from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.state import PruningState

_FIX = "serve smaller images at this K, or another state"


class _Lenient(BaseModel):
    """Part of a document of which the other fields do not matter here."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Row(_Lenient):
    budget: int | str
    """K, or a share of N such as "N/8" where images differ in size."""
    model: str = ""
    less_resized: Estimate | None = None


class _Scores(_Lenient):
    rows: tuple[_Row, ...] = ()


class _Case(_Lenient):
    name: str
    digest: str = ""


class _ReportRow(_Lenient):
    case: _Case


class _Report(_Lenient):
    valid: bool
    rows: tuple[_ReportRow, ...]
    resizing: tuple[Comparison, ...] = ()


def find_losses(state: PruningState) -> Iterator[Problem]:
    """Budgets at which resizing beats the state, by the scores in its own provenance."""
    try:
        scores = _Scores.model_validate(state.provenance.scores)
    except ValidationError:  # scores of another form, which say nothing about resizing
        return
    for number, row in enumerate(scores.rows):
        if row.less_resized is not None and row.less_resized.high < 0:
            where = f"/provenance/scores/rows/{number}"
            model = f" on {row.model}" if row.model else ""
            yield Problem(where, _describe(row.budget, row.less_resized, model), _FIX)


def find_reported_losses(state: PruningState, report: Path) -> Iterator[Problem]:
    """The same by a ``report.json`` of ``vllm-autoprune eval``, for each kind of question too.

    A report that does not compare the state is a problem too. Raises :class:`ConfigError` for a
    file that is no report, or not a valid one.
    """
    measured = _read_report(report)
    if not measured.valid:
        fix = "run the evaluation again with --resume"
        raise ConfigError("evidence", [Problem(str(report), "is not valid", fix)])
    names = {row.case.name for row in measured.rows if row.case.digest == state.digest}
    compared = [one for one in measured.resizing if one.case in names]
    if not compared:
        what = f"does not compare {state.name!r} ({state.digest[:12]}) with the resize control"
        fix = "evaluate this state: vllm-autoprune eval --data FILE --state STATE"
        yield Problem(str(report), what, fix)
    for one in compared:
        if one.winner == "resizing":
            kind = "" if one.kind is None else f" on {one.kind!r}"
            yield Problem(str(report), _describe(one.budget, one.difference, kind), _FIX)


def _read_report(path: Path) -> _Report:
    try:
        return _Report.model_validate_json(path.read_bytes())
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    except ValidationError:
        what = "is not a report of an evaluation"
    fix = "give the report.json that vllm-autoprune eval wrote"
    raise ConfigError("evidence", [Problem(str(path), what, fix)])


def _describe(budget: int | str, difference: Estimate, where: str = "") -> str:
    interval = f"{-difference.high:.1f} to {-difference.low:.1f}"
    return (
        f"resizing beats it at K = {budget}{where} by {-difference.value:.1f} points ({interval})"
    )
