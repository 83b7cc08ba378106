"""``python -m benchmarks.miniqwen.training``: train mini-Qwen3-VL from scratch."""

from __future__ import annotations

from benchmarks.minillava.training.stages import add_run_options, start_ranks
from benchmarks.miniqwen.training.run import Run, train_rank
from vllm_autoprune.cli.output import CommandParser


def main() -> None:
    """Parse the arguments, start all ranks and wait for them."""
    parser = CommandParser(description="Train mini-Qwen3-VL from scratch.")
    add_run_options(parser)
    start_ranks(train_rank, Run(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
