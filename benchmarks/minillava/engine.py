"""``python -m benchmarks.minillava.engine``: the same questions, answered by vLLM.

Knows nothing about pruning: no state is given, so the plugin is inert and every token is kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from PIL import Image

from benchmarks.minillava.split import CHECKPOINT, Example, Split, held_out, scores
from benchmarks.minillava.vocabulary import prompt

MOST_TOKENS = 6
"""The longest number and its end."""


def answers(llava: Path, examples: Sequence[Example]) -> list[str]:
    """Greedy answers of a stock engine, in the order of the examples."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(llava), enforce_eager=True, dtype="bfloat16", max_model_len=512, block_size=32
    )
    asked = [
        {
            "prompt": prompt(example.question),
            "multi_modal_data": {"image": Image.fromarray(example.image.permute(1, 2, 0).numpy())},
        }
        for example in examples
    ]
    sampling = SamplingParams(temperature=0, max_tokens=MOST_TOKENS)
    return [output.outputs[0].text for output in llm.generate(asked, sampling)]


def main() -> None:
    """Parse, ask, write scores as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--split", choices=get_args(Split), default="test")
    parser.add_argument("--scenes", type=int, default=200)
    # A file, because the engine's processes write their log lines to standard output as well.
    parser.add_argument("--json", type=Path, required=True, help="file for the scores")
    arguments = parser.parse_args()
    examples = held_out(arguments.split, arguments.scenes)
    found = scores(examples, answers(arguments.checkpoint / "llava", examples))
    arguments.json.write_text(json.dumps(asdict(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
