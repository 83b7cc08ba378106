"""Command ``python -m benchmarks.search``: comparisons of search strategies, and their tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from typing import get_args

from benchmarks.common.command import run_command
from benchmarks.cost.turns import Table
from benchmarks.policies import QUOTAS
from benchmarks.search.agreement import format_agreement, list_recorded
from benchmarks.search.evaluator import write_data
from benchmarks.search.results import format_tables, read_results
from benchmarks.search.runs import RunStatistics, format_runs, summarize_proposers
from benchmarks.search.study import (
    ABLATIONS,
    ANY_BASE_POLICY,
    ARMS,
    BASE_POLICIES,
    PROPOSED,
    RELEASED,
    WITHOUT_PROPOSER,
    Study,
    asks_model,
    replay_study,
)
from benchmarks.search.transfer import (
    measure_transfer,
    read_winners,
    tabulate_transfer,
    write_rows,
)
from benchmarks.yardsticks import SEARCHED, YARDSTICKS, open_yardstick
from benchmarks.yardsticks.questions import Model
from offline_search.dataset import SPLITS
from offline_search.endpoint import EndpointProposer, EndpointSettings
from offline_search.settings import DEFAULT_LIST, Settings
from vllm_autoprune.cli.flags import argument
from vllm_autoprune.cli.output import CommandParser, print_result
from vllm_autoprune.errors import SearchError
from vllm_autoprune.tpdsl.tokens import POSITIONS

_Adds = Callable[[argparse.ArgumentParser], object]
_ARMS = (
    f"strategies, of {', '.join(ARMS)}; with @none without a language model; then with @numbers or "
    "another space in that; default: those that ask no language model"
)
_OUT = argument("--out", type=Path, required=True, help="folder that is written, read")
_SEEDS = argument("--seeds", type=int, default=8, help="number of seeds")
_ROUNDS = argument("--rounds", type=int, default=10, help="rounds of proposals")
_POOL = argument(
    "--pool",
    type=int,
    default=128,
    help="questions of the search split; of more than 128 every round has fresh ones",
)
_STRATEGIES = argument("--strategies", nargs="+", default=WITHOUT_PROPOSER, help=_ARMS)


def write_splits(options: argparse.Namespace) -> None:
    """Write held-out scenes as a data folder."""
    write_data(
        options.out,
        dict(zip(SPLITS, options.scenes, strict=True)),
        each=options.each,
        model=options.model,
        clean=options.clean,
    )


def print_tables(options: argparse.Namespace) -> None:
    """Print the tables of a study again."""
    if not read_results(options.out):
        what = "has no results.jsonl with the results of searches"
        fix = "name the folder of one model and K of a study, or run it"
        raise SearchError.of(f"--out {options.out}", what, fix)
    print(format_tables(options.out, options.strategies, range(options.seeds)), end="")


def _read_budget(text: str) -> int | str:
    return int(text) if text.isdigit() else str(Fraction(text))


def run_study(options: argparse.Namespace) -> None:
    """Run, or resume, the published comparison, and print it."""
    url = options.proposer_url
    model = options.proposer_model
    if bool(url) != bool(model):
        raise SearchError.of(
            "--proposer-url and --proposer-model", "belong together", "give both"
        )
    length = DEFAULT_LIST if url else 1
    common = Settings(
        rounds=options.rounds,
        proposer=model,
        proposals_per_reply=length,
        positions=options.positions,
        other_bases=options.other_bases,
        core=options.core,
    )
    arms = options.strategies
    if not url and any(asks_model(arm, common) for arm in arms):
        raise SearchError.of(
            f"--strategies {' '.join(arms)}",
            "some ask a language model",
            "give --proposer-url, or leave them out",
        )
    connect = None
    if url:
        endpoint = EndpointSettings(
            url,
            model,
            reply_tokens=common.reply_tokens * length,
            # The rounds of all concurrent searches may be in flight at once.
            max_in_flight=common.per_round * options.at_once,
        )
        connect = partial(EndpointProposer, endpoint)
    groups = [[name] for name in options.yardsticks]
    if options.joint:
        groups = [options.yardsticks]
    for names, budget in product(groups, options.budgets):
        joined = "-".join(names)
        base = options.base_policy or BASE_POLICIES.get(joined, ANY_BASE_POLICY)
        changes = {
            "base_policy": base,
            "budgets": (budget,),
            "models": tuple(names) if len(names) > 1 else (),
            "question_free": options.question_free,
        }
        study = Study(
            options.out / f"{joined}-k{str(budget).replace('/', '-')}",
            arms,
            range(options.seeds),
            Settings.model_validate(common.model_dump() | changes),
            connect,
            options.at_once,
            options.leaders,
        )
        yardsticks = [open_yardstick(name) for name in names]
        print(study.run(yardsticks, pool=options.pool), flush=True)


def run_ablations(options: argparse.Namespace) -> None:
    """Run, or resume, the released policy's ablations and quotas."""
    base, budget = RELEASED[options.yardstick]
    study = Study(
        options.out / f"{options.yardstick}-k{budget}",
        ABLATIONS,
        range(options.seeds),
        Settings(rounds=options.rounds, base_policy=base, budgets=(budget,)),
    )
    quotas = [quota for quota in QUOTAS if quota <= budget]
    print(study.run([open_yardstick(options.yardstick)], quotas, options.pool))


def print_runs(options: argparse.Namespace) -> None:
    """Print what the candidates of searches scored, and the winners of each proposer."""
    runs = [RunStatistics.read(path) for path in options.ledgers]
    proposers = summarize_proposers(runs)
    record = {
        "runs": [run.model_dump(mode="json") for run in runs],
        "proposers": [row.model_dump(mode="json") for row in proposers],
    }
    print_result(options, record, format_runs(runs, proposers).rstrip())


def print_agreement(options: argparse.Namespace) -> None:
    """Print how many wins in nats of recorded searches are wins in right answers."""
    print(format_agreement(options.paths or list_recorded()))


def try_transfer(options: argparse.Namespace) -> None:
    """Try the winners of searches on all small models, also on those that no search has seen."""
    winners = read_winners(options.ledgers)
    models = options.yardsticks
    rows = [
        row
        for name in models
        for row in measure_transfer(
            winners, open_yardstick(name), options.images, len(models)
        )
    ]
    print(tabulate_transfer(winners, rows))
    if options.output:
        with options.output.open("w", encoding="utf-8") as file:
            write_rows(Table(file), winners, rows)


def replay_proposed(options: argparse.Namespace) -> None:
    """Replay the searches that a capable language model proposed for."""
    for recording in sorted(PROPOSED.glob("*.jsonl")):
        print(replay_study(recording))


_COMMANDS: Mapping[
    str, tuple[Callable[[argparse.Namespace], None], Sequence[_Adds]]
] = {
    "data": (
        write_splits,
        [
            _OUT,
            argument(
                "--scenes",
                type=int,
                nargs=3,
                default=[20, 20, 40],
                metavar=("SEARCH", "VALIDATION", "TEST"),
                help="scenes of each split",
            ),
            argument(
                "--model",
                choices=get_args(Model),
                default="minillava",
                help="whose pictures; a clip is a folder of frames",
            ),
            argument("--clean", action="store_true", help="pictures without grain"),
            argument(
                "--each", type=int, help="maximum number of questions about a scene"
            ),
        ],
    ),
    "table": (print_tables, [_OUT, _SEEDS, _STRATEGIES]),
    "study": (
        run_study,
        [
            _OUT,
            _SEEDS,
            _ROUNDS,
            _POOL,
            _STRATEGIES,
            argument(
                "--yardsticks",
                nargs="+",
                choices=SEARCHED,
                default=SEARCHED,
                help="models to measure on",
            ),
            argument(
                "--joint",
                action="store_true",
                help="search on all models at once, for a policy that suits them all",
            ),
            argument(
                "--budgets",
                type=_read_budget,
                nargs="+",
                default=[8, 16],
                help="K of a usual image, or shares of N such as 1/16, one by one",
            ),
            argument("--base-policy", help="default: the yardstick's in this study"),
            argument(
                "--other-bases",
                nargs="+",
                default=[],
                metavar="NAME",
                help="base policies that candidates may have instead",
            ),
            argument("--core", action="store_true", help="candidates may have a core"),
            argument(
                "--question-free",
                action="store_true",
                help="candidates may not read the question",
            ),
            argument(
                "--proposer-url", help="endpoint of a language model; default: none"
            ),
            argument("--proposer-model", default="", help="its name there"),
            argument(
                "--positions",
                choices=POSITIONS,
                default="true",
                help="where kept tokens stand",
            ),
            argument(
                "--leaders",
                type=int,
                default=0,
                help="best candidates of each search that are measured on new questions too",
            ),
            argument(
                "--at-once", type=int, default=1, help="searches that run concurrently"
            ),
        ],
    ),
    "ablations": (
        run_ablations,
        [
            _OUT,
            _SEEDS,
            _ROUNDS,
            _POOL,
            argument(
                "--yardstick",
                choices=SEARCHED,
                required=True,
                help="model to measure on",
            ),
        ],
    ),
    "runs": (
        print_runs,
        [
            argument("ledgers", type=Path, nargs="+", help="ledgers of searches"),
            argument("--json", action="store_true", help="print JSON"),
        ],
    ),
    "agreement": (
        print_agreement,
        [
            argument(
                "paths",
                type=Path,
                nargs="*",
                help="folders of studies, or ledgers; default: those of the repository",
            )
        ],
    ),
    "transfer": (
        try_transfer,
        [
            argument(
                "ledgers",
                type=Path,
                nargs="+",
                help="ledgers of searches of several models, upon one base policy",
            ),
            argument(
                "--yardsticks",
                nargs="+",
                choices=YARDSTICKS,
                default=YARDSTICKS,
                help="models to measure on",
            ),
            argument(
                "--images", type=int, default=100, help="images of the test split"
            ),
            argument("-o", "--output", type=Path, help="file for rows of figures"),
        ],
    ),
    "replay": (replay_proposed, []),
}
"""Function that runs each command, whose docstring is the command's help, and its arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns the exit status, 1 after an error."""
    return run_command("search", lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> None:
    parser = CommandParser(prog="python -m benchmarks.search", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (run, adds) in _COMMANDS.items():
        command = commands.add_parser(name, help=run.__doc__)
        command.set_defaults(run=run)
        for add in adds:
            add(command)
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    raise SystemExit(main())
