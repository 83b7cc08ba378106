"""``python -m benchmarks.yardsticks.engine``: score vLLM on the test split, stock and with states.

Answers, and the tokens that states keep, are compared with those in this process, which the table
of both yardsticks is measured with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from statistics import fmean

from benchmarks.yardsticks import YARDSTICKS, open_yardstick
from benchmarks.yardsticks.examples import (
    CHECKPOINTS,
    CLIP,
    LLAVA,
    MAX_ANSWER_TOKENS,
    as_picture,
    format_prompt,
    is_right,
)
from benchmarks.yardsticks.questions import Model
from benchmarks.yardsticks.yardstick import ALL_TOKENS, FULL, RESIZED, Budget, Case, batches
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.explain import keep_engine_in_process, record_selections
from vllm_autoprune.ops.dtype import choose_dtype
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.materialize import materialize
from vllm_autoprune.tpdsl.refine import refine

_EIGHTH = Budget("N/8", Fraction(1, 8))


def compare(model: Model, images: int, states: Sequence[str]) -> dict[str, dict[str, float]]:
    """By case, stock or resized and each state: accuracy both ways, and shares of equal results.

    A verdict is whether an answer is right; of a state also how many questions keep the same
    tokens, and equal verdicts where all are. Each question is asked alone, because images of a
    batch of requests are selected in any order.
    """
    keep_engine_in_process()
    from vllm import LLM, SamplingParams

    cases, settings = [Case(FULL, ALL_TOKENS, FULL)], dict[str, object]()
    if states:
        cases = [Case(RESIZED, _EIGHTH, RESIZED)]
        cases += [Case(name, _EIGHTH, state=load_state(name)) for name in states]
        settings = {"state": json.loads(load_state(states[0]).dumps()), "requests": "states"}
        settings |= {"text_tower": str(CLIP)} if model == "minillava" else {}
    engine = LLM(
        model=str(LLAVA if model == "minillava" else CHECKPOINTS[model]),
        enforce_eager=True,
        dtype=choose_dtype(),
        max_model_len=1024,
        block_size=32,
        limit_mm_per_prompt={"image": 1} | ({"video": 0} if model == "miniqwen" else {}),
        additional_config={"autoprune": settings} if settings else {},
    )
    sampling = SamplingParams(temperature=0, max_tokens=MAX_ANSWER_TOKENS)
    yardstick, report = open_yardstick(model), dict[str, dict[str, float]]()
    examples = yardstick.draw("test", images)
    for case in cases:
        served, computed, same_tokens = list[bool](), list[bool](), list[bool]()
        for batch in batches(yardstick, examples):
            encoded = yardstick.encode(batch)
            budget = case.budget.tokens(encoded.tokens.count)
            computed += encoded.score(case).right.tolist()
            kept, fields = None, dict[str, object]()
            if case.state is not None:
                kept = refine(materialize(case.state, budget), encoded.tokens).indices.tolist()
                fields = {"budget": budget, "state": json.loads(case.state.dumps())}
            elif case.control == RESIZED:
                fields = {"budget": budget, "keep": RESIZED}
            for number, example in enumerate(batch):
                prompt = {
                    "prompt": format_prompt(example.question, model),
                    "multi_modal_data": {"image": as_picture(example.image)},
                    **({"mm_processor_kwargs": {"autoprune": fields}} if fields else {}),
                }
                engine.reset_prefix_cache()
                engine.reset_mm_cache()
                engine.llm_engine.reset_encoder_cache()
                with record_selections() as selections:
                    (output,) = engine.generate([prompt], sampling, use_tqdm=False)
                served.append(is_right(output.outputs[0].text, example.answer))
                if kept is not None:
                    ((_, _, refined),) = selections
                    same_tokens.append({*refined.indices[0].tolist()} == {*kept[number]})
        same_verdict = [right == other for right, other in zip(served, computed, strict=True)]
        report[case.name] = {
            "questions": len(examples),
            "same verdict": fmean(same_verdict),
            "vllm": fmean(served),
            "in process": fmean(computed),
        }
        if same_tokens:
            equal = [same for same, of in zip(same_verdict, same_tokens, strict=True) if of]
            report[case.name] |= {
                "same tokens": fmean(same_tokens),
                "same verdict with the same tokens": fmean(equal or [True]),
            }
    return report


def main() -> None:
    """Parse the arguments, ask the questions and write scores and agreement as JSON."""
    parser = CommandParser(description="Score a vLLM engine on the test split.")
    parser.add_argument("yardstick", choices=YARDSTICKS, help="model to serve")
    parser.add_argument("--images", type=int, default=200, help="pictures of the test split")
    text = "states to serve with N/8 tokens, one after another"
    parser.add_argument("--state", nargs="+", default=[], help=text)
    # A file, because the engine's processes write their log lines to standard output as well.
    parser.add_argument("--json", type=Path, required=True, help="file for the scores")
    options = parser.parse_args()
    report = compare(options.yardstick, options.images, options.state)
    options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
