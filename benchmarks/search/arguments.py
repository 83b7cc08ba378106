"""Arguments of ``python -m benchmarks.search``."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.accuracy.yardsticks.catalogue import YARDSTICKS
from benchmarks.search.study import ARMS, WITHOUT_PROPOSER
from offline_search.settings import DEFAULT_LIST
from vllm_autoprune.cli.output import CommandParser


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = CommandParser(prog="python -m benchmarks.search", description=description)
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data", help="write held-out scenes as a data folder")
    data.add_argument("--out", type=Path, required=True, help="data folder")
    compare = commands.add_parser("compare", help="run, or resume, strategies over several seeds")
    table = commands.add_parser("table", help="print the tables of a comparison again")
    confirm = commands.add_parser(
        "confirm", help="measure the winners of a comparison on more questions of the test split"
    )
    confirm.add_argument(
        "--yardstick", choices=YARDSTICKS, default="minillava", help="model to measure on"
    )
    confirm.add_argument(
        "--checkpoint", type=Path, help="another training of the yardstick's model"
    )
    confirm.add_argument("--images", type=int, default=1000, help="images of the test split")
    study = commands.add_parser(
        "study", help="run, or resume, the published comparison on both yardsticks, and print it"
    )
    ablations = commands.add_parser(
        "ablations",
        help="run, or resume, the released policy's ablations and quotas, and print both tables",
    )
    ablations.add_argument(
        "--yardstick", choices=YARDSTICKS, required=True, help="model to measure on"
    )
    for command in (study, ablations):
        command.add_argument("--out", type=Path, required=True, help="folder of the ledgers")
        command.add_argument("--rounds", type=int, default=10, help="rounds of five evaluations")
        _add_seeds(command, 8)
    study.add_argument(
        "--base-policy", default="", help="base policy; default: the yardstick's in this study"
    )
    study.add_argument(
        "--yardsticks",
        nargs="+",
        choices=YARDSTICKS,
        default=list(YARDSTICKS),
        help="models to measure on",
    )
    study.add_argument("--budgets", type=int, nargs="+", default=[8, 16], help="K, one by one")
    study.add_argument(
        "--strategies",
        nargs="+",
        default=list(WITHOUT_PROPOSER),
        help=f"strategies, as in `compare`, of {', '.join(ARMS)}; default: those that ask no "
        "language model",
    )
    candidates = commands.add_parser(
        "candidates", help="print valid, best, mean, worst and std of the candidates of searches"
    )
    candidates.add_argument(
        "ledgers", type=Path, nargs="+", metavar="LEDGER", help="ledgers of searches"
    )
    for command in (compare, table, confirm):
        command.add_argument("--out", type=Path, required=True, help="folder of the ledgers")
        command.add_argument(
            "--strategies",
            nargs="+",
            default=list(WITHOUT_PROPOSER),
            help="strategies to compare; with @none without a language model; then with @numbers "
            "or another space in that",
        )
        _add_seeds(command, 5)
    for command in (compare, study):
        command.add_argument("--proposer-url", help="endpoint of a language model; default: none")
        command.add_argument("--proposer-model", help="its name there")
        command.add_argument(
            "--no-seeds", action="store_true", help="send no seed, for endpoints that fail on one"
        )
        command.add_argument(
            "--proposals-per-reply",
            type=int,
            metavar="N",
            help=f"proposals that a model writes at once; default with --proposer-url: "
            f"{DEFAULT_LIST}, else 1",
        )
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
        command.add_argument(
            "--each", type=int, metavar="N", help="maximum number of questions about a scene"
        )
    _add_compare_arguments(compare)
    return parser


def _add_seeds(command: argparse.ArgumentParser, count: int) -> None:
    command.add_argument("--seeds", type=int, default=count, help="number of seeds")
    command.add_argument("--first-seed", type=int, default=0, help="the first of them")


def _add_compare_arguments(compare: argparse.ArgumentParser) -> None:
    compare.add_argument(
        "--yardstick", choices=YARDSTICKS, default="minillava", help="model to measure on"
    )
    compare.add_argument(
        "--checkpoint", type=Path, help="another training of the yardstick's model"
    )
    compare.add_argument(
        "--base-policy", default="visionzip", help="base policy that candidates start from"
    )
    compare.add_argument(
        "--other-bases", nargs="+", default=[], help="base policies that candidates may also have"
    )
    compare.add_argument("--budget", type=int, nargs="+", default=[8], help="each K")
    compare.add_argument("--rounds", type=int, default=10, help="rounds of proposals")
    compare.add_argument("--per-round", type=int, default=5, help="candidates of a round")
    compare.add_argument(
        "--race", action="store_true", help="race the candidates of every strategy"
    )
