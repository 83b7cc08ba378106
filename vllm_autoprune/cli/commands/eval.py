"""`eval`: accuracy of full tokens, base policies and states, with paired intervals.

``--data PATH`` asks the questions of a file or folder, ``--suite lmms:TASKS`` runs lmms-eval.
Both measure all states on one server, because every request brings its own state.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from vllm_autoprune.cli.flags import add_connection_flags, command, read_connection
from vllm_autoprune.cli.output import print_result, print_text
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.http_client import MAX_IN_FLIGHT, ServerClient

if TYPE_CHECKING:
    from vllm_autoprune.evaluation.journal import Case
    from vllm_autoprune.evaluation.lmms import LmmsSuite
    from vllm_autoprune.evaluation.question_suite import QuestionSuite


def _arguments(parser: ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    text = "your images, questions and answers: a file or folder, as docs/evaluation.md lists them"
    what.add_argument("--data", type=Path, metavar="PATH", help=text)
    what.add_argument(
        "--suite", metavar="SUITE", help="lmms:TASK,TASK,... through lmms-eval"
    )
    text = "with --data, also without answers: compare with what the unpruned model answers"
    parser.add_argument("--reference", choices=("unpruned",), help=text)
    add = parser.add_argument
    text = "folder to write (default: out/eval/ and the path of the data, or the tasks)"
    add("-o", "--output", "--out", type=Path, metavar="FOLDER", help=text)
    text = "continue the evaluation in that folder"
    add("--resume", action="store_true", help=text)
    text = "check data and budgets, print the first questions as they will be asked, and stop; "
    text += "without a server"
    add("--dry-run", action="store_true", help=text)
    text = "concurrent requests; default: by the suite"
    add("--at-once", type=int, dest="concurrency", metavar="N", help=text)
    add("--served-name", metavar="NAME", help="the model's name on its server")
    text = "maximum number of questions, for lmms of each task"
    parser.add_argument("--limit", type=int, help=text)

    text = "where the images of --data are (default: beside it)"
    add("--images", type=Path, metavar="FOLDER", help=text)
    text = "with --data, also ask the questions by which a search chose a state; they flatter it"
    add("--all-questions", action="store_true", help=text)
    text = "--data is about videos: sample N frames of each (vLLM's default is 32)"
    add("--frames", type=int, metavar="N", help=text)

    add = parser.add_argument_group("states").add_argument
    add(
        "--server-url",
        metavar="URL",
        help="a running vllm serve with --autoprune-requests states",
    )
    text = (
        "state to evaluate, a file or a shipped name; all: every base policy, alone and with the "
        "exchange of autoprune; repeatable (default: the server's own, at its own budget)"
    )
    add("--state", action="append", metavar="STATE", help=text)
    text = "budgets: K, or a share of N as 1/8 or 1/8:64-640 (default with --state: 64); of a "
    text += "video also tokens_per_frame:K (default 1/4)"
    add("--budgets", nargs="+", metavar="K", help=text)
    text = "also drop cells by RULE, such as flat, before the tower: alone, and before each state"
    add("--cells", nargs="+", default=[], metavar="RULE", help=text)

    add = parser.add_argument_group("lmms").add_argument
    text = "OpenAI-compatible judge, for MMBench, MM-Vet and HallBench (default: OPENAI_API_URL)"
    add("--judge-url", metavar="URL", help=text)
    add("--lmms-eval", default="lmms-eval", metavar="PROGRAM", help="path of lmms-eval")
    text = "folder with your own tasks; the first metric of each is used, a mean from 0 to 1"
    add("--include-path", type=Path, metavar="FOLDER", help=text)
    text = "the model, such as qwen2.5-vl-7b: on Qwen MME includes its cognition half"
    add("--backbone", default="llava-1.5-7b", help=text)
    add_connection_flags(parser)


@command(
    "eval",
    _arguments,
    epilog="How it is measured and what the tables mean: docs/evaluation.md.",
)
def _evaluate_states(options: Namespace) -> int:
    """Measure accuracy on your questions, and whether pruning beats resizing images."""
    from vllm_autoprune.evaluation.page import build_page
    from vllm_autoprune.evaluation.preview import preview_questions
    from vllm_autoprune.evaluation.question_suite import QuestionSuite
    from vllm_autoprune.evaluation.run import evaluate

    _check_arguments(options)
    folder = _choose_folder(options)
    cases, chosen_by = _build_cases(options)
    build_suite = _prepare_suite(options, folder)
    if not options.state and not options.dry_run:
        # Last, so that what is wrong with the data is told without a server.
        cases, chosen_by = _read_own_cases(options)
    suite = build_suite(cases, chosen_by)
    if options.dry_run:
        record: dict[str, JsonValue] = {"plan": suite.plan()}
        blocks = [suite.plan()]
        if isinstance(suite, QuestionSuite):
            record, blocks = preview_questions(suite)
        print_result(options, record, *blocks)
        return 0
    report = evaluate(
        suite.setup,
        suite.cases,
        suite.measure,
        folder,
        resume=options.resume,
        picture=suite.picture if isinstance(suite, QuestionSuite) else None,
    )
    page = build_page(report)
    text = report.format_json() if options.json else page.render_markdown()
    print_text(text, end="")
    print(
        f"{folder}/: report.html, report.md, report.json, samples.jsonl",
        file=sys.stderr,
    )
    print(page.answer, file=sys.stderr)
    return 0 if report.valid else 1


def _build_cases(options: Namespace) -> tuple[list[Case], dict[int, str]]:
    """The cases, and for each named state, by its place, the images by which a search chose it.

    The states are those of ``--state``; without it, a stand-in for the server's own is among them.
    """
    from vllm_autoprune.evaluation.cases import build_cases, read_chosen_by
    from vllm_autoprune.evaluation.served_page import OWN

    frames = options.frames or 0
    budgets = options.budgets or ["1/4" if frames else "64"]
    cases = build_cases(options.state or [], budgets, options.cells, frames)
    if options.state:
        return cases, read_chosen_by(options.state)
    return [*cases, OWN], {}


def _read_own_cases(options: Namespace) -> tuple[list[Case], dict[int, str]]:
    """As :func:`_build_cases`, of the state that the server says it has."""
    from vllm_autoprune.evaluation.served_page import ServedPage

    url = options.server_url
    with (
        ServerClient(url, read_connection(options)) as client,
        client.reporting_failures(),
    ):
        client.list_models()  # a server that does not answer has no page either
        page = ServedPage.read(client)
    frames = options.frames or 0
    cases = page.build_own_cases(url, options.budgets, options.cells, frames)
    return cases, {1: page.evidence.chosen_by}


def _choose_folder(options: Namespace) -> Path:
    """Folder of ``-o``, or else one for this data alone, named by its path or by the tasks."""
    if options.output is not None:
        output: Path = options.output
        return output
    if options.data is None:
        return Path("out/eval", re.sub(r"[^\w.]+", "-", options.suite))
    path = options.data.resolve()
    folder = Path("out/eval/_", *path.parts[1:])
    if path != Path.cwd() and path.is_relative_to(Path.cwd()):
        folder = Path("out/eval", path.relative_to(Path.cwd()))
    if options.reference is not None:
        folder = folder.with_name(f"{folder.name}-unpruned")
    return folder


def _check_arguments(options: Namespace) -> None:
    """Raise :class:`ConfigError` for the first argument that is missing or not allowed."""
    is_lmms = options.data is None
    for is_wrong, where, what, fix in (
        (
            is_lmms and options.suite.partition(":")[0] != "lmms",
            f"--suite {options.suite}",
            "is not a suite",
            "use --data questions.jsonl, or lmms:mme,pope (lmms:paper-llava, lmms:paper-qwen)",
        ),
        (
            is_lmms and options.reference is not None,
            "--reference",
            "is for --data",
            "leave it out: lmms-eval scores by its own answers",
        ),
        (
            options.server_url is None and not options.dry_run,
            "--server-url",
            "is missing",
            "give the address of a vllm serve with --autoprune-requests states",
        ),
        (
            is_lmms and options.served_name is None and not options.dry_run,
            "--served-name",
            "is missing",
            "give the name that the server has for the model",
        ),
        (
            options.frames is not None and options.frames < 1,
            f"--frames {options.frames}",
            "is below 1",
            "give 1 or more",
        ),
        (
            options.frames and (is_lmms or options.cells),
            "--frames",
            "is for videos of --data",
            "leave it out, or --suite and --cells, which take pictures only",
        ),
        (
            options.limit is not None and options.limit < 1,
            f"--limit {options.limit}",
            "is below 1",
            "give 1 or more",
        ),
    ):
        if is_wrong:
            raise ConfigError.of(where, what, fix, subject="eval")


def _prepare_suite(
    options: Namespace, folder: Path
) -> Callable[[Sequence[Case], Mapping[int, str]], QuestionSuite | LmmsSuite]:
    """Read the questions of ``--data`` or find the tasks of ``--suite``.

    Returns a function that makes the suite of cases and ``chosen_by``, which
    :func:`_build_cases` returns.
    """
    from vllm_autoprune.evaluation.lmms import LmmsSuite
    from vllm_autoprune.evaluation.lmms_benchmarks import select_benchmarks
    from vllm_autoprune.evaluation.question_suite import QuestionSuite
    from vllm_autoprune.evaluation.questions import read_questions
    from vllm_autoprune.evaluation.run import Server

    server = Server(
        options.server_url,
        read_connection(options),
        options.served_name,
        options.concurrency or (MAX_IN_FLIGHT if options.data else 32),
    )
    if options.data is not None:
        is_unlabelled = options.reference is not None
        questions = read_questions(
            options.data,
            options.limit,
            images=options.images,
            connection=server.connection,
            unlabelled=is_unlabelled,
            frames=options.frames or 0,
        )
        return lambda cases, chosen_by: QuestionSuite.without_chosen(
            server,
            cases,
            questions,
            # A file name may not be valid UTF-8.
            options.data.name.encode(errors="replace").decode(),
            chosen_by,
            unpruned=is_unlabelled,
            keep=options.all_questions,
        )
    is_qwen = options.backbone.startswith("qwen")
    benchmarks = select_benchmarks(
        options.suite.partition(":")[2],
        cognition=is_qwen,
        with_tasks=options.include_path is not None,
    )
    return lambda cases, chosen_by: LmmsSuite(
        server,
        cases,
        benchmarks,
        options.lmms_eval,
        folder / "lmms-eval",
        28.0 if is_qwen else 20.0,
        limit=options.limit,
        include=options.include_path,
        judge_url=options.judge_url,
    )
