"""Measurement of a state: vLLM serves it and answers held-out questions at several budgets."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Sequence

from benchmarks.minillava.engine import answer_questions, open_engine
from benchmarks.minillava.split import CHECKPOINT, CLIP, Example, scores
from benchmarks.zoo.evidence import Row
from vllm_autoprune import PruningState


def measure(
    state: PruningState, examples: Sequence[Example], budgets: Sequence[int]
) -> tuple[Row, ...]:
    """Ask every question at every budget, in one engine in this process.

    States are measured one after another in the same process, because importing vLLM takes most of
    the time to start an engine.
    """
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {"state": json.loads(state.dumps()), "text_tower": str(CLIP)}
    engine = open_engine(CHECKPOINT, settings)
    rows = []
    try:
        for budget in budgets:
            outputs = answer_questions(engine, examples, budget)
            lengths = [len(output.prompt_token_ids or ()) for output in outputs]
            score = scores(examples, [output.outputs[0].text for output in outputs])
            rows.append(
                Row(
                    budget=budget,
                    accuracy=round(100 * score.accuracy, 2),
                    accuracy_plus=round(100 * score.accuracy_plus, 2),
                    prompt_tokens=round(sum(lengths) / len(lengths), 1),
                )
            )
    finally:
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()
    return tuple(rows)


def behaviour_digest(state: PruningState) -> str:
    """SHA-256 of everything in a state that affects answers at a budget given by the request."""
    body = state.model_dump(mode="json", exclude={"name", "provenance", "budget"})
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
