"""``python -m benchmarks.yardsticks.lmms FOLDER``: write a split as a task of lmms-eval.

The folder is for lmms-eval's ``--include_path``: images, questions as JSON Lines, a YAML file and
its functions. Format: lmms-eval's task guide (docs/task_guide.md), with a local file in place of a
data set on the Hub. lmms-eval itself is needed only to run the task.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from benchmarks.yardsticks.examples import Example, Split, draw_examples, png
from benchmarks.yardsticks.questions import CATEGORIES
from vllm_autoprune.cli.output import CommandParser

TASK = "minillava"


def write_task(folder: Path, split: str, examples: Sequence[Example]) -> None:
    """Write images as PNG, one line per question, the YAML file and its functions."""
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    data = folder / f"{split}.jsonl"
    categories = {k: name for name, kinds in CATEGORIES["minillava"].items() for k in kinds}
    written: set[int] = set()
    with data.open("w", encoding="utf-8") as lines:
        for number, example in enumerate(examples):
            name = f"{split}-{example.image_id:05}.png"
            if example.image_id not in written:
                (images / name).write_bytes(png(example.image))
                written.add(example.image_id)
            line = {
                "question_id": number,
                "image": f"images/{name}",
                "question": example.question,
                "answer": example.answer,
                "kind": example.kind,
                "category": categories[example.kind],
                "pair": example.pair,
                "evidence": list(example.evidence),
                "unseen_wording": example.unseen_wording,
                "unseen_layout": example.unseen_style,
            }
            lines.write(json.dumps(line) + "\n")
    text = Path(__file__).with_name("lmms_task.yaml").read_text(encoding="utf-8")
    for word, value in (
        ("TASK", TASK),
        ("SPLIT", split),
        ("DATA", json.dumps(str(data.resolve()))),
    ):
        text = text.replace(word, value)
    (folder / f"{TASK}.yaml").write_text(text, encoding="utf-8")
    shutil.copy(Path(__file__).with_name("lmms_functions.py"), folder / "utils.py")


def main() -> None:
    """Parse the arguments, write the task and print how to run it."""
    parser = CommandParser(description="Write a held-out split as a task of lmms-eval.")
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--split", choices=get_args(Split), default="test", help="held-out split")
    parser.add_argument("--scenes", type=int, default=200, help="scenes of it")
    arguments = parser.parse_args()
    examples = draw_examples(arguments.split, arguments.scenes)
    write_task(arguments.folder, arguments.split, examples)
    print(f"{len(examples)} questions; lmms-eval --include_path {arguments.folder} --tasks {TASK}")


if __name__ == "__main__":
    main()
