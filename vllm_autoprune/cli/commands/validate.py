"""`validate`: check states and run their safety check.

Knows nothing about the checks themselves.
"""

from __future__ import annotations

import argparse
import dataclasses

from vllm_autoprune.cli.command import Command
from vllm_autoprune.cli.render import as_json
from vllm_autoprune.cli.validate import Validation, validate


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("state", nargs="+", help="file, or name of a shipped state")
    parser.add_argument("--budget", type=int, help="check at this K instead of the state's own")


def _run(options: argparse.Namespace) -> int:
    results = [validate(source, options.budget) for source in options.state]
    if options.json:
        print(as_json([dataclasses.asdict(result) for result in results]))
    else:
        print("\n".join(_told(result) for result in results))
    return 0 if all(result.valid for result in results) else 1


def _told(result: Validation) -> str:
    if not result.problems:
        head = f"{result.source}: {'valid' if result.valid else 'fails its safety check'}"
        head += f", K = {result.budget}, digest {(result.digest or '')[:12]}"
    else:
        head = f"{result.source}: {len(result.problems)} problem(s)"
    lines = [f"  {where or '/'}: {what} -> {fix}" for where, what, fix in result.problems]
    lines += [
        f"  {'ok  ' if ok else 'FAIL'} {name}: {detail}" for name, ok, detail in result.verdicts
    ]
    return "\n".join([head, *lines])


COMMAND = Command("check states and run their safety check", _arguments, _run)
