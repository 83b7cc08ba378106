"""`search`: run, resume or replay an offline search for a state, and report on its ledger."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
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
    add_flags,
    command,
    flag_problems,
    read_flags,
)
from vllm_autoprune.cli.output import (
    check_writable,
    format_paragraphs,
    print_result,
    write_file,
)
from vllm_autoprune.connection import Connection
from vllm_autoprune.errors import ConfigError, Problem, SearchError
from vllm_autoprune.tpdsl.tokens import Positions

if TYPE_CHECKING:
    from offline_search.dataset import Dataset
    from offline_search.evaluator import ServedEvaluator
    from offline_search.ledger import WinnerRecord
    from vllm_autoprune.tpdsl.state import PruningState
    from vllm_autoprune.tpdsl.tokens import VisualTokens

_NAMES = {"budgets": "--budget", "proposer": "--proposer-model"}
_SERVER = "give the address of a vllm serve with --autoprune-requests states"
_DATA = "name a file of questions, or a folder with search.jsonl, validation.jsonl and test.jsonl"

_TIMED = 32
"""Questions that a dry run asks at once to estimate the time of a search."""


class _Choices(SearchChoices):
    """Choices of a new search."""

    positions: Positions = Field(
        default="true", description=SearchChoices.model_fields["positions"].description
    )


class _Flags(ProposerOptions, EvaluationOptions, _Choices, Connection):
    """The flags of a command."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
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
def _run_search(options: argparse.Namespace) -> int:  # noqa: C901, PLR0915
    """Find a state offline, with a language model, on a served model."""
    from offline_search.ledger import read_ledger
    from offline_search.report import read_report

    if options.output is not None:
        check_writable(options.output)
    if options.action == "report":
        report = read_report(read_ledger(options.ledger))
        if options.output is not None:
            write_file(options.output, report.document().render_html())
        chosen = (
            None if report.winner is None else report.winner.model_dump(mode="json")
        )
        record = {
            "chosen": chosen,
            "statuses": report.statuses,
            "causes": report.causes,
        }
        print_result(options, record, report.document().render_markdown().rstrip())
        return 0
    try:
        flags = read_flags(_Flags, options)
    except ValidationError as error:
        raise ConfigError("search", flag_problems(error, _NAMES)) from None
    if flags.data is None:
        raise _refusal("--data", "is missing", _DATA)
    from offline_search.dataset import convert_mme, read_dataset

    if options.action == "mme":
        if options.mme is None:
            fix = "name the folder that has a folder for each category of MME"
            raise _refusal("--mme", "is missing", fix)
        counts = convert_mme(options.mme, flags.data, flags.seed)
        print_result(
            options,
            counts,
            ", ".join(f"{n} questions in {s}" for s, n in counts.items()),
        )
        return 0
    if options.replay is not None:
        from offline_search.search import replay

        if options.ledger.exists() and options.ledger.stat().st_size:
            what = "is where the replay would be written"
            raise _refusal(str(options.ledger), what, "name a new file with --ledger")
        winner, before, after = asyncio.run(
            replay(options.replay, options.ledger, flags.data, flags.images)
        )
        print(f"recording {before}\nreplay    {after}", file=sys.stderr)
        if before != after:
            raise SearchError(
                f"{options.replay}: its replay differs -> it holds records that its own search "
                "would not make; begin a new ledger"
            )
    else:
        settings = _build_settings(flags)
        dataset = read_dataset(flags.data, settings.seed, flags.images)
        if dataset.note:
            print(dataset.note, file=sys.stderr)
        dataset = dataset.in_blocks(settings.block, settings.seed)
        if options.dry_run:
            from offline_search.search import estimate_cost

            messages, calls, cost, answers = estimate_cost(
                settings, dataset, flags.price
            )
            seconds = None
            if flags.server_url:
                unpruned, pruned = asyncio.run(_time_answers(flags, settings, dataset))
                count = sum(
                    map(len, dataset.splits.values())
                )  # of the unpruned model, each once
                others = sum(answers.values()) - count
                seconds = round(count * unpruned + others * pruned, 1)
            length = settings.proposals_per_reply
            reply = "one proposal" if length == 1 else f"up to {length} proposals"
            listed = ", ".join(
                f"{count} of {split}" for split, count in answers.items()
            )
            about = (
                f"At most {calls} requests to the proposer, each for {reply}: about "
                f"{cost.prompt_tokens} prompt tokens and {cost.completion_tokens} completion "
                f"tokens, money {cost.money:.4f}; repairs are extra. Answers of the served model: "
                f"{listed}."
            )
            if seconds is not None:
                minutes = (
                    f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"
                )
                about += (
                    f" The search takes about {minutes}, as the first questions took now; the "
                    "proposer's time comes to that."
                )
            prompts = [
                f"--- {message['role']}\n{message['content']}" for message in messages
            ]
            estimate = {
                "messages": messages,
                "calls": calls,
                **dict(cost),
                "answers": answers,
            }
            estimate["seconds"] = seconds
            print_result(options, estimate, *prompts, format_paragraphs([about]))
            return 0
        if (
            options.ledger.exists()
            and options.ledger.stat().st_size
            and not options.resume
        ):
            fix = "add --resume, or name another ledger"
            raise _refusal(str(options.ledger), "holds a search already", fix)
        if not flags.server_url:
            raise _refusal("--server-url", "is missing", _SERVER)
        try:
            winner = asyncio.run(_search(options.ledger, flags, settings, dataset))
        except KeyboardInterrupt:
            text = f"stopped; {options.ledger} keeps what was measured, --resume goes on from it"
            raise KeyboardInterrupt(text) from None
    if options.output is not None:
        from vllm_autoprune.tpdsl.loading import load_state

        write_file(options.output, load_state(winner.state).dumps())
    text = read_report(read_ledger(options.ledger)).document().render_markdown()
    print_result(
        options, winner.model_dump(mode="json", exclude={"clock"}), text.rstrip()
    )
    return 0


def _refusal(where: str, what: str, fix: str) -> ConfigError:
    return ConfigError("search", [Problem(where, what, fix)])


def _build_settings(flags: _Flags) -> Settings:
    """The recorded settings; raises :class:`ConfigError` for flags that contradict each other."""
    from offline_search.strategies import STRATEGIES

    name = flags.proposer_model or ""
    if bool(name) != (flags.proposer_url is not None):
        what = "has no endpoint" if name else "is missing"
        fix = "give --proposer-url and a model there, or neither"
        raise _refusal("--proposer-model", what, fix)
    uses_proposer = STRATEGIES[flags.strategy](Settings(proposer=name)).uses_proposer
    if uses_proposer and not name:
        fix = "give --proposer-url, or one of autoprune+, tpe and random"
        raise _refusal("--strategy", f"{flags.strategy} needs a language model", fix)
    lists = uses_proposer and flags.strategy in STRATEGIES_WITH_LISTS
    options = flags.proposer_options if uses_proposer else None
    try:
        return Settings(
            **{
                field: value
                for field, value in flags
                if field in SearchChoices.model_fields
            },
            proposer=name if uses_proposer else "",
            proposals_per_reply=flags.proposals_per_reply
            or (DEFAULT_LIST if lists else 1),
            temperature=flags.temperature,
            reply_tokens=flags.reply_tokens,
            proposer_options=json.dumps(options, sort_keys=True) if options else "",
        )
    except ValidationError as error:
        raise ConfigError("search", flag_problems(error, _NAMES)) from None


@contextlib.asynccontextmanager
async def _open_evaluator(
    flags: _Flags, dataset: Dataset, probes: Sequence[VisualTokens] = ()
) -> AsyncIterator[ServedEvaluator]:
    """The evaluator on the given servers, once each has answered a request with a state."""
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
) -> tuple[float, float]:
    """Seconds of an answer of the unpruned model and of the base policy, of several at once."""
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
        unpruned = await measure(None, 0)  # the images are new, as they are then
        base = base_state(settings)
        return unpruned, mean(
            [await measure(base, budget) for budget in settings.budgets]
        )


async def _search(
    path: Path, flags: _Flags, settings: Settings, dataset: Dataset
) -> WinnerRecord:
    from offline_search.endpoint import EndpointProposer, EndpointSettings
    from offline_search.ledger import Ledger
    from offline_search.report import ProgressLog
    from offline_search.rounds import probes_from_checkpoint
    from offline_search.search import Search

    def write(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    checkpoint = flags.checkpoint
    tower = flags.text_tower
    probes = (
        probes_from_checkpoint(checkpoint, tower, dataset)
        if checkpoint is not None
        else ()
    )
    async with contextlib.AsyncExitStack() as stack:
        ledger = stack.enter_context(Ledger(path))
        evaluator = await stack.enter_async_context(
            _open_evaluator(flags, dataset, probes)
        )
        if not ledger.records:
            for budget in settings.budgets:
                await evaluator.check_budget(budget)
        settings = settings.model_copy(update={"evaluator": evaluator.name})
        proposer: EndpointProposer | None = None
        if settings.proposer and flags.proposer_url is not None:
            endpoint = EndpointSettings(
                flags.proposer_url,
                settings.proposer,
                Connection(
                    api_key=SecretStr(os.environ.get(flags.proposer_key_env, "")),
                    header=flags.proposer_header,
                    ca_file=flags.ca_file,
                    insecure=flags.insecure,
                ),
                settings.temperature,
                settings.reply_tokens * settings.proposals_per_reply,
                flags.price,
                unsent=frozenset({"seed"} if flags.no_seeds else ()),
                options=flags.proposer_options or {},
            )
            proposer = await stack.enter_async_context(EndpointProposer(endpoint))
            await proposer.prepare()
            settings = settings.model_copy(
                update={"unsent": tuple(sorted(proposer.unsent))}
            )
        progress = ProgressLog(write)
        money = flags.most_money
        return await Search(
            settings, ledger, evaluator, proposer, money, progress
        ).run()
