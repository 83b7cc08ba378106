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
from vllm_autoprune.cli.output import CommandParser

TASK = "minillava"


def write_task(folder: Path, examples: Sequence[Example]) -> None:
    """Write images as PNG, one line per question, the YAML file and its functions."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for number, example in enumerate(examples):
        image = f"images/{example.image_id:05}.png"
        (folder / image).write_bytes(png(example.image))
        asked = {"question": example.question, "answer": example.answer, "category": example.kind}
        lines.append(json.dumps({"question_id": number, "image": image, **asked}) + "\n")
    data = folder / "questions.jsonl"
    data.write_text("".join(lines), encoding="utf-8")
    text = Path(__file__).with_name("lmms_task.yaml").read_text(encoding="utf-8")
    text = text.replace("TASK", TASK).replace("DATA", json.dumps(str(data.resolve())))
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
    write_task(arguments.folder, examples)
    print(f"{len(examples)} questions; lmms-eval --include_path {arguments.folder} --tasks {TASK}")


if __name__ == "__main__":
    main()
