"""`search`: run, resume or replay an offline search for a state, and report on its ledger."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from offline_search.settings import (
    DEFAULT_LIST,
    STRATEGIES_WITH_LISTS,
    EvaluationOptions,
    ProposerOptions,
    SearchChoices,
    Settings,
)
from vllm_autoprune.cli.commands import Command
from vllm_autoprune.cli.flags import add_flags, flag_problems, read_flags
from vllm_autoprune.cli.output import as_json, format_paragraph, write_file
from vllm_autoprune.errors import ConfigError, Problem, SearchError

if TYPE_CHECKING:
    from offline_search.dataset import Dataset
    from offline_search.evaluator import ServedEvaluator
    from offline_search.ledger import WinnerRecord
    from offline_search.proposer import Proposer
    from vllm_autoprune.tpdsl.tokens import VisualTokens

_FLAGS = {"budgets": "--budget", "proposer": "--proposer-model"}


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
    add_flags(parser.add_argument_group("search"), SearchChoices, _FLAGS)
    add_flags(parser.add_argument_group("evaluation"), EvaluationOptions, _FLAGS)
    add_flags(parser.add_argument_group("proposer"), ProposerOptions, _FLAGS)


@dataclass(frozen=True, slots=True)
class _Flags:
    """The validated flags of a command."""

    search: SearchChoices
    evaluation: EvaluationOptions
    proposer: ProposerOptions


def _run(options: argparse.Namespace) -> int:
    if options.action == "report":
        return _report(options)
    flags = _read_flags(options)
    if flags.evaluation.data is None:
        fix = "name a folder with search.jsonl, validation.jsonl and test.jsonl"
        raise ConfigError("search", [Problem("--data", "is missing", fix)])
    if options.action == "mme":
        return _convert_mme(options, flags.evaluation.data, flags.search.seed)
    if options.replay is not None:
        return _replay(options, flags.evaluation.data, flags.evaluation.images)
    from offline_search.dataset import read_dataset

    settings = _build_settings(flags)
    dataset = read_dataset(flags.evaluation.data, settings.seed, flags.evaluation.images)
    if options.dry_run:
        return _dry_run(options, flags, settings, dataset)
    if options.ledger.exists() and options.ledger.stat().st_size and not options.resume:
        what, fix = "holds a search already", "add --resume, or name another ledger"
        raise ConfigError("search", [Problem(str(options.ledger), what, fix)])
    if not flags.evaluation.server_url:
        fix = "give the address of a vllm serve with --autoprune-requests states"
        raise ConfigError("search", [Problem("--server-url", "is missing", fix)])
    winner = asyncio.run(_run_search(options, flags, settings, dataset))
    return _print_winner(options, winner)


def _read_flags(options: argparse.Namespace) -> _Flags:
    """The flags; raises :class:`ConfigError` with every problem of a single one."""
    problems: list[Problem] = []
    models: list[BaseModel] = []
    for model in (SearchChoices, EvaluationOptions, ProposerOptions):
        try:
            models.append(read_flags(model, options))
        except ValidationError as error:
            problems += flag_problems(error, _FLAGS)
    if problems:
        raise ConfigError("search", problems)
    search, evaluation, proposer = models
    return _Flags(search, evaluation, proposer)  # type: ignore[arg-type]


def _build_settings(flags: _Flags) -> Settings:
    """The recorded settings; raises :class:`ConfigError` for flags that contradict each other."""
    from offline_search.strategies import STRATEGIES

    search, proposer = flags.search, flags.proposer
    name = proposer.proposer_model or ""
    if proposer.proposer_url is None and name:
        fix = "give --proposer-url, or leave it out"
        raise ConfigError("search", [Problem("--proposer-model", "has no endpoint", fix)])
    if proposer.proposer_url is not None and not name:
        fix = "name a model at --proposer-url"
        raise ConfigError("search", [Problem("--proposer-model", "is missing", fix)])
    if search.strategy.endswith("-code"):
        what = f"{search.strategy} writes programs, and a server measures states"
        fix = "give evoprompting-states or openevolve-states"
        raise ConfigError("search", [Problem("--strategy", what, fix)])
    strategy = STRATEGIES[search.strategy](Settings(proposer=name))
    if strategy.uses_proposer and not name:
        what = f"{search.strategy} needs a language model"
        fix = "give --proposer-url, or one of autoprune+, tpe and random"
        raise ConfigError("search", [Problem("--strategy", what, fix)])
    lists = strategy.uses_proposer and search.strategy in STRATEGIES_WITH_LISTS
    length = proposer.proposals_per_reply or (DEFAULT_LIST if lists else 1)
    try:
        return Settings(
            **dict(search),
            proposer=name if strategy.uses_proposer else "",
            proposals_per_reply=length,
            temperature=proposer.temperature,
        )
    except ValidationError as error:
        raise ConfigError("search", flag_problems(error, _FLAGS)) from None


async def _run_search(
    options: argparse.Namespace, flags: _Flags, settings: Settings, dataset: Dataset
) -> WinnerRecord:
    from offline_search.ledger import Ledger
    from offline_search.proposer import SpendingLimits
    from offline_search.report import ProgressLog
    from offline_search.search import Search

    async with contextlib.AsyncExitStack() as stack:
        ledger = stack.enter_context(Ledger(options.ledger))
        evaluator = _build_evaluator(flags.evaluation, dataset)
        stack.push_async_callback(evaluator.close)
        await evaluator.prepare()
        settings = settings.model_copy(update={"evaluator": evaluator.name})
        opened = _open_proposer(flags.proposer, settings, dataset)
        proposer = await stack.enter_async_context(opened)
        limits = SpendingLimits(flags.proposer.most_tokens, flags.proposer.most_money)
        progress = ProgressLog(lambda line: print(line, file=sys.stderr, flush=True))
        return await Search(settings, ledger, evaluator, proposer, limits, progress).run()


def _build_evaluator(options: EvaluationOptions, dataset: Dataset) -> ServedEvaluator:
    from offline_search.evaluator import ServedEvaluator

    probes: Sequence[VisualTokens] = ()
    if options.checkpoint is not None:
        from offline_search.rounds import probes_from_checkpoint

        probes = probes_from_checkpoint(options.checkpoint, options.text_tower, dataset)
    return ServedEvaluator(
        options.server_url,
        dataset,
        model=options.server_model,
        max_in_flight=options.at_once,
        probes=probes,
    )


@contextlib.asynccontextmanager
async def _open_proposer(
    options: ProposerOptions, settings: Settings, dataset: Dataset
) -> AsyncIterator[Proposer]:
    """Proposer of the search: the endpoint, or none."""
    from offline_search.proposer import EndpointProposer, EndpointSettings, Price
    from offline_search.replay import UnavailableBackend

    if not settings.proposer or options.proposer_url is None:
        yield UnavailableBackend(settings.evaluator, dataset)
        return
    endpoint = EndpointSettings(
        options.proposer_url,
        settings.proposer,
        os.environ.get(options.proposer_key_env) or "none",
        settings.temperature,
        settings.reply_tokens * settings.proposals_per_reply,
        Price(*options.price),
        seeded=not options.no_seeds,
    )
    proposer = EndpointProposer(endpoint)
    try:
        await proposer.prepare()
        yield proposer
    finally:
        await proposer.close()


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


def _replay(options: argparse.Namespace, data: Path, images: int | None) -> int:
    from offline_search.dataset import read_dataset
    from offline_search.ledger import read_ledger
    from offline_search.replay import recorded_settings, replay

    if options.ledger.exists() and options.ledger.stat().st_size:
        what, fix = "is where the replay would be written", "name a new file with --ledger"
        raise ConfigError("search", [Problem(str(options.ledger), what, fix)])
    # The order of the questions, and with --images their choice, depends on the seed.
    seed = recorded_settings(options.replay, read_ledger(options.replay)).seed
    dataset = read_dataset(data, seed, images)
    winner, before, after = asyncio.run(replay(options.replay, options.ledger, dataset))
    print(f"recording {before}\nreplay    {after}", file=sys.stderr)
    if before != after:
        raise SearchError(
            f"{options.replay}: its replay differs -> it holds records that its own search would "
            "not make; begin a new ledger"
        )
    return _print_winner(options, winner)


def _convert_mme(options: argparse.Namespace, data: Path, seed: int) -> int:
    from offline_search.dataset import convert_mme

    if options.mme is None:
        fix = "name the folder that has a folder for each category of MME"
        raise ConfigError("search", [Problem("--mme", "is missing", fix)])
    counts = convert_mme(options.mme, data, seed)
    if options.json:
        print(as_json(dict(counts)))
    else:
        print(", ".join(f"{count} questions in {split}" for split, count in counts.items()))
    return 0


def _dry_run(
    options: argparse.Namespace, flags: _Flags, settings: Settings, dataset: Dataset
) -> int:
    from offline_search.proposer import Price
    from offline_search.replay import estimate_cost

    estimate = estimate_cost(settings, dataset, Price(*flags.proposer.price))
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
