"""`validate`: check states, run their safety check, and read their evidence against resizing."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import as_json
from vllm_autoprune.errors import BudgetError, StateError
from vllm_autoprune.evaluation.evidence import find_losses, find_reported_losses
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.safety import safety_check


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
