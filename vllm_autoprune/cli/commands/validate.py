"""`validate`: check states, run their safety check, and read their evidence against resizing."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import as_json
from vllm_autoprune.errors import BudgetError, ConfigError, Problem, StateError
from vllm_autoprune.evaluation.report import Comparison
from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.safety import safety_check
from vllm_autoprune.tpdsl.state import PruningState


@dataclass(frozen=True, slots=True)
class Validation:
    """Outcome for one state.

    ``problems`` and ``warnings`` are (where, what, fix); ``verdicts`` are (name, ok, detail).
    Warnings are about evidence that resizing images beats the state, which stays valid.
    """

    source: str
    valid: bool
    budget: int | None
    digest: str | None
    problems: tuple[tuple[str, str, str], ...]
    verdicts: tuple[tuple[str, bool, str], ...]
    warnings: tuple[tuple[str, str, str], ...] = ()


def validate(source: str, budget: int | None = None, evidence: Path | None = None) -> Validation:
    """Load, materialize and safety-check a state; bad states are reported, never raised.

    ``evidence`` is a report of an evaluation, read besides the state's provenance; raises
    :class:`ConfigError` where it is not a valid one.
    """
    try:
        state = load_state(source)
        policy = materialize(state, budget)
    except (StateError, BudgetError) as error:
        problems = tuple((p.where, p.what, p.fix) for p in error.problems)
        return Validation(source, False, budget, None, problems, ())
    record = safety_check(policy)
    verdicts = tuple((v.name, v.ok, v.detail) for v in record.verdicts)
    losses = list(find_losses(state))
    if evidence is not None:
        losses += find_reported_losses(state, evidence)
    warnings = tuple((loss.where, loss.what, loss.fix) for loss in losses)
    return Validation(source, record.valid, policy.budget, state.digest, (), verdicts, warnings)


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


class _EvaluatedCase(_Lenient):
    name: str
    digest: str = ""


class _ReportRow(_Lenient):
    case: _EvaluatedCase


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


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("state", nargs="+", help="file, or name of a shipped state")
    parser.add_argument("--budget", type=int, help="check at this K instead of the state's own")
    parser.add_argument(
        "--evidence",
        type=Path,
        metavar="REPORT.json",
        help="report of `vllm-autoprune eval`: warn where resizing images beats the state",
    )


def _run(options: argparse.Namespace) -> int:
    results = [validate(source, options.budget, options.evidence) for source in options.state]
    if options.json:
        print(as_json([dataclasses.asdict(result) for result in results]))
    else:
        print("\n".join(_format_validation(result) for result in results))
    return 0 if all(result.valid for result in results) else 1


def _format_validation(result: Validation) -> str:
    if not result.problems:
        head = f"{result.source}: {'valid' if result.valid else 'fails its safety check'}"
        head += f", K = {result.budget}, digest {(result.digest or '')[:12]}"
    else:
        head = f"{result.source}: {len(result.problems)} problem(s)"
    lines = [f"  {where or '/'}: {what} -> {fix}" for where, what, fix in result.problems]
    lines += [
        f"  {'ok  ' if ok else 'FAIL'} {name}: {detail}" for name, ok, detail in result.verdicts
    ]
    lines += [f"  warn {where}: {what} -> {fix}" for where, what, fix in result.warnings]
    return "\n".join([head, *lines])


COMMAND = Command(
    "check states, run their safety check, warn where resizing images was better", _arguments, _run
)
