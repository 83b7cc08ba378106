"""`search`: run, resume or replay an offline search for a state, and report on its ledger."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from pydantic import Field, SecretStr, ValidationError

from offline_search.settings import (
    DEFAULT_LIST,
    STRATEGIES_WITH_LISTS,
    EvaluationOptions,
    ProposerOptions,
    SearchChoices,
    Settings,
)
from vllm_autoprune.cli.flags import (
    add_connection_flags,
    command,
)
from vllm_autoprune.cli.output import (
    check_writable,
    format_paragraphs,
    print_result,
    write_file,
)
from vllm_autoprune.connection import Connection
from vllm_autoprune.errors import ConfigError, SearchError
from vllm_autoprune.flags import add_flags, flag_problems, read_flags
from vllm_autoprune.tpdsl.tokens import Positions

if TYPE_CHECKING:
    from offline_search.dataset import Dataset
    from offline_search.evaluator import ServedEvaluator
    from offline_search.ledger import WinnerRecord
    from offline_search.probes import Probes
    from offline_search.search import Replay
    from vllm_autoprune.tpdsl.state import PruningState

_NAMES = {"budgets": "--budget", "proposer": "--proposer-model"}
_SERVER = "give the address of a vllm serve with --autoprune-requests states"
_DATA = "name a file of questions, or a folder with search.jsonl, validation.jsonl and test.jsonl"

_TIMED = 32
"""Questions that a dry run asks at once to estimate the time of a search."""


class _Choices(SearchChoices):
    """Choices of a new search, with ``positions`` "true" by default."""

    positions: Positions = Field(
        default="true", description=SearchChoices.model_fields["positions"].description
    )


class _Flags(ProposerOptions, EvaluationOptions, _Choices, Connection):
    """The flags of a command."""


def _add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    text = (
        "run a search (the default), report on a ledger, or write MME's files as --data"
    )
    add("action", nargs="?", choices=("run", "report", "mme"), default="run", help=text)
    add(
        "--ledger",
        type=Path,
        default=Path("ledger.jsonl"),
        help="file that holds the search",
    )
    add("--resume", action="store_true", help="resume the ledger's search")
    text = "replay a recorded search without network"
    add("--replay", type=Path, metavar="LEDGER", help=text)
    text = "print prompt, cost and, of --server-url, time as estimates, and stop"
    add("--dry-run", action="store_true", help=text)
    text = "write the state, or the report as HTML"
    add("-o", "--output", type=Path, metavar="FILE", help=text)
    text = "with `mme`: the folder of MME's categories"
    add("--mme", type=Path, metavar="FOLDER", help=text)
    for title, model in (
        ("search", _Choices),
        ("evaluation", EvaluationOptions),
        ("proposer", ProposerOptions),
    ):
        add_flags(parser.add_argument_group(title), model, _NAMES)
    add_connection_flags(parser)


@command(
    "search",
    _add_arguments,
    epilog="Guide and format of the data folder: docs/search.md.",
)
def _run_search(options: Namespace) -> int:
    """Find a state offline, with a language model, on a served model."""
    if options.output is not None:
        check_writable(options.output)
    if options.action == "report":
        return _print_report(options)
    try:
        flags = read_flags(_Flags, options)
    except ValidationError as error:
        raise ConfigError("search", flag_problems(error, _NAMES)) from None
    if flags.data is None:
        raise ConfigError.of("--data", "is missing", _DATA, subject="search")
    if options.action == "mme":
        return _convert_mme(options, flags, flags.data)
    if options.replay is not None:
        replayed = _replay(options, flags, flags.data)
        return _print_winner(options, replayed.winner, replayed.dataset)
    return _start_search(options, flags, flags.data)


def _start_search(options: Namespace, flags: _Flags, data: Path) -> int:
    """Begin or resume a search on a served model, or estimate its cost."""
    from offline_search.dataset import read_dataset

    settings = _build_settings(flags)
    dataset = read_dataset(data, settings.seed, flags.images)
    if dataset.note:
        print(dataset.note, file=sys.stderr)
    dataset = dataset.in_blocks(settings.block, settings.seed)
    if options.dry_run:
        return _print_estimate(options, flags, settings, dataset)
    if _holds_search(options.ledger) and not options.resume:
        raise ConfigError.of(
            str(options.ledger),
            "holds a search already",
            "add --resume, or name another ledger",
            subject="search",
        )
    if not flags.server_url:
        raise ConfigError.of("--server-url", "is missing", _SERVER, subject="search")
    try:
        winner = asyncio.run(_search(options.ledger, flags, settings, dataset))
    except KeyboardInterrupt:
        text = f"stopped; {options.ledger} keeps what was measured, --resume goes on from it"
        raise KeyboardInterrupt(text) from None
    return _print_winner(options, winner, dataset)


def _print_report(options: Namespace) -> int:
    """Print the report on a ledger; with ``--output`` it is also written as HTML."""
    from offline_search.ledger import read_ledger
    from offline_search.report import read_report

    report = read_report(read_ledger(options.ledger))
    document = report.document()
    if options.output is not None:
        write_file(options.output, document.render_html())
    winner = report.winner
    record = {
        "chosen": None if winner is None else winner.model_dump(mode="json"),
        "statuses": report.statuses,
        "causes": report.causes,
    }
    print_result(options, record, document.render_markdown().rstrip())
    return 0


def _convert_mme(options: Namespace, flags: _Flags, data: Path) -> int:
    """Convert the questions of MME to the files of a search, in the folder ``data``."""
    from offline_search.dataset import convert_mme

    if options.mme is None:
        fix = "name the folder that has a folder for each category of MME"
        raise ConfigError.of("--mme", "is missing", fix, subject="search")
    counts = convert_mme(options.mme, data, flags.seed)
    text = ", ".join(f"{count} questions in {split}" for split, count in counts.items())
    print_result(options, counts, text)
    return 0


def _holds_search(ledger: Path) -> bool:
    """Whether a ledger is a file with records."""
    return ledger.exists() and ledger.stat().st_size > 0


def _replay(options: Namespace, flags: _Flags, data: Path) -> Replay:
    """Replay a recorded search into the ledger; raises SearchError if they differ."""
    from offline_search.search import replay

    if _holds_search(options.ledger):
        raise ConfigError.of(
            str(options.ledger),
            "is where the replay would be written",
            "name a new file with --ledger",
            subject="search",
        )
    result = asyncio.run(replay(options.replay, options.ledger, data, flags.images))
    text = f"recording {result.recorded}\nreplay    {result.replayed}"
    print(text, file=sys.stderr)
    if result.recorded != result.replayed:
        raise SearchError.of(
            str(options.replay),
            "its replay differs",
            "it holds records that its own search would not make; begin a new ledger",
        )
    return result


def _print_winner(options: Namespace, winner: WinnerRecord, dataset: Dataset) -> int:
    """Print the search's report; write the state that it chose, and beside it the test split."""
    from offline_search.ledger import read_ledger
    from offline_search.report import read_report
    from vllm_autoprune.tpdsl.loading import load_state

    state = dataset.mark_chosen(load_state(winner.state))
    if options.output is not None:
        questions = options.output.with_suffix(".test.jsonl")
        content = dataset.format_split("test", questions.parent)
        write_file(options.output, state.dumps())
        write_file(questions, content)
        note = f"{questions}: the test questions, for eval --data; other questions of the data "
        print(
            f"{note}chose {options.output}, and eval leaves them out", file=sys.stderr
        )
    text = read_report(read_ledger(options.ledger)).document().render_markdown()
    record = winner.model_dump(mode="json", exclude={"clock"})
    record["state"] = state.model_dump(mode="json")
    print_result(options, record, text.rstrip())
    return 0


def _print_estimate(
    options: Namespace, flags: _Flags, settings: Settings, dataset: Dataset
) -> int:
    """Print what a search would ask for and what that costs."""
    from offline_search.search import estimate_cost

    seconds_of_answer: tuple[float, float] | None = None
    if flags.server_url:
        models, seconds_of_answer = asyncio.run(_time_answers(flags, settings, dataset))
        settings = settings.model_copy(update={"models": models})
    messages, calls, cost, answers = estimate_cost(settings, dataset, flags.price)
    if not calls:
        messages = ()  # there is no proposer to read them
    reply = "one proposal"
    if settings.proposals_per_reply > 1:
        reply = f"up to {settings.proposals_per_reply} proposals"
    counts = ", ".join(f"{count} of {split}" for split, count in answers.items())
    text = (
        f"At most {calls} requests to the proposer, each for {reply}: about "
        f"{cost.prompt_tokens} prompt tokens and {cost.completion_tokens} completion "
        f"tokens, money {cost.money:.4f}; repairs are extra."
    )
    if not calls:
        text = "No language model is asked."
    text += f" Answers of the served model: {counts}."
    seconds = None
    if seconds_of_answer is not None:
        unpruned_seconds, pruned_seconds = seconds_of_answer
        # An unpruned model answers every question once.
        unpruned = sum(map(len, dataset.splits.values())) * max(len(models), 1)
        pruned = sum(answers.values()) - unpruned
        seconds = round(unpruned * unpruned_seconds + pruned * pruned_seconds, 1)
        duration = f"{seconds:.0f} s"
        if seconds >= 100:
            duration = f"{seconds / 60:.0f} min"
        text += (
            f" The search takes about {duration}, as the first questions took now; the "
            "proposer's time comes to that."
        )
    record = {
        "messages": messages,
        "calls": calls,
        **dict(cost),
        "answers": answers,
        "seconds": seconds,
    }
    prompts = [f"--- {message['role']}\n{message['content']}" for message in messages]
    print_result(options, record, *prompts, format_paragraphs([text]))
    return 0


def _build_settings(flags: _Flags) -> Settings:
    """Settings to record; raises :class:`ConfigError` for flags that contradict each other."""
    from offline_search.strategies import STRATEGIES

    name = flags.proposer_model or ""
    if bool(name) != (flags.proposer_url is not None):
        what = "has no endpoint" if name else "is missing"
        fix = "give --proposer-url and a model there, or neither"
        raise ConfigError.of("--proposer-model", what, fix, subject="search")
    uses_proposer = STRATEGIES[flags.strategy](Settings(proposer=name)).uses_proposer
    if uses_proposer and not name:
        fix = "give --proposer-url, or one of autoprune+, tpe and random"
        raise ConfigError.of(
            "--strategy",
            f"{flags.strategy} needs a language model",
            fix,
            subject="search",
        )
    default_length = 1
    if uses_proposer and flags.strategy in STRATEGIES_WITH_LISTS:
        default_length = DEFAULT_LIST
    proposer_options = ""
    if uses_proposer and flags.proposer_options:
        proposer_options = json.dumps(flags.proposer_options, sort_keys=True)
    choices = {
        field: value for field, value in flags if field in SearchChoices.model_fields
    }
    try:
        return Settings(
            **choices,
            proposer=name if uses_proposer else "",
            proposals_per_reply=flags.proposals_per_reply or default_length,
            temperature=flags.temperature,
            reply_tokens=flags.reply_tokens,
            proposer_options=proposer_options,
        )
    except ValidationError as error:
        raise ConfigError("search", flag_problems(error, _NAMES)) from None


@contextlib.asynccontextmanager
async def _open_evaluator(
    flags: _Flags, dataset: Dataset, probes: Probes | None = None
) -> AsyncIterator[ServedEvaluator]:
    """Open an evaluator on the servers, after each has answered a request with a state."""
    from offline_search.evaluator import ServedEvaluator

    evaluator = ServedEvaluator(
        flags.server_url,
        dataset,
        model=flags.server_model,
        connection=flags,
        probes=probes,
    )
    try:
        await evaluator.prepare()
        yield evaluator
    finally:
        await evaluator.close()


async def _time_answers(
    flags: _Flags, settings: Settings, dataset: Dataset
) -> tuple[tuple[str, ...], tuple[float, float]]:
    """The models if there are several, and mean seconds an answer, in a batch.

    The seconds are those of unpruned models, then those of the base policy.
    """
    from offline_search.candidates import base_state
    from offline_search.evaluator import EvaluationJob

    count = min(_TIMED, len(dataset.splits["search"]))
    async with _open_evaluator(flags, dataset) as evaluator:

        async def measure(candidate: PruningState | None, budget: int | str) -> float:
            start = time.monotonic()
            await evaluator.evaluate(
                EvaluationJob(candidate, budget, "search", 0, count)
            )
            return (time.monotonic() - start) / count

        for budget in settings.budgets:
            await evaluator.check_budget(budget)
        # First, so that the images are new to the server, as they are in a search.
        unpruned = await measure(None, 0)
        base = base_state(settings)
        pruned = mean([await measure(base, budget) for budget in settings.budgets])
        return evaluator.models, (unpruned, pruned)


async def _search(
    path: Path, flags: _Flags, settings: Settings, dataset: Dataset
) -> WinnerRecord:
    """Run a search and return its winner; first check that the servers accept its requests."""
    from offline_search.endpoint import EndpointProposer, EndpointSettings
    from offline_search.ledger import Ledger, WinnerRecord
    from offline_search.probes import probes_from_checkpoint
    from offline_search.report import ProgressLog
    from offline_search.search import Search

    def write(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    probes: Probes | None = None
    if flags.checkpoint is not None:
        probes = probes_from_checkpoint(flags.checkpoint, flags.text_tower, dataset)
    connection = Connection(  # to the proposer, whose key is in the environment
        api_key=SecretStr(os.environ.get(flags.proposer_key_env, "")),
        header=flags.proposer_header,
        ca_file=flags.ca_file,
        insecure=flags.insecure,
    )
    async with contextlib.AsyncExitStack() as stack:
        ledger = stack.enter_context(Ledger(path))
        evaluator = await stack.enter_async_context(
            _open_evaluator(flags, dataset, probes)
        )
        if not ledger.records:
            for budget in settings.budgets:
                await evaluator.check_budget(budget)
        changes: dict[str, object] = {
            "evaluator": evaluator.name,
            "models": evaluator.models,
            "default_state": evaluator.find_default_state(),
        }
        proposer: EndpointProposer | None = None
        if settings.proposer and flags.proposer_url is not None:
            if not probes and ledger.find(WinnerRecord, "chosen") is None:
                await evaluator.read_image_facts()  # for prompts that are still to come
            endpoint = EndpointSettings(
                flags.proposer_url,
                settings.proposer,
                connection,
                settings.temperature,
                settings.reply_tokens * settings.proposals_per_reply,
                flags.price,
                unsent=frozenset({"seed"} if flags.no_seeds else ()),
                options=flags.proposer_options or {},
            )
            proposer = await stack.enter_async_context(EndpointProposer(endpoint))
            await proposer.prepare()
            changes["unsent"] = tuple(sorted(proposer.unsent))
        search = Search(
            settings.model_copy(update=changes),
            ledger,
            evaluator,
            proposer,
            flags.most_money,
            ProgressLog(write),
        )
        return await search.run()
