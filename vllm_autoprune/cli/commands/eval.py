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
from vllm_autoprune.http_client import MAX_IN_FLIGHT, server_address

if TYPE_CHECKING:
    from vllm_autoprune.evaluation.run import Suite


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every suite."""
    add = parser.add_argument
    add("--resume", action="store_true", help="continue the evaluation in --out")
    add("--dry-run", action="store_true", help="print what would be run, and stop")
    text = "concurrent requests; default: by the suite"
    add("--at-once", type=int, dest="concurrency", metavar="N", help=text)
    add("--served-name", metavar="NAME", help="the model's name on its server")


def _arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    text = "your own images, questions and answers: one JSON object a line"
    what.add_argument("--data", type=Path, metavar="FILE", help=text)
    what.add_argument("--suite", metavar="SUITE", help="lmms:TASK,TASK,... through lmms-eval")
    text = "default: out/eval/data or out/eval/lmms"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)
    add_run_arguments(parser)
    text = "maximum number of questions, for lmms of each task"
    parser.add_argument("--limit", type=int, help=text)

    add = parser.add_argument_group("states").add_argument
    add("--server-url", metavar="URL", help="a running vllm serve with --autoprune-requests states")
    text = (
        "state to evaluate, a file or a shipped name; all: every base policy, alone and with the "
        "exchange of autoprune; repeatable (default: autoprune)"
    )
    add("--state", action="append", metavar="STATE", help=text)
    add("--budgets", type=int, nargs="+", default=[64], metavar="K", help="budgets (default 64)")

    add = parser.add_argument_group("lmms").add_argument
    text = (
        "a server that prunes by itself: full=URL, resized@K=URL, POLICY@K=URL or "
        "POLICY+autoprune@K=URL; repeatable"
    )
    add("--arm", action="append", default=[], metavar="NAME=URL", help=text)
    text = "OpenAI-compatible judge, for MMBench, MM-Vet and HallBench (default: OPENAI_API_URL)"
    add("--judge-url", metavar="URL", help=text)
    add("--lmms-eval", default="lmms-eval", metavar="PROGRAM", help="path of lmms-eval")
    text = "folder with your own tasks; the first metric of each is used, a mean from 0 to 1"
    add("--include-path", type=Path, metavar="FOLDER", help=text)
    text = "the model, such as qwen2.5-vl-7b: on Qwen MME includes its cognition half"
    add("--backbone", default="llava-1.5-7b", help=text)


def _run(options: argparse.Namespace) -> int:
    kind, _, tasks = (options.suite or "data").partition(":")
    folder = options.out or Path("out/eval") / kind
    if options.data is not None:
        return run_suite(_data_suite(options), folder, options)
    if kind == "lmms":
        return run_suite(_lmms_suite(options, tasks, folder), folder, options)
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


def _data_suite(options: argparse.Namespace) -> Suite:
    from vllm_autoprune.evaluation.run import Settings, build_cases, file_suite

    _require(
        options, "server_url", "give the address of a vllm serve with --autoprune-requests states"
    )
    at_once = options.concurrency or MAX_IN_FLIGHT
    settings = Settings(options.server_url, options.served_name, at_once)
    cases = build_cases(options.state or ["autoprune"], options.budgets)
    return file_suite(options.data, cases, settings, options.limit)


def _lmms_suite(options: argparse.Namespace, tasks: str, folder: Path) -> Suite:
    from vllm_autoprune.evaluation.lmms import LmmsEval, LmmsSuite, parse_arm, select_benchmarks
    from vllm_autoprune.evaluation.run import build_cases

    _require(options, "served_name", "give the name that the servers have for the model")
    if not options.arm:
        _require(options, "server_url", "give a server with --autoprune-requests states, or --arm")
    servers = list(map(parse_arm, options.arm))
    if options.server_url:
        names = {case.name for case, _ in servers}
        cases = build_cases(options.state or ["autoprune"], options.budgets)
        url = server_address(options.server_url)
        servers += [(case, url) for case in cases if case.name not in names]
    qwen = options.backbone.startswith("qwen")
    program = LmmsEval(
        options.lmms_eval,
        options.served_name,
        options.concurrency or 32,
        options.limit,
        options.include_path,
        options.judge_url,
    )
    return LmmsSuite(
        servers,
        select_benchmarks(tasks, cognition=qwen, own=options.include_path is not None),
        program,
        folder / "lmms-eval",
        backbone=options.backbone,
        mme_divisor=28.0 if qwen else 20.0,
    )


def _require(options: argparse.Namespace, name: str, fix: str) -> None:
    if vars(options)[name] is None:
        raise ConfigError("eval", [Problem(f"--{name.replace('_', '-')}", "is missing", fix)])


COMMAND = Command(
    "measure accuracy on your questions, and whether pruning beats resizing images",
    _arguments,
    _run,
    epilog="How it is measured and what the tables mean: docs/benchmarks.md.",
)
