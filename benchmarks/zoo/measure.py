"""Evidence for a state: served by vLLM, asked the held-out questions at several budgets.

Knows nothing about what the state is made of.

One engine after the other in this process: importing vLLM is most of starting one.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.minillava.engine import MAX_ANSWER_TOKENS
from benchmarks.minillava.split import CLIP, LLAVA, Example, held_out, scores
from benchmarks.minillava.vocabulary import prompt
from benchmarks.zoo.evidence import Row
from vllm_autoprune import PruningState


def questions(scenes: int) -> list[Example]:
    """All questions about the first scenes of the test split."""
    return held_out("test", scenes)


def measure(
    state: PruningState, examples: Sequence[Example], budgets: Sequence[int]
) -> tuple[Row, ...]:
    """One engine, every question at every budget; greedy."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {"state": json.loads(state.dumps()), "text_tower": str(CLIP)}
    llm = LLM(
        model=str(LLAVA),
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=512,
        block_size=32,
        additional_config={"autoprune": settings},
    )
    sampling = SamplingParams(temperature=0, max_tokens=MAX_ANSWER_TOKENS)
    found = []
    try:
        for budget in budgets:
            outputs = llm.generate(
                [_prompt(example, budget) for example in examples], sampling, use_tqdm=False
            )
            answers = [output.outputs[0].text for output in outputs]
            lengths = [len(output.prompt_token_ids or ()) for output in outputs]
            score = scores(examples, answers)
            found.append(
                Row(
                    budget=budget,
                    accuracy=round(100 * score.accuracy, 2),
                    accuracy_plus=round(100 * score.accuracy_plus, 2),
                    prompt_tokens=round(sum(lengths) / len(lengths), 1),
                )
            )
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    return tuple(found)


def behaviour(state: PruningState) -> str:
    """What decides the answers at a budget given by the request: all but the state's own K."""
    body = state.model_dump(mode="json", exclude={"name", "provenance", "budget"})
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def checkpoint_digest() -> str:
    """First twelve digits of the SHA-256 over the model's weights."""
    digest = hashlib.sha256()
    for folder in (LLAVA, CLIP):
        for path in sorted(Path(folder).glob("*.safetensors")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _prompt(example: Example, budget: int) -> dict[str, object]:
    from PIL import Image

    return {
        "prompt": prompt(example.question),
        "multi_modal_data": {"image": Image.fromarray(example.image.permute(1, 2, 0).numpy())},
        "mm_processor_kwargs": {"autoprune": {"budget": budget}},
    }
