"""`selftest`: tiny random models of every backbone, served on this machine, and what holds of them.

Knows nothing about what is checked.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import as_json, format_table
from vllm_autoprune.selftest.backbones import BUILDERS
from vllm_autoprune.selftest.checks import CHECKS, runners_agree
from vllm_autoprune.selftest.report import Report
from vllm_autoprune.selftest.run import RUNNERS, SelftestError, examine, present

Checked = Mapping[str, str]
"""By check: nothing where it holds, else what is wrong."""

Found = Mapping[str, Mapping[str, Checked]]
"""By backbone, then by runner; under "both" what is said of the two together."""

BOTH = "both"
SERVED, AGREE = "served", runners_agree.__name__


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "backbones", nargs="*", metavar="BACKBONE", help=f"of: {', '.join(BUILDERS)} (default: all)"
    )
    parser.add_argument(
        "--runner",
        choices=(*RUNNERS, BOTH),
        help="vLLM's model runner (default: both, or v1 where vLLM cannot run v2)",
    )


def _run(options: argparse.Namespace) -> int:
    names: list[str] = options.backbones or list(BUILDERS)
    if unknown := [name for name in names if name not in BUILDERS]:
        known = ", ".join(BUILDERS)
        print(f"no such backbone: {', '.join(unknown)}; use: {known}", file=sys.stderr)
        return 2
    here = present()
    runners = _wanted(options.runner, here)
    if absent := [runner for runner in runners if runner not in here]:
        print(f"no model runner {', '.join(absent)} here: {_NO_V2}", file=sys.stderr)
        return 2
    found = {name: _examined(name, runners, not options.json) for name in names}
    wrong = [w for by in found.values() for checked in by.values() for w in checked.values() if w]
    if options.json:
        print(as_json({"holds": not wrong, "runners": runners, "found": found}))
    else:
        missing = "" if "v2" in here else f" ({_NO_V2})"
        print(f"vLLM's model runner {' and '.join(runners)}{missing}\n\n{_told(found, runners)}")
        print("\nSomething does not hold: see above." if wrong else "\nEverything holds.")
    return 1 if wrong else 0


def _wanted(runner: str | None, here: tuple[str, ...]) -> tuple[str, ...]:
    if runner is None:
        return here
    return tuple(RUNNERS) if runner == BOTH else (runner,)


_NO_V2 = "vLLM finds no Triton that it can use, and V2 needs one"


def _examined(name: str, runners: Sequence[str], progress: bool) -> dict[str, Checked]:
    """What holds of one backbone under each runner, and of both together."""
    reports: dict[str, Report] = {}
    found: dict[str, Checked] = {}
    for runner in runners:
        start = time.monotonic()
        try:
            report = examine(name, RUNNERS[runner])
        except SelftestError as error:
            found[runner] = {SERVED: str(error)}
        else:
            other = "" if report.runner == runner else f"vLLM used {report.runner} instead"
            checks = {check: holds(report) for check, holds in CHECKS.items()}
            found[runner] = {SERVED: other, **checks}
            reports[runner] = report
        if progress:
            print(f"{name}, {runner}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    if len(reports) == len(RUNNERS):
        found[BOTH] = {AGREE: runners_agree(*reports.values())}
    return found


def _told(found: Found, runners: Sequence[str]) -> str:
    """One table: a column a backbone, and whoever does not keep a promise by name."""
    checks = (SERVED, *CHECKS, *((AGREE,) if len(runners) > 1 else ()))
    rows = [[_label(check), *(_cell(by, check) for by in found.values())] for check in checks]
    lines = [format_table(["what must hold", *found], rows)]
    for name, by in found.items():
        for runner, checked in by.items():
            lines += [
                f"{name}, {runner}, {_label(c)}: {wrong}" for c, wrong in checked.items() if wrong
            ]
    return "\n".join(lines)


def _cell(by: Mapping[str, Checked], check: str) -> str:
    """ "yes" under every runner that was looked at, else by whom it is broken; "-": not seen."""
    seen = {runner: checked[check] for runner, checked in by.items() if check in checked}
    broken = [runner for runner, wrong in seen.items() if wrong]
    if broken:
        return f"no ({', '.join(broken)})" if len(by) > 1 else "no"
    return "yes" if seen else "-"


def _label(check: str) -> str:
    return check.replace("_s_", "'s ").replace("_", " ")


COMMAND = Command(
    "serve tiny models of every backbone here, and check what must hold", _arguments, _run
)
