"""`eval`: accuracy of full tokens, base policies and states, with paired intervals.

``--data FILE`` asks the questions of a JSONL file, ``--suite lmms:TASKS`` runs lmms-eval. Either
measures all states on one server, to which every request brings its own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_autoprune.cli.flags import Command
from vllm_autoprune.errors import ConfigError, Problem
from vllm_autoprune.http_client import MAX_IN_FLIGHT

if TYPE_CHECKING:
    from vllm_autoprune.evaluation.journal import Case
    from vllm_autoprune.evaluation.run import Suite


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every suite."""
    parser.add_argument("--resume", action="store_true", help="continue the evaluation in --out")
    parser.add_argument("--dry-run", action="store_true", help="print what would be run, and stop")
    parser.add_argument(
        "--at-once",
        type=int,
        dest="concurrency",
        metavar="N",
        help="concurrent requests; default: by the suite",
    )
    parser.add_argument("--served-name", metavar="NAME", help="the model's name on its server")


def _arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="your own images, questions and answers: one JSON object a line",
    )
    what.add_argument(
        "--suite",
        metavar="SUITE",
        help="lmms:TASK,TASK,... through lmms-eval (data:FILE is the same as --data FILE)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="default: out/eval/data or out/eval/lmms"
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--limit", type=int, help="maximum number of questions, for lmms of each task"
    )
    group = parser.add_argument_group("states")
    group.add_argument(
        "--server-url",
        metavar="URL",
        help="a running vllm serve with --autoprune-requests states",
    )
    group.add_argument(
        "--state",
        action="append",
        metavar="STATE",
        help="state to evaluate, a file or a shipped name; all: every base policy, alone and with "
        "the exchange of autoprune; repeatable (default: autoprune)",
    )
    group.add_argument(
        "--budgets", type=int, nargs="+", default=[64], metavar="K", help="budgets (default 64)"
    )
    group = parser.add_argument_group("lmms")
    group.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a server that prunes by itself: full=URL, resized@K=URL, POLICY@K=URL or "
        "POLICY+autoprune@K=URL; repeatable",
    )
    group.add_argument(
        "--judge-url",
        metavar="URL",
        help="OpenAI-compatible judge, for MMBench, MM-Vet and HallBench (default: OPENAI_API_URL)",
    )
    group.add_argument(
        "--lmms-eval", default="lmms-eval", metavar="PROGRAM", help="path of lmms-eval"
    )
    group.add_argument(
        "--include-path",
        type=Path,
        metavar="FOLDER",
        help="folder with your own tasks; the first metric of each is used, a mean from 0 to 1",
    )
    group.add_argument(
        "--backbone", default="llava-1.5-7b", help="backbone whose published rows are shown too"
    )


def _run(options: argparse.Namespace) -> int:
    kind, _, value = (options.suite or f"data:{options.data}").partition(":")
    folder = options.out or Path("out/eval") / kind
    if kind == "data" and value:
        return run_suite(_data_suite(options, Path(value)), folder, options)
    if kind == "lmms":
        return run_suite(_lmms_suite(options, value, folder), folder, options)
    fix = "use --data questions.jsonl, or lmms:mme,pope (lmms:paper-llava, lmms:paper-qwen)"
    raise ConfigError("eval", [Problem(f"--suite {options.suite}", "is not a suite", fix)])


def run_suite(suite: Suite, folder: Path, options: argparse.Namespace) -> int:
    """Evaluate, print the report, and return the exit status: 1 if the report is not valid."""
    if options.dry_run:
        print("\n".join(suite.plan()))
        return 0
    from vllm_autoprune.evaluation.run import Progress, evaluate, format_report

    progress = Progress(lambda line: print(line, file=sys.stderr, flush=True))
    report = evaluate(suite, folder, resume=options.resume, progress=progress)
    print(format_report(report, "json" if options.json else "md"), end="")
    print(f"{folder}/: report.html, report.md, report.json, samples.jsonl", file=sys.stderr)
    return 0 if report.valid else 1


def _data_suite(options: argparse.Namespace, path: Path) -> Suite:
    from vllm_autoprune.evaluation.run import Settings, file_suite

    if options.server_url is None:
        fix = "give the address of a vllm serve with --autoprune-requests states"
        raise ConfigError("eval", [Problem("--server-url", "is missing", fix)])
    at_once = options.concurrency or MAX_IN_FLIGHT
    settings = Settings(options.server_url, options.served_name, at_once)
    return file_suite(path, _build_cases(options), settings, options.limit)


def _build_cases(options: argparse.Namespace) -> list[Case]:
    """The cases of ``--state`` and ``--budgets``."""
    from vllm_autoprune.evaluation.run import build_cases

    if wrong := [budget for budget in options.budgets if budget < 1]:
        values = " ".join(map(str, wrong))
        raise ConfigError("eval", [Problem(f"--budgets {values}", "are below 1", "give 1 or more")])
    return list(build_cases(options.state or ["autoprune"], options.budgets))


def _lmms_suite(options: argparse.Namespace, tasks: str, folder: Path) -> Suite:
    from vllm_autoprune.evaluation.lmms.output import find_tasks, select_benchmarks
    from vllm_autoprune.evaluation.lmms.suite import LmmsEval, LmmsSuite, Server, parse_servers
    from vllm_autoprune.evaluation.published import mme_divisor

    if options.served_name is None:
        fix = "give the name that the servers have for the model"
        raise ConfigError("eval", [Problem("--served-name", "is missing", fix)])
    divisor = mme_divisor(options.backbone)
    tasks_of_folder = find_tasks(options.include_path) if options.include_path else ()
    benchmarks = select_benchmarks(tasks, cognition=divisor > 20, tasks=tasks_of_folder)
    program = LmmsEval(
        options.lmms_eval,
        options.served_name,
        options.concurrency or 32,
        options.limit,
        options.include_path,
        options.judge_url,
    )
    servers = [] if options.server_url and not options.arm else parse_servers(options.arm)
    if options.server_url:
        names = {server.case.name for server in servers}
        url = options.server_url.rstrip("/").removesuffix("/v1")
        servers += [Server(case, url) for case in _build_cases(options) if case.name not in names]
    return LmmsSuite(
        servers,
        benchmarks,
        program,
        folder / "lmms-eval",
        backbone=options.backbone,
        mme_divisor=divisor,
    )


COMMAND = Command(
    "measure accuracy on your questions, and whether pruning beats resizing images",
    _arguments,
    _run,
    epilog="How it is measured and what the tables mean: docs/benchmarks.md.",
)
