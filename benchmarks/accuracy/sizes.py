"""``python -m benchmarks.accuracy.sizes``: one share of all pictures, or one K, at equal mean K.

It prints rows of ``docs/data``, for the small models whose pictures differ in size. No server runs:
accuracy is measured in this process, as in ``benchmarks.accuracy.yardsticks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from statistics import fmean

import torch

from benchmarks.common.command import run_command
from benchmarks.common.report import log_progress
from benchmarks.cost.turns import Table
from benchmarks.yardsticks import YARDSTICKS, open_yardstick
from benchmarks.yardsticks.examples import Example, draw_examples
from benchmarks.yardsticks.yardstick import Budget, Case, EncodedBatch, Yardstick
from offline_search.dataset import SPLITS
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.statistics import ClusterBootstrap, Estimate
from vllm_autoprune.tpdsl.loading import load_state

_SHARES = ("1/4", "1/8", "1/16")
_STATES = ("norm", "cen_divprune", "pivoted_qr", "pivoted_qr-relevance", "cdpruner")


def equal_budget(share: Budget, counts: Sequence[int]) -> Budget:
    """The K for all images of ``counts`` tokens whose mean is nearest to that of a share.

    An image of fewer tokens keeps all of them.
    """
    mean = fmean(map(share.tokens, counts))
    budgets = [
        Budget("one K", Fraction(1), limit) for limit in range(1, max(counts) + 1)
    ]
    return min(
        budgets, key=lambda shared: abs(fmean(map(shared.tokens, counts)) - mean)
    )


def _compare(
    table: Table,
    yardstick: Yardstick,
    examples: Sequence[Example],
    encoded: Sequence[EncodedBatch],
) -> None:
    """Add rows of every state and share: both accuracies, and their difference by question."""
    counts = [batch.tokens.count for batch in encoded]
    bootstrap = ClusterBootstrap([example.image_id for example in examples])
    for text in _SHARES:
        share = Budget(text, Fraction(text))
        shared = equal_budget(share, counts)
        setting = f"{yardstick.model}, {text}, K = {shared.limit} for all"
        for budget in (share, shared):
            mean = fmean(map(budget.tokens, counts))
            table.add(f"tokens, {budget.label}", setting, mean, "tokens")
        for name in _STATES:
            state = load_state(name)
            by_share, by_shared = (
                torch.cat(
                    [b.score(Case(name, budget, state=state)).correct for b in encoded]
                )
                .double()
                .numpy()
                for budget in (share, shared)
            )
            for what, values in (
                ("right, share", by_share),
                ("right, one K", by_shared),
                ("one K less share", by_shared - by_share),
            ):
                figure = Estimate.of(100 * bootstrap.mean(values))
                unit = "points" if "less" in what else "%"
                table.add(what, f"{setting}; {name}", figure, unit)


def main() -> int:
    """Measure, and print rows; returns the exit status, 1 after an error."""
    return run_command("sizes", _run)


def _run() -> None:
    parser = CommandParser(
        prog="python -m benchmarks.accuracy.sizes", description=__doc__
    )
    parser.add_argument(
        "--split", choices=SPLITS, default="test", help="of the questions"
    )
    parser.add_argument("--images", type=int, default=100, help="images of the split")
    options = parser.parse_args()
    # The last bits of pictures depend on the number of threads.
    torch.set_num_threads(1)
    table = Table()
    for name in YARDSTICKS:
        yardstick = open_yardstick(name)
        examples = draw_examples(options.split, options.images, yardstick.key)
        sizes = {example.image.shape for example in examples}
        if len(sizes) == 1:
            log_progress(f"{yardstick.name} has pictures of one size: left out")
            continue
        encoded = [yardstick.encode(batch) for batch in yardstick.batches(examples)]
        _compare(table, yardstick, examples, encoded)


if __name__ == "__main__":
    raise SystemExit(main())
