"""``python -m benchmarks.search data | compare | table | speed``: the offline search on mini-LLaVA.

Knows nothing about searching.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.minillava.split import CHECKPOINT
from benchmarks.search.compare import as_markdown
from benchmarks.search.data import write
from offline_search.records import Split
from offline_search.settings import SMALL_MENU

ORDER = ("autoprune+", "autoprune", "random")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write data, run a comparison, print its table, or measure speed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data", help="write the held-out splits as a data folder")
    data.add_argument("--out", type=Path, required=True)
    compare = commands.add_parser("compare", help="run strategies over seeds; goes on if stopped")
    table = commands.add_parser("table", help="print the table of a comparison")
    for command in (compare, table):
        command.add_argument("--out", type=Path, required=True, help="folder of the ledgers")
        command.add_argument("--strategies", nargs="+", default=list(ORDER))
        command.add_argument("--seeds", type=int, default=5, help="how many")
    for command in (data, compare):
        command.add_argument("--scenes", type=int, nargs=3, default=[20, 20, 40],
                             metavar=("SEARCH", "VALIDATION", "TEST"))  # fmt: skip
        command.add_argument(
            "--each", type=int, metavar="N", help="questions about a scene, at most"
        )
    compare.add_argument(
        "--checkpoint", type=Path, default=CHECKPOINT, help="folder with llava and clip"
    )
    compare.add_argument("--base-policy", default="visionzip")
    compare.add_argument("--budget", type=int, nargs="+", default=[8])
    compare.add_argument("--rounds", type=int, default=10)
    compare.add_argument("--per-round", type=int, default=5)
    compare.add_argument("--proposer-url", help="endpoint; none: the embedded one is started")
    compare.add_argument("--proposer-model")
    compare.add_argument(
        "--replies", type=Path, nargs="+", metavar="LEDGER",
        help="as proposer: the replies that these searches have recorded",
    )  # fmt: skip
    compare.add_argument(
        "--at-once", type=int, default=1, metavar="N",
        help="searches that wait for the proposer together",
    )  # fmt: skip
    compare.add_argument(
        "--menu", type=int, metavar="N",
        help=f"atoms offered for what a proposal changes; 0: all, as is the default with "
        f"--proposer-url; else {SMALL_MENU}",
    )  # fmt: skip
    compare.add_argument(
        "--no-seeds", action="store_true", help="for endpoints that do not bear a seed"
    )
    compare.add_argument("--no-proposer", action="store_true", help="autoprune+ without one")
    speed = commands.add_parser("speed", help="time three ways to measure candidates with vLLM")
    speed.add_argument("--data", type=Path, required=True, help="as `data` writes it")
    speed.add_argument("--candidates", type=int, default=50)
    speed.add_argument("--few", type=int, default=3, help="candidates of the slow ways")
    speed.add_argument(
        "--layers", type=int, metavar="N",
        help="LLaVA-1.5-7B's widths with so many language layers and no weights, not mini-LLaVA",
    )  # fmt: skip
    speed.add_argument("--images", type=int, help="use only so many")
    options = parser.parse_args(arguments)
    if options.command == "speed":
        _speed(options)
    if options.command == "data":
        write(options.out, _scenes(options), each=options.each)
    elif options.command == "compare":
        _compare(options)
    if options.command in ("compare", "table"):
        print(as_markdown(options.out, options.strategies, range(options.seeds)), end="")
    return 0


def _scenes(options: argparse.Namespace) -> dict[Split, int]:
    search, validation, test = options.scenes
    return {"search": search, "validation": validation, "test": test}


def _speed(options: argparse.Namespace) -> None:
    from benchmarks.search.speed import measure, mini_llava, true_widths
    from offline_search.examples import read_dataset

    dataset = read_dataset(options.data, limit=options.images)
    with tempfile.TemporaryDirectory() as folder:
        on = mini_llava(dataset)
        if options.layers is not None:
            on = true_widths(dataset, options.layers, Path(folder))
        print(measure(on, options.candidates, options.few, budget=8).as_markdown(), end="")


def _menu(options: argparse.Namespace) -> int:
    if options.no_proposer:
        return 0
    small = 0 if options.proposer_url else SMALL_MENU
    return small if options.menu is None else int(options.menu)


def _compare(options: argparse.Namespace) -> None:
    from benchmarks.search.compare import Remembering, compare
    from benchmarks.search.minillava import MiniLlavaEvaluator
    from benchmarks.search.recorded import RecordedProposer
    from offline_search.proposers.embedded.convert import NAME, model_folder
    from offline_search.proposers.embedded.serve import served
    from offline_search.proposers.endpoint import Endpoint, EndpointProposer
    from offline_search.proposers.protocol import Proposer
    from offline_search.settings import Settings
    from offline_search.strategies import STRATEGIES

    measured = MiniLlavaEvaluator(options.checkpoint, _scenes(options), each=options.each)
    evaluator = Remembering(measured)
    recorded = RecordedProposer(options.replies) if options.replies else None
    named = options.proposer_model or NAME
    if recorded is not None:
        named = f"{len(recorded)} recorded replies"
    settings = Settings(
        rounds=options.rounds,
        per_round=options.per_round,
        base_policy=options.base_policy,
        budgets=tuple(options.budget),
        proposer="" if options.no_proposer else named,
        menu=_menu(options),
    )

    async def run(proposer: Proposer | None) -> None:
        seeds = range(options.seeds)
        try:
            await compare(
                options.out,
                options.strategies,
                seeds,
                settings,
                evaluator,
                proposer,
                options.at_once,
            )
        finally:
            if proposer is not None:
                await proposer.close()

    asks = any(STRATEGIES[strategy](settings).asks for strategy in options.strategies)
    requests = options.per_round * options.at_once
    if recorded is not None or not asks:
        asyncio.run(run(recorded))
    elif options.proposer_url:
        seeded = not options.no_seeds
        endpoint = Endpoint(
            options.proposer_url, settings.proposer, at_once=requests, seeded=seeded
        )
        asyncio.run(run(EndpointProposer(endpoint)))
    else:
        with served(model_folder()) as url:
            unseeded = Endpoint(url, settings.proposer, at_once=requests, seeded=False)
            asyncio.run(run(EndpointProposer(unseeded)))


if __name__ == "__main__":
    raise SystemExit(main())
