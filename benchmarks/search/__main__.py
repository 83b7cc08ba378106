"""Command ``python -m benchmarks.search``: comparisons of search strategies, and their tables."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.accuracy.yardsticks.catalogue import open_yardstick
from benchmarks.search.arguments import build_parser
from benchmarks.search.candidate_table import as_markdown as candidates_as_markdown
from benchmarks.search.comparison import needs_proposer
from benchmarks.search.results import read_results
from benchmarks.search.scenes import write_data
from benchmarks.search.study import (
    ABLATIONS,
    PER_ROUND,
    RELEASED,
    Study,
    format_tables,
)
from benchmarks.zoo.states import QUOTAS
from offline_search.dataset import Split
from offline_search.settings import DEFAULT_LIST, Settings
from vllm_autoprune.errors import AutopruneError, SearchError

if TYPE_CHECKING:
    from offline_search.proposer import EndpointProposer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns the exit status, 1 after an error."""
    options = build_parser(__doc__).parse_args(arguments)
    try:
        _run_command(options)
    except AutopruneError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _run_command(options: argparse.Namespace) -> None:
    if options.command == "data":
        write_data(options.out, _scenes(options), each=options.each)
    elif options.command == "compare":
        _run_comparison(options)
    elif options.command == "confirm":
        _confirm(options)
    elif options.command == "candidates":
        print(candidates_as_markdown(options.ledgers), end="")
    elif options.command == "study":
        _run_study(options)
    elif options.command == "ablations":
        _run_ablations(options)
    if options.command in ("compare", "table"):
        print(format_tables(options.out, options.strategies, _seeds(options)), end="")


def _scenes(options: argparse.Namespace) -> dict[Split, int]:
    search, validation, test = options.scenes
    return {"search": search, "validation": validation, "test": test}


def _confirm(options: argparse.Namespace) -> None:
    from benchmarks.search.comparison import CachingEvaluator
    from benchmarks.search.confirmation import as_markdown, confirm
    from benchmarks.search.yardstick_evaluator import YardstickEvaluator

    bases = sorted({one.settings.base_policy for one in read_results(options.out).values()})
    if len(bases) != 1:
        raise SearchError(
            f"{options.out}: its searches have {len(bases)} base policies ({', '.join(bases)}) -> "
            "give the folder of a comparison, which has one"
        )
    images: dict[Split, int] = {"search": 1, "validation": 1, "test": options.images}
    yardstick = open_yardstick(options.yardstick, options.checkpoint)
    evaluator = YardstickEvaluator(yardstick, images, each=1, base_policy=bases[0])
    # Searches may have the same winner.
    confirm(options.out, CachingEvaluator(evaluator))
    print(as_markdown(options.out, options.strategies, _seeds(options)), end="")


def _run_study(options: argparse.Namespace) -> None:
    study = Study(
        options.out,
        options.strategies,
        _seeds(options),
        options.rounds,
        _proposer_name(options),
        proposals_per_reply=_list_length(options),
        concurrency=options.concurrency,
        base_policy=options.base_policy,
    )
    connect: Callable[[], EndpointProposer] | None = None
    if study.needs_proposer(options.yardsticks, options.budgets):
        _require_endpoint(options)
        connect = partial(_open_endpoint, options, PER_ROUND * study.concurrency)
    for yardstick in options.yardsticks:
        for budget in options.budgets:
            print(study.run(yardstick, budget, connect), flush=True)


def _run_ablations(options: argparse.Namespace) -> None:
    base_policy, budget = RELEASED[options.yardstick]
    study = Study(
        options.out,
        ABLATIONS,
        _seeds(options),
        options.rounds,
        base_policy=base_policy,
        quotas=QUOTAS,
    )
    print(study.run(options.yardstick, budget, None))


def _require_endpoint(options: argparse.Namespace) -> None:
    if not options.proposer_url:
        raise SearchError(
            f"--strategies {' '.join(options.strategies)}: some ask a language model -> give "
            "--proposer-url, or leave them out"
        )


def _open_endpoint(options: argparse.Namespace, requests: int) -> EndpointProposer:
    """The language model, asked for at most so many replies at once."""
    from offline_search.proposer import EndpointProposer, EndpointSettings

    return EndpointProposer(
        EndpointSettings(
            options.proposer_url,
            _proposer_name(options),
            reply_tokens=Settings().reply_tokens * _list_length(options),
            max_in_flight=requests,
            seeded=not options.no_seeds,
        )
    )


def _seeds(options: argparse.Namespace) -> range:
    return range(options.first_seed, options.first_seed + options.seeds)


def _proposer_name(options: argparse.Namespace) -> str:
    """The model's name, of which settings and results keep a record."""
    if options.proposer_url and not options.proposer_model:
        raise SearchError("--proposer-url: which model? -> give --proposer-model")
    return options.proposer_model or ""


def _list_length(options: argparse.Namespace) -> int:
    """Proposals of a reply."""
    length = options.proposals_per_reply
    if length is not None and not options.proposer_url:
        raise SearchError("--proposals-per-reply: no language model writes -> give --proposer-url")
    return int(length or (DEFAULT_LIST if options.proposer_url else 1))


def _run_comparison(options: argparse.Namespace) -> None:
    from benchmarks.search.comparison import CachingEvaluator, run_comparison
    from benchmarks.search.yardstick_evaluator import YardstickEvaluator

    settings = Settings(
        rounds=options.rounds,
        per_round=options.per_round,
        base_policy=options.base_policy,
        other_bases=tuple(options.other_bases),
        budgets=tuple(options.budget),
        proposer=_proposer_name(options),
        race=options.race,
        proposals_per_reply=_list_length(options),
    )
    asks = needs_proposer(options.strategies, settings)
    if asks:
        _require_endpoint(options)
    yardstick = open_yardstick(options.yardstick, options.checkpoint)
    own = YardstickEvaluator(
        yardstick, _scenes(options), each=options.each, base_policy=options.base_policy
    )
    evaluator = CachingEvaluator(own)

    async def run() -> None:
        requests = options.per_round * options.concurrency
        proposer = _open_endpoint(options, requests) if asks else None
        try:
            await run_comparison(
                options.out,
                options.strategies,
                _seeds(options),
                settings,
                evaluator,
                proposer,
                options.concurrency,
            )
        finally:
            if proposer is not None:
                await proposer.close()

    asyncio.run(run())


if __name__ == "__main__":
    raise SystemExit(main())
