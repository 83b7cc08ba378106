"""Every base policy alone on a real engine, compared with transformers.

All in float32, so that rounding is small compared with the margin between two tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.yardsticks.examples import Example
from tests.serving.engine import (
    STATE,
    alone,
    examples,
    forget,
    generate,
    model_of,
    picture,
    prompt,
    release,
    start,
)
from tests.serving.offline import Offline
from tests.serving.scenarios import Report, scenario
from tests.serving.scenarios.hostile import breaking
from tests.serving.selection_recorder import Watch, watch
from vllm_autoprune import PruningPolicy, materialize
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state

if TYPE_CHECKING:
    from vllm import LLM

SMALL = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 64}


@scenario
def base_policies() -> Report:
    """Prompt lengths and kept tokens of each base policy at two budgets, and transformers' tokens.

    Requests to one engine bring the policies, because starting an engine for each takes as long as
    all requests. ``full`` has the prompt lengths of a server without a state.
    """
    questions = examples(2)
    llm = start(None, **SMALL)
    report: dict[str, Any] = {
        "full": [generate(llm, [prompt(e)])[0].prompt_tokens for e in questions],
        "policies": {},
    }
    release(llm)
    llm = start({**STATE, "requests": "states"}, **SMALL)
    offline, seen = Offline(), watch()
    for name in BASE_POLICIES:
        forget(llm)
        report["policies"][name] = _served(llm, name, offline, seen)
    return report


def _served(llm: LLM, name: str, offline: Offline, seen: Watch) -> Report:
    state = load_state(json.dumps(alone(name)))
    meter = model_of(llm).autoprune_reporter.meter
    before, errors = meter.counts(), Counter(meter.errors)
    report: dict[str, Any] = {}
    for budget in (8, 16):
        seen.kept.clear()
        policy = materialize(state, budget)
        report[str(budget)] = [_beside(llm, offline, policy, seen, e) for e in examples(2)]
    report["fallbacks"] = _increase(before, meter.counts())
    report["errors"] = dict(Counter(meter.errors) - errors)
    report["alone"] = {str(plan): kept for plan, kept in seen.kept.items()}
    report["together"] = _together(llm, name, seen)
    report["survived"] = _survived(llm, name)
    report["broken"] = _increase(before, meter.counts())
    report["errors_at_last"] = dict(Counter(meter.errors) - errors)
    return report


def _increase(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {kind: count - before[kind] for kind, count in after.items()}


def _prompt(
    name: str, example: Example, budget: int = 16, instruction: str | None = None
) -> dict[str, Any]:
    """An example as a raw prompt that brings a base policy."""
    raw: dict[str, Any] = prompt(example, budget, instruction)
    raw["mm_processor_kwargs"]["autoprune"]["state"] = alone(name)
    return raw


def _beside(
    llm: LLM, offline: Offline, policy: PruningPolicy, seen: Watch, example: Example
) -> Report:
    """One answer, its kept tokens, and the tokens that transformers keeps."""
    before = set(seen.kept)
    name = policy.state.base_policy.name
    answer = generate(llm, [_prompt(name, example, policy.budget)])[0]
    expected = offline.kept(policy, picture(example.image), example.question)
    case: dict[str, Any] = {
        "prompt_tokens": answer.prompt_tokens,
        "text": answer.text,
        "offline": expected.indices[0].tolist(),
    }
    for plan in set(seen.kept) - before:  # none, where questions share what is kept
        apart = (seen.rows[plan] - expected.features[0]).abs().max()
        case |= {"kept": seen.kept[plan], "rows_apart": float(apart)}
    return case


def _together(llm: LLM, name: str, seen: Watch) -> Report:
    """Kept tokens of all examples in one batch, with empty caches."""
    forget(llm)
    seen.kept.clear()
    seen.budgets.clear()
    generate(llm, [_prompt(name, e) for e in examples(2)])
    kept = {str(plan): kept for plan, kept in seen.kept.items()}
    return {"kept": kept, "at_once": max(map(len, seen.budgets))}


def _survived(llm: LLM, name: str) -> Report:
    """Answers to a very long instruction, to an empty one, and with non-finite features."""
    example, other = examples(2)[0], examples(2)[-1]
    unseen = {"multi_modal_data": {"image": picture(example.image).rotate(9)}}
    document = generate(llm, [_prompt(name, example, instruction=" ".join(["red"] * 10_000))])[0]
    nothing = generate(llm, [_prompt(name, other, instruction="")])[0]
    broken = breaking(model_of(llm).multi_modal_projector, float("nan"))
    spoilt = generate(llm, [{**_prompt(name, example), **unseen}])[0]
    broken.remove()
    return [answer.plain() for answer in (document, nothing, spoilt)]
