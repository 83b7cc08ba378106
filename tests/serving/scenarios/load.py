"""Many images at once: mixed budgets, bounded vision batches, long conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.serving.engine import (
    STATE,
    chat,
    examples,
    forget,
    generate,
    model_of,
    picture,
    prompt,
    start,
    turn,
)
from tests.serving.paths import TOKENS
from tests.serving.scenarios import Report, scenario
from tests.serving.selection_recorder import watch

if TYPE_CHECKING:
    from vllm import LLM


@scenario
def batches() -> Report:
    """Mixed budgets at once and one by one, bounded vision batches, many images, follow-ups."""
    llm = start({**STATE, "budget": 32})
    model = model_of(llm)
    seen = watch(model.vision_tower)
    questions = examples(4)[:12]
    budgets = [8 + 4 * i for i in range(len(questions))]
    together = generate(llm, [prompt(e, k) for e, k in zip(questions, budgets, strict=True)])
    kept_together = {str(plan): rows for plan, rows in seen.kept.items()}
    mixed = list(seen.budgets)
    forget(llm)
    seen.kept.clear()
    alone = [generate(llm, [prompt(e, k)])[0] for e, k in zip(questions, budgets, strict=True)]
    kept_alone = {str(plan): rows for plan, rows in seen.kept.items()}
    forget(llm)
    seen.vision_batches.clear()
    scenes = [picture(e.image).rotate(7 * i) for i, e in enumerate(examples(4)[:20])]
    many = [
        {
            "prompt": "USER: " + "<image>" * 20 + f"\nHow many? {i} ASSISTANT:",
            "multi_modal_data": {"image": [scene.rotate(i) for scene in scenes]},
            "mm_processor_kwargs": {"autoprune": {"budget": 2}},
        }
        for i in range(5)
    ]
    twenty = generate(llm, many)
    conversation = [turn(questions[0].question, questions[0].image)]
    first = chat(llm, [conversation])[0]
    later = [
        *conversation,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": [{"type": "text", "text": questions[1].question}]},
    ]
    return {
        "together": [a.plain() for a in together],
        "alone": [a.plain() for a in alone],
        "kept_together": kept_together,
        "kept_alone": kept_alone,
        "budgets_at_once": max(len(set(b)) for b in mixed),
        "twenty": [a.plain() for a in twenty],
        "vision_batches": seen.vision_batches,
        "bound": model.autoprune_bound // TOKENS,
        "turn_one": first.plain(),
        "samples": _samples(llm, conversation),
        "turn_two": chat(llm, [later])[0].plain(),
    }


def _samples(llm: LLM, conversation: Sequence[object]) -> list[str]:
    """Three samples of one request (``n = 3``) at a temperature near 0."""
    from vllm import SamplingParams

    sampling = SamplingParams(n=3, temperature=0.01, seed=0, max_tokens=4)
    (output,) = llm.chat([conversation], sampling, use_tqdm=False)
    return [completion.text.strip() for completion in output.outputs]
