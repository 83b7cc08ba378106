"""Answers of vLLM to held-out questions, stock or with a pruning state.

``python -m benchmarks.minillava.engine`` scores a stock engine on a split.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from PIL import Image

from benchmarks.minillava.split import CHECKPOINT, Example, Split, draw_examples, grade_answers
from benchmarks.minillava.vocabulary import prompt
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.ops.dtype import choose_dtype

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

MAX_ANSWER_TOKENS = 6
"""More than the longest answer and its end token."""


def open_engine(checkpoint: Path, settings: Mapping[str, object] | None = None) -> LLM:
    """Start an engine; `settings` are the plugin's, and without them it prunes nothing."""
    from vllm import LLM

    return LLM(
        model=str(checkpoint / "llava"),
        enforce_eager=True,
        dtype=choose_dtype(),
        max_model_len=512,
        block_size=32,
        additional_config={"autoprune": settings} if settings else {},
    )


def answer_questions(
    engine: LLM, examples: Sequence[Example], budget: int | None = None, keep: str = "state"
) -> list[RequestOutput]:
    """Greedy answers in the order of the examples; K is `budget` in every request if given.

    `keep` is the state or a control, as in a request.
    """
    from vllm import SamplingParams

    entry = {"autoprune": {"budget": budget, "keep": keep}}
    pruning = {"mm_processor_kwargs": entry} if budget else {}
    prompts = [
        {
            "prompt": prompt(example.question),
            "multi_modal_data": {"image": Image.fromarray(example.image.permute(1, 2, 0).numpy())},
            **pruning,
        }
        for example in examples
    ]
    sampling = SamplingParams(temperature=0, max_tokens=MAX_ANSWER_TOKENS)
    return engine.generate(prompts, sampling, use_tqdm=False)


def main() -> None:
    """Parse the arguments, ask the questions and write the scores as JSON."""
    parser = CommandParser(description="Score a stock vLLM engine on a held-out split.")
    parser.add_argument(
        "--checkpoint", type=Path, default=CHECKPOINT, help="folder of the checkpoint"
    )
    parser.add_argument("--split", choices=get_args(Split), default="test", help="held-out split")
    parser.add_argument("--scenes", type=int, default=200, help="scenes of it")
    # A file, because the engine's processes write their log lines to standard output as well.
    parser.add_argument("--json", type=Path, required=True, help="file for the scores")
    arguments = parser.parse_args()
    examples = draw_examples(arguments.split, arguments.scenes)
    outputs = answer_questions(open_engine(arguments.checkpoint), examples)
    answers = [output.outputs[0].text for output in outputs]
    arguments.json.write_text(json.dumps(asdict(grade_answers(examples, answers)), indent=1) + "\n")


if __name__ == "__main__":
    main()
