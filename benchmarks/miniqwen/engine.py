"""``python -m benchmarks.miniqwen.engine``: score a vLLM engine on a split, stock or pruned.

Answers, and the tokens that states keep, are also compared with those of transformers, which the
yardsticks are measured with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, get_args

import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from benchmarks.accuracy.yardsticks.cases import RESIZED, Budget, Case
from benchmarks.accuracy.yardsticks.miniqwen import MiniQwen
from benchmarks.accuracy.yardsticks.yardstick import Yardstick
from benchmarks.minillava.split import Example, Split, is_right
from benchmarks.miniqwen.split import (
    CHECKPOINT,
    convert_image,
    draw_examples,
    grade_answers,
    image_size,
)
from benchmarks.miniqwen.vocabulary import prompt
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.explain import keep_engine_in_process, record_selections
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine

if TYPE_CHECKING:
    from vllm import LLM

MAX_ANSWER_TOKENS = 6
"""More than the longest answer and its end token."""


def open_engine(checkpoint: Path, settings: Mapping[str, object] | None = None) -> LLM:
    """Start an engine; `settings` are the plugin's, and without them it prunes nothing."""
    from vllm import LLM

    return LLM(
        model=str(checkpoint),
        enforce_eager=True,
        dtype=choose_dtype(),
        max_model_len=1024,
        block_size=32,
        limit_mm_per_prompt={"image": 1, "video": 0},
        additional_config={"autoprune": dict(settings)} if settings else {},
    )


def engine_answers(
    engine: LLM, examples: Sequence[Example], divisor: int = 1, case: Case | None = None
) -> list[str]:
    """Greedy answers of vLLM in the order of the examples; K is N over the divisor.

    With a case, every request brings its state or its control.
    """
    from vllm import SamplingParams

    prompts = [
        {
            "prompt": prompt(example.question),
            "multi_modal_data": {"image": convert_image(example.image)},
            **_pruning(example, divisor, case),
        }
        for example in examples
    ]
    sampling = SamplingParams(temperature=0, max_tokens=MAX_ANSWER_TOKENS)
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def _pruning(example: Example, divisor: int, case: Case | None) -> dict[str, object]:
    if case is None:
        return {}
    entry: dict[str, object] = {"budget": image_size(example.image).tokens // divisor}
    if case.state is None:
        entry["keep"] = case.control
    else:
        entry["state"] = json.loads(case.state.dumps())
    return {"mm_processor_kwargs": {"autoprune": entry}}


@torch.no_grad()
def right_in_process(
    yardstick: Yardstick, examples: Sequence[Example], case: Case
) -> Iterator[bool]:
    """Which questions the yardstick answers right in a case, in the order of the examples."""
    for _, batch in groupby(examples, key=lambda example: example.image_id):
        yield from yardstick.encode(list(batch)).score(case).answers.right.tolist()


@torch.no_grad()
def kept_in_process(
    yardstick: Yardstick, examples: Sequence[Example], case: Case
) -> Iterator[set[int]]:
    """The tokens that the case's state keeps of each example's image, by the yardstick's inputs."""
    assert case.state is not None
    for _, batch in groupby(examples, key=lambda example: example.image_id):
        tokens = yardstick.encode(list(batch)).tokens
        policy = materialize(case.state, case.budget.tokens(tokens.count))
        yield from map(set, refine(policy, tokens).indices.tolist())


def kept_in_engine(
    engine: LLM, examples: Sequence[Example], divisor: int, case: Case
) -> Iterator[tuple[str, set[int]]]:
    """Answer and kept tokens of each example, asked alone: images of a batch come in any order."""
    for example in examples:
        engine.reset_prefix_cache()
        engine.reset_mm_cache()
        engine.llm_engine.reset_encoder_cache()
        with record_selections() as selections:
            (answer,) = engine_answers(engine, [example], divisor, case)
        ((_, _, refined),) = selections
        yield answer, set(refined.indices[0].tolist())


@torch.no_grad()
def transformers_answers(checkpoint: Path, examples: Sequence[Example]) -> list[str]:
    """Greedy answers of transformers, in the order of the examples."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=choose_dtype())
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
    parser = CommandParser(description="Score a vLLM engine on a held-out split.")
    parser.add_argument(
        "--checkpoint", type=Path, default=CHECKPOINT, help="folder of the checkpoint"
    )
    parser.add_argument("--split", choices=get_args(Split), default="test", help="held-out split")
    parser.add_argument("--images", type=int, default=200, help="pictures of it")
    parser.add_argument("--state", nargs="+", default=[], help="states to serve, one after another")
    parser.add_argument("--divisor", type=int, default=8, help="K is N over it, with a state")
    # A file, because the engine's processes write their log lines to standard output as well.
    parser.add_argument("--json", type=Path, required=True, help="file for the scores")
    arguments = parser.parse_args()
    examples = draw_examples(arguments.split, arguments.images)
    report: Mapping[str, object] = (
        _compare_pruned(arguments, examples)
        if arguments.state
        else _compare_stock(arguments.checkpoint, examples)
    )
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def _compare_stock(checkpoint: Path, examples: Sequence[Example]) -> dict[str, object]:
    reference = transformers_answers(checkpoint, examples)
    answers = engine_answers(open_engine(checkpoint), examples)
    same = [one == other for one, other in zip(answers, reference, strict=True)]
    return {
        "questions": len(examples),
        "same answer": sum(same) / len(same),
        "vllm": asdict(grade_answers(examples, answers)),
        "transformers": asdict(grade_answers(examples, reference)),
    }


def _compare_pruned(
    arguments: argparse.Namespace, examples: Sequence[Example]
) -> dict[str, dict[str, object]]:
    """By state, and for the resize control: accuracy both ways, and shares of equal results.

    A verdict is whether an answer is right; of a state also how many questions keep the same
    tokens, what share of its tokens an image has in common, and equal verdicts where all are.
    """
    keep_engine_in_process()
    states = {name: load_state(name) for name in arguments.state}
    first = next(iter(states.values()))
    engine = open_engine(
        arguments.checkpoint, {"state": json.loads(first.dumps()), "requests": "states"}
    )
    yardstick, report = MiniQwen(arguments.checkpoint), dict[str, dict[str, object]]()
    budget = Budget(f"N/{arguments.divisor}", Fraction(1, arguments.divisor))
    cases = [Case(RESIZED, budget, RESIZED)]
    cases += [Case(name, budget, state=state) for name, state in states.items()]
    for case in cases:
        kept: list[set[int]] = []
        if case.state is None:
            answers = engine_answers(engine, examples, arguments.divisor, case)
        else:
            asked = list(kept_in_engine(engine, examples, arguments.divisor, case))
            answers, kept = [answer for answer, _ in asked], [tokens for _, tokens in asked]
        served = [is_right(text, one.answer) for text, one in zip(answers, examples, strict=True)]
        own = list(right_in_process(yardstick, examples, case))
        same = [one == other for one, other in zip(served, own, strict=True)]
        report[case.name] = {
            "questions": len(examples),
            "same verdict": fmean(same),
            "vllm": fmean(served),
            "in process": fmean(own),
        }
        if kept:
            pairs = list(zip(kept, kept_in_process(yardstick, examples, case), strict=True))
            equal = [one == other for one, other in pairs]
            report[case.name] |= {
                "same tokens": fmean(equal),
                "tokens in common": fmean(len(one & other) / len(one) for one, other in pairs),
                "same verdict with the same tokens": fmean(
                    verdict for verdict, tokens in zip(same, equal, strict=True) if tokens
                ),
            }
    return report


if __name__ == "__main__":
    main()
