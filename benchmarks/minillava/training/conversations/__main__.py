"""``python -m benchmarks.minillava.training.conversations``: train on several turns.

Continues the projector and the language model of a checkpoint; its towers stay as they are. Writes
``language.safetensors``, the tensors that differ from that checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.minillava.split import CHECKPOINT
from benchmarks.minillava.training.conversations.train import Run, train_rank
from benchmarks.minillava.training.stages import add_run_options, start_ranks
from vllm_autoprune.cli.output import CommandParser


def main() -> None:
    """Parse the arguments, start all ranks and wait for them."""
    parser = CommandParser(description="Train mini-LLaVA on conversations.")
    parser.add_argument(
        "--checkpoint", type=Path, default=CHECKPOINT, help="folder with llava/ and clip/"
    )
    parser.add_argument(
        "--no-recall", dest="recall", action="store_false",
        help="recall no tokens in training, for comparison",
    )  # fmt: skip
    add_run_options(parser)
    start_ranks(train_rank, Run(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
