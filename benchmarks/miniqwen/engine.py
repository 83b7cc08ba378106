"""``python -m benchmarks.miniqwen.engine``: score a stock vLLM engine on a split.

Answers are also compared with those of transformers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from benchmarks.minillava.split import Example, Split
from benchmarks.miniqwen.split import CHECKPOINT, convert_image, draw_examples, grade_answers
from benchmarks.miniqwen.vocabulary import prompt

if TYPE_CHECKING:
    from vllm import LLM

MAX_ANSWER_TOKENS = 6
"""More than the longest answer and its end token."""


def open_engine(checkpoint: Path) -> LLM:
    """Start an engine that prunes nothing."""
    from vllm import LLM

    return LLM(
        model=str(checkpoint),
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=1024,
        block_size=32,
        limit_mm_per_prompt={"image": 1, "video": 0},
    )


def engine_answers(engine: LLM, examples: Sequence[Example]) -> list[str]:
    """Greedy answers of vLLM, in the order of the examples."""
    from vllm import SamplingParams

    prompts = [
        {
            "prompt": prompt(example.question),
            "multi_modal_data": {"image": convert_image(example.image)},
        }
        for example in examples
    ]
    sampling = SamplingParams(temperature=0, max_tokens=MAX_ANSWER_TOKENS)
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@torch.no_grad()
def transformers_answers(checkpoint: Path, examples: Sequence[Example]) -> list[str]:
    """Greedy answers of transformers, in the order of the examples."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.bfloat16)
    processor = AutoProcessor.from_pretrained(checkpoint)
    answers: list[str] = []
    for example in examples:
        inputs = processor(
            text=[prompt(example.question)],
            images=[convert_image(example.image)],
            return_tensors="pt",
        )
        length = inputs["input_ids"].shape[1]
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_ANSWER_TOKENS)
        answers.append(processor.decode(output[0, length:], skip_special_tokens=True))
    return answers


def main() -> None:
    """Parse the arguments, ask the questions and write scores and agreement as JSON."""
    parser = argparse.ArgumentParser(description="Score a stock vLLM engine on a held-out split.")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--split", choices=get_args(Split), default="test")
    parser.add_argument("--images", type=int, default=200)
    # A file, because the engine's processes write their log lines to standard output as well.
    parser.add_argument("--json", type=Path, required=True, help="file for the scores")
    arguments = parser.parse_args()
    examples = draw_examples(arguments.split, arguments.images)
    reference = transformers_answers(arguments.checkpoint, examples)
    answers = engine_answers(open_engine(arguments.checkpoint), examples)
    same = [one == other for one, other in zip(answers, reference, strict=True)]
    report = {
        "questions": len(examples),
        "same answer": sum(same) / len(same),
        "vllm": asdict(grade_answers(examples, answers)),
        "transformers": asdict(grade_answers(examples, reference)),
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
