"""Command ``python -m benchmarks.search``: comparisons of search strategies, and their tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.policies import QUOTAS
from benchmarks.search.evaluator import YardstickEvaluator, write_data
from benchmarks.search.results import read_results
from benchmarks.search.study import (
    ABLATIONS,
    ARMS,
    PER_ROUND,
    RELEASED,
    WITHOUT_PROPOSER,
    CachingEvaluator,
    Study,
    confirm,
    format_tables,
    needs_proposer,
    run_comparison,
)
from benchmarks.search.tables import format_candidates, format_confirmed
from benchmarks.yardsticks import YARDSTICKS, open_yardstick
from offline_search.dataset import Split
from offline_search.proposer import EndpointProposer, EndpointSettings
from offline_search.settings import DEFAULT_LIST, Settings
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.errors import AutopruneError, SearchError

Command = Callable[[argparse.Namespace], None]


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = CommandParser(prog="python -m benchmarks.search", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Command, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        return command

    data = add("data", _write_data, "write held-out scenes as a data folder")
    compare = add("compare", _compare, "run, or resume, strategies over several seeds")
    table = add("table", _print_tables, "print the tables of a comparison again")
    text = "measure the winners of a comparison on more questions of the test split"
    confirming = add("confirm", _confirm, text)
    text = "run, or resume, the published comparison on both yardsticks, and print it"
    study = add("study", _run_study, text)
    text = "run, or resume, the released policy's ablations and quotas, and print both tables"
    ablations = add("ablations", _run_ablations, text)
    text = "print valid, best, mean, worst and std of the candidates of searches"
    candidates = add("candidates", _print_candidates, text)

    data.add_argument("--out", type=Path, required=True, help="data folder")
    text = "ledgers of searches"
    candidates.add_argument("ledgers", type=Path, nargs="+", metavar="LEDGER", help=text)
    for command, seeds in ((compare, 5), (table, 5), (confirming, 5), (study, 8), (ablations, 8)):
        command.add_argument("--out", type=Path, required=True, help="folder of the ledgers")
        command.add_argument("--seeds", type=int, default=seeds, help="number of seeds")
        command.add_argument("--first-seed", type=int, default=0, help="the first of them")
    text = f"strategies, of {', '.join(ARMS)}; with @none without a language model; then with "
    text += "@numbers or another space in that; default: those that ask no language model"
    for command in (compare, table, confirming, study):
        default = list(WITHOUT_PROPOSER)
        command.add_argument("--strategies", nargs="+", default=default, help=text)
    for command in (study, ablations, compare):
        command.add_argument("--rounds", type=int, default=10, help="rounds of proposals")
    ablations.add_argument(
        "--yardstick", choices=YARDSTICKS, required=True, help="model to measure on"
    )
    for command in (confirming, compare):
        text = "another training of the yardstick's model"
        command.add_argument("--checkpoint", type=Path, help=text)
        command.add_argument(
            "--yardstick", choices=YARDSTICKS, default="minillava", help="model to measure on"
        )
    confirming.add_argument("--images", type=int, default=1000, help="images of the test split")
    text = "base policy; default: the yardstick's in this study"
    study.add_argument("--base-policy", default="", help=text)
    both, text = list(YARDSTICKS), "models to measure on"
    study.add_argument("--yardsticks", nargs="+", choices=YARDSTICKS, default=both, help=text)
    study.add_argument("--budgets", type=int, nargs="+", default=[8, 16], help="K, one by one")
    for command in (compare, study):
        command.add_argument("--proposer-url", help="endpoint of a language model; default: none")
        command.add_argument("--proposer-model", help="its name there")
        text = "send no seed, for endpoints that fail on one"
        command.add_argument("--no-seeds", action="store_true", help=text)
        text = f"proposals that a model writes at once; default with --proposer-url: {DEFAULT_LIST}"
        text += ", else 1"
        command.add_argument("--proposals-per-reply", type=int, metavar="N", help=text)
        command.add_argument(
            "--at-once",
            type=int,
            default=1,
            dest="concurrency",
            metavar="N",
            help="searches that run concurrently",
        )
    for command in (data, compare):
        command.add_argument(
            "--scenes",
            type=int,
            nargs=3,
            default=[20, 20, 40],
            metavar=("SEARCH", "VALIDATION", "TEST"),
            help="scenes of each split",
        )
        text = "maximum number of questions about a scene"
        command.add_argument("--each", type=int, metavar="N", help=text)
    text = "base policy that candidates start from"
    compare.add_argument("--base-policy", default="visionzip", help=text)
    text = "base policies that candidates may also have"
    compare.add_argument("--other-bases", nargs="+", default=[], help=text)
    compare.add_argument("--budget", type=int, nargs="+", default=[8], help="each K")
    compare.add_argument("--per-round", type=int, default=5, help="candidates of a round")
    text = "race the candidates of every strategy"
    compare.add_argument("--race", action="store_true", help=text)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns the exit status, 1 after an error."""
    options = build_parser().parse_args(arguments)
    try:
        options.run(options)
    except AutopruneError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _write_data(options: argparse.Namespace) -> None:
    write_data(options.out, _scenes(options), each=options.each)


def _print_candidates(options: argparse.Namespace) -> None:
    print(format_candidates(options.ledgers), end="")


def _print_tables(options: argparse.Namespace) -> None:
    print(format_tables(options.out, options.strategies, _seeds(options)), end="")


def _confirm(options: argparse.Namespace) -> None:
    bases = sorted({result.settings.base_policy for result in read_results(options.out).values()})
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
    print(format_confirmed(options.out, options.strategies, _seeds(options)), end="")


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
    asks = study.needs_proposer(options.yardsticks, options.budgets)
    connect = _endpoint(options, PER_ROUND) if asks else None
    for yardstick in options.yardsticks:
        for budget in options.budgets:
            print(study.run(yardstick, budget, connect), flush=True)


def _run_ablations(options: argparse.Namespace) -> None:
    base, budget = RELEASED[options.yardstick]
    seeds, rounds = _seeds(options), options.rounds
    study = Study(options.out, ABLATIONS, seeds, rounds, base_policy=base, quotas=QUOTAS)
    print(study.run(options.yardstick, budget, None))


def _compare(options: argparse.Namespace) -> None:
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
    connect = _endpoint(options, options.per_round) if asks else None
    yardstick = open_yardstick(options.yardstick, options.checkpoint)
    evaluator = YardstickEvaluator(
        yardstick, _scenes(options), each=options.each, base_policy=options.base_policy
    )
    run_comparison(
        options.out,
        options.strategies,
        _seeds(options),
        settings,
        CachingEvaluator(evaluator),
        connect,
        options.concurrency,
    )
    _print_tables(options)


def _scenes(options: argparse.Namespace) -> dict[Split, int]:
    search, validation, test = options.scenes
    return {"search": search, "validation": validation, "test": test}


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


def _endpoint(options: argparse.Namespace, per_round: int) -> Callable[[], EndpointProposer]:
    """Opens the language model, asked for the rounds of all concurrent searches at once."""
    if not options.proposer_url:
        raise SearchError(
            f"--strategies {' '.join(options.strategies)}: some ask a language model -> give "
            "--proposer-url, or leave them out"
        )
    settings = EndpointSettings(
        options.proposer_url,
        _proposer_name(options),
        reply_tokens=Settings().reply_tokens * _list_length(options),
        max_in_flight=per_round * options.concurrency,
        seeded=not options.no_seeds,
    )
    return partial(EndpointProposer, settings)


if __name__ == "__main__":
    raise SystemExit(main())
