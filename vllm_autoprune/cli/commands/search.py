"""`search`: run, resume or replay an offline search for a state, and report on its ledger."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.output import as_json, format_paragraph, write_file
from vllm_autoprune.cli.search_options import (
    add_evaluator_arguments,
    add_proposer_arguments,
    add_search_arguments,
    build_evaluator,
    open_proposer,
)
from vllm_autoprune.cli.search_settings import read_settings_and_data
from vllm_autoprune.errors import ConfigError, Problem, SearchError

if TYPE_CHECKING:
    from offline_search.dataset import Dataset
    from offline_search.ledger import WinnerRecord
    from offline_search.settings import Settings


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=("run", "report", "mme"),
        default="run",
        help="run a search (the default), report on a ledger, or write MME's files as --data",
    )
    parser.add_argument(
        "--ledger", type=Path, default=Path("search.jsonl"), help="file that holds the search"
    )
    parser.add_argument("--resume", action="store_true", help="resume the ledger's search")
    parser.add_argument(
        "--replay", type=Path, metavar="LEDGER", help="replay a recorded search without network"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the prompt and the estimated cost, and stop"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the state, or the report as HTML"
    )
    parser.add_argument(
        "--mme", type=Path, metavar="FOLDER", help="with `mme`: the folder of MME's categories"
    )
    add_search_arguments(parser.add_argument_group("search"))
    add_evaluator_arguments(parser.add_argument_group("evaluation"))
    add_proposer_arguments(parser.add_argument_group("proposer"))


def _run(options: argparse.Namespace) -> int:
    if options.action == "report":
        return _report(options)
    if options.data is None:
        fix = "name a folder with search.jsonl, validation.jsonl and test.jsonl"
        raise ConfigError("search", [Problem("--data", "is missing", fix)])
    if options.action == "mme":
        return _convert_mme(options)
    if options.replay is not None:
        return _replay(options)
    settings, dataset = read_settings_and_data(options)
    if options.dry_run:
        return _dry_run(options, settings, dataset)
    if options.ledger.exists() and options.ledger.stat().st_size and not options.resume:
        what, fix = "holds a search already", "add --resume, or name another ledger"
        raise ConfigError("search", [Problem(str(options.ledger), what, fix)])
    if not options.server_url:
        fix = "give the address of a vllm serve with --autoprune-requests states"
        raise ConfigError("search", [Problem("--server-url", "is missing", fix)])
    winner = asyncio.run(_run_search(options, settings, dataset))
    return _print_winner(options, winner)


async def _run_search(
    options: argparse.Namespace, settings: Settings, dataset: Dataset
) -> WinnerRecord:
    from offline_search.ledger import Ledger
    from offline_search.proposer import SpendingLimits
    from offline_search.report import ProgressLog
    from offline_search.search import Search

    async with contextlib.AsyncExitStack() as stack:
        ledger = stack.enter_context(Ledger(options.ledger))
        evaluator = build_evaluator(options, dataset)
        stack.push_async_callback(evaluator.close)
        await evaluator.prepare()
        settings = settings.model_copy(update={"evaluator": evaluator.name})
        proposer = await stack.enter_async_context(open_proposer(options, settings, dataset))
        limits = SpendingLimits(options.most_tokens, options.most_money)
        progress = ProgressLog(lambda line: print(line, file=sys.stderr, flush=True))
        return await Search(settings, ledger, evaluator, proposer, limits, progress).run()


def _print_winner(options: argparse.Namespace, winner: WinnerRecord) -> int:
    from offline_search.ledger import read_ledger
    from offline_search.report import as_markdown, read_report
    from vllm_autoprune.tpdsl.loading import load_state

    if options.output is not None and winner.state is not None:
        state = load_state(winner.state)
        write_file(options.output, state.dumps().encode())
    if options.json:
        print(as_json(winner.model_dump(mode="json", exclude={"clock"})))
    else:
        print(as_markdown(read_report(read_ledger(options.ledger))), end="")
    return 0


def _replay(options: argparse.Namespace) -> int:
    from offline_search.dataset import read_dataset
    from offline_search.ledger import read_ledger
    from offline_search.replay import recorded_settings, replay

    if options.ledger.exists() and options.ledger.stat().st_size:
        what, fix = "is where the replay would be written", "name a new file with --ledger"
        raise ConfigError("search", [Problem(str(options.ledger), what, fix)])
    # The order of the questions, and with --images their choice, depends on the seed.
    seed = recorded_settings(options.replay, read_ledger(options.replay)).seed
    dataset = read_dataset(options.data, seed, options.images)
    winner, before, after = asyncio.run(replay(options.replay, options.ledger, dataset))
    print(f"recording {before}\nreplay    {after}", file=sys.stderr)
    if before != after:
        raise SearchError(
            f"{options.replay}: its replay differs -> it holds records that its own search would "
            "not make; begin a new ledger"
        )
    return _print_winner(options, winner)


def _convert_mme(options: argparse.Namespace) -> int:
    from offline_search.dataset import convert_mme

    if options.mme is None:
        fix = "name the folder that has a folder for each category of MME"
        raise ConfigError("search", [Problem("--mme", "is missing", fix)])
    counts = convert_mme(options.mme, options.data, options.seed)
    if options.json:
        print(as_json(dict(counts)))
    else:
        print(", ".join(f"{count} questions in {split}" for split, count in counts.items()))
    return 0


def _dry_run(options: argparse.Namespace, settings: Settings, dataset: Dataset) -> int:
    from offline_search.proposer import Price
    from offline_search.replay import estimate_cost

    estimate = estimate_cost(settings, dataset, Price(*options.price))
    if options.json:
        figures = {"calls": estimate.calls, "prompt_tokens": estimate.prompt_tokens,
                   "completion_tokens": estimate.completion_tokens, "money": estimate.money,
                   "answers": dict(estimate.answers)}  # fmt: skip
        print(as_json({"messages": list(estimate.messages), **figures}))
        return 0
    for message in estimate.messages:
        print(f"--- {message['role']}\n{message['content']}\n")
    answers = ", ".join(f"{count} of {split}" for split, count in estimate.answers.items())
    print(format_paragraph(
        f"At most {estimate.calls} requests to the proposer, each for {estimate.reply}: about "
        f"{estimate.prompt_tokens} prompt tokens and {estimate.completion_tokens} completion "
        f"tokens, money {estimate.money:.4f}; repairs are extra. "
        f"Answers of the served model: {answers}."
    ))  # fmt: skip
    return 0


def _report(options: argparse.Namespace) -> int:
    from offline_search.ledger import read_ledger
    from offline_search.report import as_markdown, read_report
    from offline_search.report_page import as_html

    report = read_report(read_ledger(options.ledger))
    if options.output is not None:
        write_file(options.output, as_html(report).encode())
    if options.json:
        chosen = None if report.winner is None else report.winner.model_dump(mode="json")
        print(as_json({"chosen": chosen, "statuses": report.statuses, "causes": report.causes}))
    else:
        print(as_markdown(report), end="")
    return 0


COMMAND = Command(
    "find a state offline, with a language model, on a served model",
    _arguments,
    _run,
    epilog="Guide and format of the data folder: docs/search.md.",
)
