"""`validate`: check states, run their safety check, and read their evidence against resizing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, JsonValue, ValidationError

from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import as_json
from vllm_autoprune.errors import BudgetError, ConfigError, Problem, StateError
from vllm_autoprune.evaluation.report import Report
from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.safety import safety_check
from vllm_autoprune.tpdsl.state import PruningState

_FIX = "serve smaller images at this K, or another state"


# Scores of a state, of which the other fields do not matter here.
class _Row(BaseModel):
    budget: int | str
    """K, or a share of N such as "N/8" where images differ in size."""
    model: str = ""
    less_resized: Estimate | None = None


class _Scores(BaseModel):
    rows: tuple[_Row, ...] = ()


def find_losses(state: PruningState, report: Path | None = None) -> Iterator[Problem]:
    """Budgets at which resizing beats the state, by the scores in its own provenance.

    ``report`` is a ``report.json`` of ``vllm-autoprune eval``, read for each kind of question too;
    one that does not compare the state is a problem too. Raises :class:`ConfigError` for a file
    that is no report, or not a valid one.
    """
    try:
        scores = _Scores.model_validate(state.provenance.scores)
    except ValidationError:  # scores of another form, which say nothing about resizing
        scores = _Scores()
    for number, row in enumerate(scores.rows):
        if row.less_resized is not None and row.less_resized.high < 0:
            where = f"/provenance/scores/rows/{number}"
            model = f" on {row.model}" if row.model else ""
            yield Problem(where, _describe(row.budget, row.less_resized, model), _FIX)
    if report is None:
        return
    what, fix = "", "give the report.json that vllm-autoprune eval wrote"
    try:
        content = json.loads(report.read_bytes())
        del content["valid"]  # said by its reasons
        measured = Report.model_validate(content)
        if not measured.valid:
            what, fix = "is not valid", "run the evaluation again with --resume"
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    except (ValueError, TypeError, KeyError):
        what = "is not a report of an evaluation"
    if what:
        raise ConfigError("evidence", [Problem(str(report), what, fix)])
    names = {row.case.name for row in measured.rows if row.case.digest == state.digest}
    compared = [comparison for comparison in measured.resizing if comparison.case in names]
    if not compared:
        what = f"does not compare {state.name!r} ({state.digest[:12]}) with the resize control"
        fix = "evaluate this state: vllm-autoprune eval --data FILE --state STATE"
        yield Problem(str(report), what, fix)
    for loss in compared:
        if loss.winner == "resizing":
            kind = "" if loss.kind is None else f" on {loss.kind!r}"
            yield Problem(str(report), _describe(loss.budget, loss.difference, kind), _FIX)


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
    records = [_validate(source, options.budget, options.evidence) for source in options.state]
    if options.json:
        print(as_json(records))
    else:
        print("\n".join(line for record in records for line in _format(record)))
    return 0 if all(record["valid"] for record in records) else 1


def _validate(source: str, budget: int | None, evidence: Path | None) -> dict[str, Any]:
    """What is printed of a state; one that cannot be loaded is reported, never raised.

    ``problems`` and ``warnings`` are (where, what, fix), ``verdicts`` (name, ok, detail). Warnings
    are about evidence that resizing images beats the state, which stays valid.
    """
    record: dict[str, JsonValue] = {"source": source, "valid": False, "budget": budget}
    record |= {"digest": None, "problems": [], "verdicts": [], "warnings": []}
    try:
        state = load_state(source)
        policy = materialize(state, budget)
    except (StateError, BudgetError) as error:
        return record | {"problems": [[p.where, p.what, p.fix] for p in error.problems]}
    safety = safety_check(policy)
    return record | {
        "valid": safety.valid,
        "budget": policy.budget,
        "digest": state.digest,
        "verdicts": [[verdict.name, verdict.ok, verdict.detail] for verdict in safety.verdicts],
        "warnings": [[loss.where, loss.what, loss.fix] for loss in find_losses(state, evidence)],
    }


def _format(record: dict[str, Any]) -> Iterator[str]:
    if record["problems"]:
        yield f"{record['source']}: {len(record['problems'])} problem(s)"
    else:
        verdict = "valid" if record["valid"] else "fails its safety check"
        yield (
            f"{record['source']}: {verdict}, K = {record['budget']}, digest {record['digest'][:12]}"
        )
    for where, what, fix in record["problems"]:
        yield f"  {where or '/'}: {what} -> {fix}"
    for name, ok, detail in record["verdicts"]:
        yield f"  {'ok  ' if ok else 'FAIL'} {name}: {detail}"
    for where, what, fix in record["warnings"]:
        yield f"  warn {where}: {what} -> {fix}"


COMMAND = Command(
    "check states, run their safety check, warn where resizing images was better", _arguments, _run
)
