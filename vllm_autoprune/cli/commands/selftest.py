"""`selftest`: tiny random models of every backbone, served on this machine, and what holds of them.

Knows nothing about what is checked.
"""

from __future__ import annotations

import argparse
import sys
import time

from vllm_autoprune.cli.command import Command
from vllm_autoprune.cli.render import as_json, table
from vllm_autoprune.selftest.backbones import BUILDERS
from vllm_autoprune.selftest.checks import CHECKS
from vllm_autoprune.selftest.run import SelftestError, examine

_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
_RUNNERS: dict[str, dict[str, str]] = {"default": {}, "v1": {_SWITCH: "0"}, "v2": {_SWITCH: "1"}}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "backbones", nargs="*", metavar="BACKBONE", help=f"of: {', '.join(BUILDERS)} (default: all)"
    )
    parser.add_argument(
        "--runner",
        choices=_RUNNERS,
        default="default",
        help="vLLM's model runner; by default the one that it chooses here",
    )


def _run(options: argparse.Namespace) -> int:
    names: list[str] = options.backbones or list(BUILDERS)
    if unknown := [name for name in names if name not in BUILDERS]:
        known = ", ".join(BUILDERS)
        print(f"no such backbone: {', '.join(unknown)}; use: {known}", file=sys.stderr)
        return 2
    found: dict[str, dict[str, str]] = {}
    for name in names:
        start = time.monotonic()
        found[name] = _examined(name, options.runner)
        if not options.json:
            print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    holds = all(wrong == "" for checked in found.values() for wrong in checked.values())
    if options.json:
        print(as_json({"holds": holds, "found": found}))
    else:
        print(_told(found))
        print("\nEverything holds." if holds else "\nSomething does not hold: see above.")
    return 0 if holds else 1


def _examined(name: str, runner: str) -> dict[str, str]:
    """By check: nothing where it holds, else what is wrong."""
    try:
        report = examine(name, _RUNNERS[runner])
    except SelftestError as error:
        return {"served": str(error)}
    return {"served": "", **{named: check(report) for named, check in CHECKS.items()}}


def _told(found: dict[str, dict[str, str]]) -> str:
    rows = []
    for check in ("served", *CHECKS):
        held = [found[name].get(check) for name in found]
        shown = ["-" if wrong is None else "no" if wrong else "yes" for wrong in held]
        rows.append([check.replace("_", " "), *shown])
    lines = [table(["what must hold", *found], rows)]
    for name, checked in found.items():
        lines += [f"{name}, {check}: {wrong}" for check, wrong in checked.items() if wrong]
    return "\n".join(lines)


COMMAND = Command(
    "serve tiny models of every backbone here, and check what must hold", _arguments, _run
)
