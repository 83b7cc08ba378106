"""Command ``python -m benchmarks.search``: comparisons of search strategies, and their tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.policies import QUOTAS
from benchmarks.search.evaluator import write_data
from benchmarks.search.results import read_results, results_of
from benchmarks.search.study import (
    ABLATIONS,
    ARMS,
    BASE_POLICIES,
    RELEASED,
    WITHOUT_PROPOSER,
    asks_model,
    run_study,
)
from benchmarks.search.tables import format_tables
from benchmarks.yardsticks import YARDSTICKS
from offline_search.dataset import SPLITS
from offline_search.proposer import EndpointProposer, EndpointSettings
from offline_search.settings import DEFAULT_LIST, Settings
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.errors import AutopruneError, SearchError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns the exit status, 1 after an error."""
    parser = CommandParser(prog="python -m benchmarks.search", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(
        name: str, run: Callable[[argparse.Namespace], None], text: str, out: str, seeds: int = 0
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        command.add_argument("--out", type=Path, required=True, help=out)
        if seeds:
            command.add_argument("--seeds", type=int, default=seeds, help="number of seeds")
        return command

    ledgers = "folder of the ledgers"
    data = add("data", _write_data, "write held-out scenes as a data folder", "data folder")
    table = add("table", _print_tables, "print the tables of a study again", ledgers, seeds=5)
    text = "run, or resume, the published comparison on both yardsticks, and print it"
    study = add("study", _run_study, text, ledgers, seeds=8)
    text = "run, or resume, the released policy's ablations and quotas, and print both tables"
    ablations = add("ablations", _run_ablations, text, ledgers, seeds=8)

    splits, text = ("SEARCH", "VALIDATION", "TEST"), "scenes of each split"
    scenes = [20, 20, 40]
    data.add_argument("--scenes", type=int, nargs=3, default=scenes, metavar=splits, help=text)
    text = "maximum number of questions about a scene"
    data.add_argument("--each", type=int, metavar="N", help=text)
    text = f"strategies, of {', '.join(ARMS)}; with @none without a language model; then with "
    text += "@numbers or another space in that; default: those that ask no language model"
    for command in (table, study):
        default = list(WITHOUT_PROPOSER)
        command.add_argument("--strategies", nargs="+", default=default, help=text)
    for command in (study, ablations):
        command.add_argument("--rounds", type=int, default=10, help="rounds of proposals")
    text = "model to measure on"
    ablations.add_argument("--yardstick", choices=YARDSTICKS, required=True, help=text)
    both, text = list(YARDSTICKS), "models to measure on"
    study.add_argument("--yardsticks", nargs="+", choices=YARDSTICKS, default=both, help=text)
    study.add_argument("--budgets", type=int, nargs="+", default=[8, 16], help="K, one by one")
    text = "base policy; default: the yardstick's in this study"
    study.add_argument("--base-policy", default="", help=text)
    study.add_argument("--proposer-url", help="endpoint of a language model; default: none")
    study.add_argument("--proposer-model", help="its name there")
    text = "send no seed, for endpoints that fail on one"
    study.add_argument("--no-seeds", action="store_true", help=text)
    text = f"proposals that a model writes at once; default with --proposer-url: {DEFAULT_LIST}"
    study.add_argument("--proposals-per-reply", type=int, metavar="N", help=f"{text}, else 1")
    text = "searches that run concurrently"
    study.add_argument("--at-once", type=int, default=1, metavar="N", help=text)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except AutopruneError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _write_data(options: argparse.Namespace) -> None:
    scenes = dict(zip(SPLITS, options.scenes, strict=True))
    write_data(options.out, scenes, each=options.each)


def _print_tables(options: argparse.Namespace) -> None:
    print(format_tables(options.out, options.strategies, range(options.seeds)), end="")


def _run_study(options: argparse.Namespace) -> None:
    length, seeds = options.proposals_per_reply, range(options.seeds)
    if options.proposer_url and not options.proposer_model:
        raise SearchError("--proposer-url: which model? -> give --proposer-model")
    if length is not None and not options.proposer_url:
        raise SearchError("--proposals-per-reply: no language model writes -> give --proposer-url")
    common = Settings(
        rounds=options.rounds,
        proposer=options.proposer_model or "",
        proposals_per_reply=length or (DEFAULT_LIST if options.proposer_url else 1),
    )
    # Asked for the rounds of all concurrent searches at once.
    endpoint = EndpointSettings(
        options.proposer_url,
        common.proposer,
        reply_tokens=common.reply_tokens * common.proposals_per_reply,
        max_in_flight=common.per_round * options.at_once,
        seeded=not options.no_seeds,
    )
    for name in options.yardsticks:
        for budget in options.budgets:
            folder, base = options.out / f"{name}-k{budget}", options.base_policy
            update = {"base_policy": base or BASE_POLICIES[name], "budgets": (budget,)}
            settings, known = common.model_copy(update=update), read_results(folder)
            connect = None
            for arm in options.strategies:
                ended = len(results_of(known, arm, seeds)) == len(seeds)
                if not ended and asks_model(arm, settings):
                    connect = partial(EndpointProposer, endpoint)
            if connect and not options.proposer_url:
                raise SearchError(
                    f"--strategies {' '.join(options.strategies)}: some ask a language model -> "
                    "give --proposer-url, or leave them out"
                )
            tables = run_study(
                folder, name, options.strategies, seeds, settings, connect, options.at_once
            )
            print(tables, flush=True)


def _run_ablations(options: argparse.Namespace) -> None:
    name = options.yardstick
    base, budget = RELEASED[name]
    settings = Settings(rounds=options.rounds, base_policy=base, budgets=(budget,))
    folder = options.out / f"{name}-k{budget}"
    print(run_study(folder, name, ABLATIONS, range(options.seeds), settings, None, quotas=QUOTAS))


if __name__ == "__main__":
    raise SystemExit(main())
