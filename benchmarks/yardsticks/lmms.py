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

_YAML = """\
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    {split}: {data}
test_split: {split}
output_type: generate_until
doc_to_visual: !function utils.doc_to_visual
doc_to_text: !function utils.doc_to_text
doc_to_target: answer
generation_kwargs:
  max_new_tokens: 8
  temperature: 0
  do_sample: false
process_results: !function utils.process_results
cluster_key: image
metric_list:
  - metric: minillava_accuracy
    aggregation: !function utils.aggregate_accuracy
    higher_is_better: true
  - metric: minillava_accuracy_plus
    aggregation: !function utils.aggregate_accuracy_plus
    higher_is_better: true
lmms_eval_specific_kwargs:
  default:
    pre_prompt: ""
    post_prompt: ""
metadata:
  - version: 1.0
"""


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
    text = _YAML.format(task=TASK, split=split, data=json.dumps(str(data.resolve())))
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
