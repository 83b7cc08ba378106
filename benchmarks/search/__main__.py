"""Command ``python -m benchmarks.search``: comparisons of search strategies, and their tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from benchmarks.policies import QUOTAS
from benchmarks.search.evaluator import write_data
from benchmarks.search.results import format_tables
from benchmarks.search.study import (
    ABLATIONS,
    ARMS,
    BASE_POLICIES,
    PROPOSED,
    RELEASED,
    WITHOUT_PROPOSER,
    asks_model,
    replay_study,
    run_study,
)
from benchmarks.yardsticks import YARDSTICKS, open_yardstick
from benchmarks.yardsticks.questions import Model
from offline_search.dataset import SPLITS
from offline_search.endpoint import EndpointProposer, EndpointSettings
from offline_search.settings import DEFAULT_LIST, Settings
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.errors import AutopruneError, SearchError
from vllm_autoprune.tpdsl.tokens import POSITIONS

_DATA = "write held-out scenes as a data folder"
_TABLE = "print the tables of a study again"
_STUDY = "run, or resume, the published comparison, and print it"
_ABLATIONS = "run, or resume, the released policy's ablations and quotas"
_REPLAY = "replay the searches that a capable language model proposed for"
_ARMS = (
    f"strategies, of {', '.join(ARMS)}; with @none without a language model; then with @numbers or "
    "another space in that; default: those that ask no language model"
)


def main(arguments: Sequence[str] | None = None) -> int:  # noqa: PLR0915
    """Run the command that the arguments name; returns the exit status, 1 after an error."""
    parser = CommandParser(prog="python -m benchmarks.search", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    folder, searches, runs = (CommandParser(add_help=False) for _ in range(3))
    folder.add_argument(
        "--out", type=Path, required=True, help="folder that is written, read"
    )
    searches.add_argument("--seeds", type=int, default=8, help="number of seeds")
    runs.add_argument("--rounds", type=int, default=10, help="rounds of proposals")
    text = "questions of the search split; of more than 128 every round has fresh ones"
    runs.add_argument("--pool", type=int, default=128, help=text)
    data = commands.add_parser("data", help=_DATA, parents=[folder])
    data.add_argument(
        "--scenes",
        type=int,
        nargs=3,
        default=[20, 20, 40],
        help="scenes of each split",
        metavar=("SEARCH", "VALIDATION", "TEST"),
    )
    text = "whose pictures; a clip is a folder of frames"
    data.add_argument(
        "--model", choices=get_args(Model), default="minillava", help=text
    )
    data.add_argument("--clean", action="store_true", help="pictures without grain")
    data.add_argument(
        "--each", type=int, help="maximum number of questions about a scene"
    )
    table = commands.add_parser("table", help=_TABLE, parents=[folder, searches])
    study = commands.add_parser("study", help=_STUDY, parents=[folder, searches, runs])
    for command in (table, study):
        command.add_argument(
            "--strategies", nargs="+", default=WITHOUT_PROPOSER, help=_ARMS
        )
    text = "models to measure on"
    study.add_argument(
        "--yardsticks", nargs="+", choices=YARDSTICKS, default=YARDSTICKS, help=text
    )
    study.add_argument(
        "--budgets", type=int, nargs="+", default=[8, 16], help="K, one by one"
    )
    study.add_argument("--base-policy", help="default: the yardstick's in this study")
    text = "base policies that candidates may have instead"
    study.add_argument(
        "--other-bases", nargs="+", default=[], metavar="NAME", help=text
    )
    study.add_argument("--core", action="store_true", help="candidates may have a core")
    study.add_argument(
        "--proposer-url", help="endpoint of a language model; default: none"
    )
    study.add_argument("--proposer-model", default="", help="its name there")
    text = "where kept tokens stand"
    study.add_argument("--positions", choices=POSITIONS, default="true", help=text)
    text = "best candidates of each search that are measured on new questions too"
    study.add_argument("--leaders", type=int, default=0, help=text)
    study.add_argument(
        "--at-once", type=int, default=1, help="searches that run concurrently"
    )
    ablations = commands.add_parser(
        "ablations", help=_ABLATIONS, parents=[folder, searches, runs]
    )
    text = "model to measure on"
    ablations.add_argument("--yardstick", choices=YARDSTICKS, required=True, help=text)
    commands.add_parser("replay", help=_REPLAY)
    options = parser.parse_args(arguments)
    try:
        if options.command == "data":
            scenes = dict(zip(SPLITS, options.scenes, strict=True))
            fields = {
                "each": options.each,
                "model": options.model,
                "clean": options.clean,
            }
            write_data(options.out, scenes, **fields)
        elif options.command == "table":
            seeds = range(options.seeds)
            print(format_tables(options.out, options.strategies, seeds), end="")
        elif options.command == "study":
            _run_study(options)
        elif options.command == "replay":
            for recording in sorted(PROPOSED.glob("*.jsonl")):
                print(replay_study(recording))
        else:
            base, budget = RELEASED[options.yardstick]
            settings = Settings(
                rounds=options.rounds, base_policy=base, budgets=(budget,)
            )
            out = options.out / f"{options.yardstick}-k{budget}"
            seeds = range(options.seeds)
            quotas = [quota for quota in QUOTAS if quota <= budget]
            yardstick = open_yardstick(options.yardstick)
            tables = run_study(
                out,
                yardstick,
                ABLATIONS,
                seeds,
                settings,
                quotas=quotas,
                pool=options.pool,
            )
            print(tables)
    except AutopruneError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _run_study(options: argparse.Namespace) -> None:
    url = options.proposer_url
    model = options.proposer_model
    arms = options.strategies
    if bool(url) != bool(model):
        raise SearchError(
            "--proposer-url and --proposer-model belong together -> give both"
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
    if not url and any(asks_model(arm, common) for arm in arms):
        raise SearchError(
            f"--strategies {' '.join(arms)}: some ask a language model -> give --proposer-url, or "
            "leave them out"
        )
    # Asked for the rounds of all concurrent searches at once.
    tokens = common.reply_tokens * length
    at_once = common.per_round * options.at_once
    endpoint = EndpointSettings(url, model, reply_tokens=tokens, max_in_flight=at_once)
    connect = partial(EndpointProposer, endpoint) if url else None
    for name in options.yardsticks:
        for budget in options.budgets:
            base = options.base_policy or BASE_POLICIES[name]
            settings = common.model_copy(
                update={"base_policy": base, "budgets": (budget,)}
            )
            folder = options.out / f"{name}-k{budget}"
            seeds = range(options.seeds)
            yardstick = open_yardstick(name)
            at_once = options.at_once
            tables = run_study(
                folder,
                yardstick,
                arms,
                seeds,
                settings,
                connect,
                at_once,
                pool=options.pool,
                leaders=options.leaders,
            )
            print(tables, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
