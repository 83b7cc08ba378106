"""`python -m benchmarks.accuracy.minillava`: accuracy of every case of the paper on mini-LLaVA."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy.minillava.cases import BUDGETS, FAMILIES
from benchmarks.accuracy.minillava.model import EMBEDDED, find_model
from benchmarks.accuracy.minillava.suite import Settings, build_suite
from vllm_autoprune.cli.commands.eval import add_run_arguments, run_suite
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.errors import AutopruneError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 for a valid report, 1 for one that is not or that cannot be made."""
    options = parser().parse_args(arguments)
    defaults = Settings()
    try:
        settings = Settings(
            url=options.server_url,
            served_name=options.served_name,
            max_in_flight=options.concurrency or defaults.max_in_flight,
            log=options.out / "server.log",
        )
        model = find_model(options.model)
        suite = build_suite(model, options.budgets, options.cases, options.scenes, settings)
        return run_suite(suite, options.out, options)
    except AutopruneError as error:
        print(error, file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """The options."""
    top = CommandParser(
        prog="python -m benchmarks.accuracy.minillava",
        description="Measure accuracy of every base policy, residual and ablation on mini-LLaVA.",
    )
    top.add_argument(
        "--out",
        type=Path,
        default=Path("out/eval/minillava"),
        metavar="FOLDER",
        help="folder for the results",
    )
    top.add_argument("--json", action="store_true", help="print the report as JSON")
    add_run_arguments(top)
    top.add_argument(
        "--model", default=EMBEDDED, help="embedded (default), or a folder with llava/ and clip/"
    )
    top.add_argument("--scenes", type=int, help="default: about half an hour's worth")
    top.add_argument(
        "--budgets", type=int, nargs="+", default=list(BUDGETS), metavar="K", help="each K"
    )
    top.add_argument(
        "--cases", nargs="+", default=list(FAMILIES), choices=FAMILIES, help="groups of cases"
    )
    top.add_argument(
        "--server-url",
        metavar="URL",
        help="a running server with --autoprune-requests states; default: one is started",
    )
    return top


if __name__ == "__main__":
    raise SystemExit(main())
