"""Command ``python -m benchmarks.search``: comparisons of search strategies, and their tables."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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
from offline_search.proposers.embedded_model import EMBEDDED_MODEL, prepare_model
from offline_search.proposers.embedded_server import CONCURRENT_REQUESTS, serve_model
from offline_search.settings import DEFAULT_LIST, DEFAULT_MENU, Settings
from vllm_autoprune.errors import AutopruneError, SearchError

if TYPE_CHECKING:
    from offline_search.proposers.endpoint import EndpointProposer


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
        menu=_menu_width(options),
        proposals_per_reply=_list_length(options),
        concurrency=options.concurrency,
        base_policy=options.base_policy,
    )
    with contextlib.ExitStack() as stack:
        connect: Callable[[], EndpointProposer] | None = None
        if study.needs_proposer(options.yardsticks, options.budgets):
            url = options.proposer_url or stack.enter_context(serve_model(prepare_model()))
            given = options.proposer_url is not None
            requests = PER_ROUND * study.concurrency if given else CONCURRENT_REQUESTS
            length = study.proposals_per_reply
            connect = partial(_open_endpoint, url, study.proposer, requests, given, length)
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
        proposer="",
        menu=0,
        base_policy=base_policy,
        quotas=QUOTAS,
    )
    print(study.run(options.yardstick, budget, None))


def _open_endpoint(
    url: str, model: str, requests: int, seeded: bool, proposals: int
) -> EndpointProposer:
    from offline_search.proposers.endpoint import EndpointProposer, EndpointSettings

    tokens = Settings().reply_tokens * proposals
    return EndpointProposer(
        EndpointSettings(url, model, reply_tokens=tokens, max_in_flight=requests, seeded=seeded)
    )


def _seeds(options: argparse.Namespace) -> range:
    return range(options.first_seed, options.first_seed + options.seeds)


def _proposer_name(options: argparse.Namespace) -> str:
    """The model's name, of which settings and results keep a record."""
    if options.proposer_url and not options.proposer_model:
        raise SearchError("--proposer-url: which model? -> give --proposer-model")
    return options.proposer_model or EMBEDDED_MODEL


def _menu_width(options: argparse.Namespace) -> int:
    default = 0 if options.proposer_url else DEFAULT_MENU
    return default if options.menu is None else int(options.menu)


def _list_length(options: argparse.Namespace) -> int:
    """Proposals of a reply; a model that is offered a menu writes one."""
    given, menu = options.proposals_per_reply, _menu_width(options)
    if menu and given is not None and given > 1:
        raise SearchError(
            f"--proposals-per-reply {given}: a model that is offered a menu writes one proposal a "
            "reply -> leave it out, or give --proposer-url, or --menu 0"
        )
    if given is not None:
        return int(given)
    return DEFAULT_LIST if options.proposer_url and not menu else 1


def _run_comparison(options: argparse.Namespace) -> None:
    from benchmarks.search.comparison import CachingEvaluator, run_comparison
    from benchmarks.search.yardstick_evaluator import YardstickEvaluator
    from offline_search.proposers.proposal_client import Proposer

    settings = Settings(
        rounds=options.rounds,
        per_round=options.per_round,
        base_policy=options.base_policy,
        other_bases=tuple(options.other_bases),
        budgets=tuple(options.budget),
        proposer=_proposer_name(options),
        menu=_menu_width(options),
        race=options.race,
        proposals_per_reply=_list_length(options),
    )
    yardstick = open_yardstick(options.yardstick, options.checkpoint)
    own = YardstickEvaluator(
        yardstick, _scenes(options), each=options.each, base_policy=options.base_policy
    )
    evaluator = CachingEvaluator(own)

    async def run(proposer: Proposer | None) -> None:
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

    def endpoint(url: str, seeded: bool, requests: int) -> EndpointProposer:
        length = settings.proposals_per_reply
        return _open_endpoint(url, settings.proposer, requests, seeded, length)

    if not needs_proposer(options.strategies, settings):
        asyncio.run(run(None))
    elif options.proposer_url:
        requests = options.per_round * options.concurrency
        asyncio.run(run(endpoint(options.proposer_url, not options.no_seeds, requests)))
    else:
        with serve_model(prepare_model()) as url:
            asyncio.run(run(endpoint(url, False, CONCURRENT_REQUESTS)))


if __name__ == "__main__":
    raise SystemExit(main())
