"""Every base policy alone on a real engine, beside the same policy computed with transformers.

Knows nothing about how close they should be. Everything is float32, so that rounding is small
against what decides between two tokens.
"""

from __future__ import annotations

import json
from typing import Any

from tests.serving.engine import (
    STATE,
    alone,
    examples,
    generate,
    model_of,
    picture,
    prompt,
    released,
    start,
)
from tests.serving.offline import Offline
from tests.serving.scenarios import Report, scenario
from tests.serving.watch import Watch, watch
from vllm_autoprune import materialize
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.load import load_state

SMALL = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 64}


@scenario
def base_policies() -> Report:
    """For each of them: prompt lengths, what is kept at two budgets, and what transformers keeps.

    ``full`` has the prompt lengths of a server without a state.
    """
    asked = examples(2)
    llm = start(None, **SMALL)
    report: dict[str, Any] = {
        "full": [generate(llm, [prompt(e)])[0].prompt_tokens for e in asked],
        "policies": {},
    }
    released(llm)
    offline, seen = Offline(), watch()
    for name in BASE_POLICIES:
        report["policies"][name] = _served(name, offline, seen)
    return report


def _served(name: str, offline: Offline, seen: Watch) -> Report:
    llm = start({**STATE, "state": alone(name), "budget": 16}, **SMALL)
    state = load_state(json.dumps(alone(name)))
    report: dict[str, Any] = {}
    for budget in (16, 8):
        policy = materialize(state, budget)
        cases = []
        for example in examples(2):
            seen.kept.clear()
            answer = generate(llm, [prompt(example, budget)])[0]
            expected = offline.kept(policy, picture(example.image), example.question)
            case: dict[str, Any] = {
                "prompt_tokens": answer.prompt_tokens,
                "text": answer.text,
                "offline": expected.indices[0].tolist(),
            }
            for plan, kept in seen.kept.items():  # nothing, where questions share what is kept
                apart = (seen.rows[plan] - expected.features[0]).abs().max()
                case |= {"kept": kept, "rows_apart": float(apart)}
            cases.append(case)
        report[str(budget)] = cases
    meter = model_of(llm).autoprune_meter
    report["fallbacks"], report["errors"] = meter.counts(), meter.raised
    released(llm)
    return report
