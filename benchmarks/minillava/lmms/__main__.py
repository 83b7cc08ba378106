"""``python -m benchmarks.minillava.lmms FOLDER``: writes a split as an lmms-eval task.

Knows nothing about models.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from benchmarks.minillava.lmms.task import TASK, write_task
from benchmarks.minillava.split import Split, held_out


def main() -> None:
    """Parse, write, say how to run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--split", choices=get_args(Split), default="test")
    parser.add_argument("--scenes", type=int, default=200)
    arguments = parser.parse_args()
    examples = held_out(arguments.split, arguments.scenes)
    write_task(arguments.folder, arguments.split, examples)
    print(f"{len(examples)} questions; lmms-eval --include_path {arguments.folder} --tasks {TASK}")


if __name__ == "__main__":
    main()
