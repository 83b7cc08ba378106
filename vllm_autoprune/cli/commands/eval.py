"""`eval`: accuracy of full tokens, base policies and AutoPrune on a suite, with paired intervals.

Knows nothing about measuring: it puts together what the options name. Suites live in the repository
beside the package, not in the wheel.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_autoprune.cli.command import Command
from vllm_autoprune.errors import ConfigError, Problem

if TYPE_CHECKING:
    from benchmarks.accuracy.run import Suite

_FAMILIES = ("random", "policies", "found", "components", "quota")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--suite", required=True, metavar="SUITE", help="minillava, or lmms:TASK,TASK,..."
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: out/eval/SUITE")
    parser.add_argument("--resume", action="store_true", help="go on with what --out holds")
    parser.add_argument("--dry-run", action="store_true", help="show what would be run, and stop")
    parser.add_argument(
        "--at-once", type=int, help="requests in flight; default: 128 of minillava, 32 of lmms"
    )
    parser.add_argument(
        "--served-name", metavar="NAME", help="the model's name on its server; lmms needs it"
    )
    _minillava_arguments(parser.add_argument_group("minillava"))
    _lmms_arguments(parser.add_argument_group("lmms"))


def _minillava_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", default="embedded", help="embedded (default), or a folder with llava/ and clip/"
    )
    group.add_argument("--scenes", type=int, help="default: what takes about half an hour")
    group.add_argument("--budgets", type=int, nargs="+", default=[64, 32, 16, 8, 4], metavar="K")
    group.add_argument("--cases", nargs="+", default=list(_FAMILIES), choices=_FAMILIES)
    group.add_argument(
        "--server-url",
        metavar="URL",
        help="a running server with --autoprune-requests states; none: one is started",
    )


def _lmms_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="full=URL, POLICY@K=URL or POLICY+autoprune@K=URL; once for each server",
    )
    group.add_argument(
        "--lmms-eval", default="lmms-eval", metavar="PROGRAM", help="where it is installed"
    )
    group.add_argument(
        "--include-path",
        type=Path,
        metavar="FOLDER",
        help="tasks of your own: by the first metric of each, a mean of scores from 0 to 1",
    )
    group.add_argument("--limit", type=int, help="only so many samples of each task")
    group.add_argument(
        "--backbone", default="llava-1.5-7b", help="whose published rows are shown beside ours"
    )


def _run(options: argparse.Namespace) -> int:
    suite, folder = _suite(options)
    if options.dry_run:
        print("\n".join(suite.plan()))
        return 0
    from benchmarks.accuracy.pages import as_markdown
    from benchmarks.accuracy.run import Progress, as_json, evaluate

    progress = Progress(lambda line: print(line, file=sys.stderr, flush=True))
    report = evaluate(suite, folder, resume=options.resume, progress=progress)
    print(as_json(report) if options.json else as_markdown(report), end="")
    print(f"{folder}/: report.md, report.tex, report.json, samples.jsonl", file=sys.stderr)
    return 0 if report.valid else 1


def _suite(options: argparse.Namespace) -> tuple[Suite, Path]:
    kind, _, tasks = options.suite.partition(":")
    folder = options.out or Path("out/eval") / kind
    try:
        if options.suite == "minillava":
            return _minillava(options, folder), folder
        if kind == "lmms":
            return _lmms(options, tasks, folder), folder
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "benchmarks":
            raise
        fix = "clone the repository, `pip install -e .` there, and run this again"
        what = "is not in the installed package"
        raise ConfigError("eval", [Problem(f"--suite {kind}", what, fix)]) from None
    fix = "use minillava, or lmms:mme,pope (or lmms:paper-llava, lmms:paper-qwen, lmms:paper)"
    raise ConfigError("eval", [Problem(f"--suite {options.suite}", "is no suite", fix)])


def _minillava(options: argparse.Namespace, folder: Path) -> Suite:
    from benchmarks.accuracy.minillava.model import find_model
    from benchmarks.accuracy.minillava.suite import Settings, build_suite
    from offline_search.evaluation.served_evaluator import MAX_IN_FLIGHT

    model = find_model(options.model)
    settings = Settings(
        url=options.server_url,
        served_name=options.served_name,
        at_once=options.at_once or MAX_IN_FLIGHT,
        log=folder / "server.log",
    )
    return build_suite(model, options.budgets, options.cases, options.scenes, settings)


def _lmms(options: argparse.Namespace, tasks: str, folder: Path) -> Suite:
    from benchmarks.accuracy.lmms.benchmarks import find_tasks, select_benchmarks
    from benchmarks.accuracy.lmms.process import LmmsEval
    from benchmarks.accuracy.lmms.servers import parse_servers
    from benchmarks.accuracy.lmms.suite import LmmsSuite
    from benchmarks.accuracy.published import mme_divisor

    if options.served_name is None:
        fix = "give the name that the servers have for the model"
        raise ConfigError("eval", [Problem("--served-name", "is missing", fix)])
    divisor = mme_divisor(options.backbone)
    own = find_tasks(options.include_path) if options.include_path else ()
    benchmarks = select_benchmarks(tasks, cognition=divisor > 20, own=own)
    program = LmmsEval(
        options.lmms_eval,
        options.served_name,
        options.at_once or 32,
        options.limit,
        options.include_path,
    )
    return LmmsSuite(
        parse_servers(options.arm),
        benchmarks,
        program,
        folder / "lmms-eval",
        backbone=options.backbone,
        mme_divisor=divisor,
    )


COMMAND = Command(
    "measure accuracy of full tokens, base policies and AutoPrune on a suite",
    _arguments,
    _run,
    epilog="How it is measured and what the tables mean: docs/benchmarks.md.",
)
