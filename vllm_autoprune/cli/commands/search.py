"""`search`: find a state offline, with a language model, on a served model; and report on it.

Knows nothing about searching: it puts together what the options name.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_autoprune.cli.command import Command
from vllm_autoprune.cli.files import write
from vllm_autoprune.cli.render import as_json, paragraph
from vllm_autoprune.cli.search_options import (
    evaluator,
    measuring_arguments,
    proposer,
    proposer_arguments,
    search_arguments,
    settings_and_data,
)
from vllm_autoprune.errors import ConfigError, Problem, SearchError

if TYPE_CHECKING:
    from offline_search.examples import Dataset
    from offline_search.records import Chosen
    from offline_search.settings import Settings


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=("run", "report"),
        default="run",
        help="run a search (the default), or report on a ledger",
    )
    parser.add_argument(
        "--ledger", type=Path, default=Path("search.jsonl"), help="file that holds the search"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the ledger's search")
    parser.add_argument(
        "--replay", type=Path, metavar="LEDGER", help="run a recorded search again, without network"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show the prompt and what it will cost, and stop"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="state, or report page")
    search_arguments(parser.add_argument_group("search"))
    measuring_arguments(parser.add_argument_group("measuring"))
    proposer_arguments(parser.add_argument_group("proposer"))


def _run(options: argparse.Namespace) -> int:
    if options.action == "report":
        return _report(options)
    if options.data is None:
        fix = "name a folder with search.jsonl, validation.jsonl and test.jsonl"
        raise ConfigError("search", [Problem("--data", "is missing", fix)])
    if options.replay is not None:
        return _replay(options)
    settings, dataset = settings_and_data(options)
    if options.dry_run:
        return _dry_run(options, settings, dataset)
    if options.ledger.exists() and options.ledger.stat().st_size and not options.resume:
        what, fix = "holds a search already", "add --resume, or name another ledger"
        raise ConfigError("search", [Problem(str(options.ledger), what, fix)])
    if not options.server_url:
        fix = "give the address of a vllm serve with --autoprune-requests states"
        raise ConfigError("search", [Problem("--server-url", "is missing", fix)])
    return _told(options, asyncio.run(_searched(options, settings, dataset)))


async def _searched(options: argparse.Namespace, settings: Settings, dataset: Dataset) -> Chosen:
    from offline_search.ledger import Ledger
    from offline_search.progress import Progress
    from offline_search.proposers.asking import Limits
    from offline_search.search import Search

    async with contextlib.AsyncExitStack() as stack:
        ledger = stack.enter_context(Ledger(options.ledger))
        measures = evaluator(options, dataset)
        stack.push_async_callback(measures.close)
        await measures.prepare()
        settings = settings.model_copy(update={"evaluator": measures.name})
        proposes = await stack.enter_async_context(proposer(options, settings, dataset))
        limits = Limits(options.most_tokens, options.most_money)
        watch = Progress(lambda line: print(line, file=sys.stderr, flush=True))
        return await Search(settings, ledger, measures, proposes, limits, watch).run()


def _told(options: argparse.Namespace, chosen: Chosen) -> int:
    from offline_search.ledger import read
    from offline_search.report import as_markdown, reading
    from vllm_autoprune.tpdsl.states.load import load_state

    if options.output is not None:
        state = load_state(chosen.state)
        write(options.output, state.dumps().encode())
    if options.json:
        print(as_json(chosen.model_dump(mode="json", exclude={"clock"})))
    else:
        print(as_markdown(reading(read(options.ledger))), end="")
    return 0


def _replay(options: argparse.Namespace) -> int:
    from offline_search.examples import read_dataset
    from offline_search.ledger import Ledger
    from offline_search.replay import replay, settings_of

    if options.ledger.exists() and options.ledger.stat().st_size:
        what, fix = "is where the replay would be written", "name a new file with --ledger"
        raise ConfigError("search", [Problem(str(options.ledger), what, fix)])
    with Ledger(options.replay) as recorded:
        seed = settings_of(recorded).seed
    dataset = read_dataset(options.data, seed, options.images)
    chosen, before, after = asyncio.run(replay(options.replay, options.ledger, dataset))
    print(f"recording {before}\nreplay    {after}", file=sys.stderr)
    if before != after:
        raise SearchError(
            f"{options.replay}: its replay differs -> it holds records that its own search would "
            "not make; begin a new ledger"
        )
    return _told(options, chosen)


def _dry_run(options: argparse.Namespace, settings: Settings, dataset: Dataset) -> int:
    from offline_search.estimate import estimate
    from offline_search.proposers.endpoint import Price

    found = estimate(settings, dataset, Price(*options.price))
    if options.json:
        counted = {"calls": found.calls, "prompt_tokens": found.prompt_tokens,
                   "completion_tokens": found.completion_tokens, "money": found.money,
                   "answers": dict(found.answers)}  # fmt: skip
        print(as_json({"messages": list(found.messages), **counted}))
        return 0
    for message in found.messages:
        print(f"--- {message['role']}\n{message['content']}\n")
    answers = ", ".join(f"{count} of {split}" for split, count in found.answers.items())
    print(paragraph(
        f"At most {found.calls} proposals, about {found.prompt_tokens} tokens read and "
        f"{found.completion_tokens} written, money {found.money:.4f}; repairs come on top. "
        f"Answers of the served model: {answers}."
    ))  # fmt: skip
    return 0


def _report(options: argparse.Namespace) -> int:
    from offline_search.ledger import read
    from offline_search.report import as_html, as_markdown, reading

    found = reading(read(options.ledger))
    if options.output is not None:
        write(options.output, as_html(found).encode())
    if options.json:
        chosen = None if found.chosen is None else found.chosen.model_dump(mode="json")
        print(as_json({"chosen": chosen, "statuses": found.statuses, "causes": found.causes}))
    else:
        print(as_markdown(found), end="")
    return 0


COMMAND = Command(
    "find a state offline, with a language model, on a served model",
    _arguments,
    _run,
    epilog="How to, and how the data folder looks: docs/search.md.",
)
