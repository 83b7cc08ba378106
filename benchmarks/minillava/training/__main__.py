"""``python -m benchmarks.minillava.training``: train mini-LLaVA and its CLIP from scratch.

Five stages in two processes; two checkpoints, before and after the stage with dropped tokens.
"""

from __future__ import annotations

from benchmarks.minillava.training.scratch import SIZES, Run, train_rank
from benchmarks.minillava.training.stages import add_run_options, start_ranks
from vllm_autoprune.cli.output import CommandParser


def main() -> None:
    """Parse the arguments, start all ranks and wait for them."""
    parser = CommandParser(description="Train mini-LLaVA and its CLIP from scratch.")
    parser.add_argument("--size", choices=sorted(SIZES), default="small", help="size of the models")
    add_run_options(parser)
    arguments = parser.parse_args()
    start_ranks(train_rank, Run(**vars(arguments)))


if __name__ == "__main__":
    main()
