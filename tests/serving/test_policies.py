"""Every base policy and every shipped state on a real engine.

That what transformers computes of the checkpoints is what ``LlavaVision`` reads of them:
``tests/test_checkpoint.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.yardsticks.examples import Example
from tests.serving.engine import (
    CLIP,
    LLAVA,
    STATE,
    TOKENS,
    Watch,
    alone,
    breaking,
    examples,
    forget,
    generate,
    generate_each,
    model_of,
    picture,
    prompt,
    release,
    start,
    watch,
)
from tests.serving.scenarios import Report, Runner, scenario
from vllm_autoprune import materialize, refine
from vllm_autoprune.checkpoint import LlavaVision
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, INSTRUCTION_NEEDS
from vllm_autoprune.tpdsl.loading import load_state, shipped_states

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


SMALL = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 64}
BUDGETS = (8, 16)
HALF = TOKENS // 2
"""What requests ask for where a state's own budget keeps every token of so small an image."""

READ_THE_INSTRUCTION = {
    name
    for name, base in BASE_POLICIES.items()
    if base.needs_of(base.default_params) & INSTRUCTION_NEEDS
}


def _increase(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {kind: count - before.get(kind, 0) for kind, count in after.items()}


@scenario
def base_policies() -> Report:
    """Prompt lengths and kept tokens of each base policy at two budgets, and transformers' tokens.

    Requests to one engine bring the policies, because starting an engine for each takes as long as
    all requests. ``full`` has the prompt lengths of a server without a state. By policy: ``cases``
    with kept tokens and those of transformers; kept tokens ``together``, in one batch with empty
    caches, and ``alone``; ``survived``: prompt lengths with a very long instruction, an empty one,
    and features that are not finite. ``fallbacks`` and ``errors`` before the last of these and
    after it.
    """
    questions = examples(2)
    llm = start(None, **SMALL)
    answers = generate_each(llm, [prompt(e) for e in questions])
    report: dict[str, Any] = {"full": [answer["prompt_tokens"] for answer in answers]}
    report["policies"] = {}
    release(llm)
    llm = start({**STATE, "requests": "states"}, **SMALL)
    offline = LlavaVision(LLAVA, CLIP, dtype="float32")
    seen = watch()
    meter = model_of(llm).autoprune_reporter.meter
    for name in BASE_POLICIES:
        forget(llm)
        seen.kept.clear()
        counts, errors = meter.counts(), dict(meter.errors)
        state = alone(name)
        cases = [_compare(llm, offline, seen, state, k, e) for k in BUDGETS for e in questions]
        row: dict[str, Any] = {"cases": cases, "fallbacks": [_increase(counts, meter.counts())]}
        row["alone"] = seen.take()
        forget(llm)
        seen.budgets.clear()
        generate(llm, [prompt(e, state=state, budget=16) for e in questions])
        row |= {"together": seen.take(), "at_once": max(map(len, seen.budgets))}

        example, other = questions[0], questions[-1]
        fields = {"state": state, "budget": 16}
        long = prompt(example, instructions=[" ".join(["red"] * 10_000)], **fields)
        spoilt = prompt(example, **fields)
        spoilt["multi_modal_data"]["image"] = picture(example.image).rotate(9)  # not cached
        survived = generate_each(llm, [long, prompt(other, instructions=[""], **fields)])
        broken = breaking(model_of(llm).multi_modal_projector, float("nan"))
        survived += generate(llm, [spoilt])
        broken.remove()
        row["survived"] = [answer["prompt_tokens"] for answer in survived]
        row["fallbacks"].append(_increase(counts, meter.counts()))
        row["errors"] = _increase(errors, dict(meter.errors))
        report["policies"][name] = row
    return report


def _compare(
    llm: LLM,
    offline: LlavaVision,
    seen: Watch,
    state: Mapping[str, object],
    budget: int,
    example: Example,
) -> Report:
    """One answer's prompt tokens, its kept tokens, and the tokens that transformers keeps."""
    before = set(seen.kept)
    answer = generate(llm, [prompt(example, state=state, budget=budget)])[0]
    policy = materialize(load_state(json.dumps(state)), budget)
    expected = refine(policy, offline.encode(picture(example.image), example.question))
    case: dict[str, Any] = {"prompt_tokens": answer["prompt_tokens"]}
    for plan in set(seen.kept) - before:  # none, where questions share what is kept
        apart = (seen.rows[plan] - expected.features[0]).abs().max()
        case |= {"kept": seen.kept[plan], "rows_apart": float(apart)}
        case["offline"] = expected.indices[0].tolist()
    return case


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_kept_tokens_of_a_base_policy_equal_those_of_transformers(
    runner: Runner, name: str
) -> None:
    """Equal tokens, and rows equal up to float32 rounding; each prompt is shorter by N - K.

    A policy that does not read the instruction selects once an image: later questions find the
    rows in vLLM's caches.
    """
    report = runner.run("base_policies")
    full, row = report["full"], report["policies"][name]
    lengths = [tokens - (TOKENS - budget) for budget in BUDGETS for tokens in full]
    assert [case["prompt_tokens"] for case in row["cases"]] == lengths
    selected = [case for case in row["cases"] if "kept" in case]
    images = 2
    assert len(selected) == len(BUDGETS) * (len(full) if name in READ_THE_INSTRUCTION else images)
    for case in selected:
        assert case["kept"] == case["offline"]
        assert case["rows_apart"] < 1e-3
    fallbacks = row["fallbacks"][0]
    assert fallbacks["reference"] == fallbacks["uniform"] == 0 < fallbacks["none"]


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_batched_and_single_questions_keep_the_same_tokens(runner: Runner, name: str) -> None:
    row = runner.run("base_policies")["policies"][name]
    together, alone = row["together"], row["alone"]
    assert row["at_once"] > 1
    assert together
    assert together == {plan: alone[plan] for plan in together}


@pytest.mark.parametrize("name", BASE_POLICIES)
def test_extreme_instructions_and_features_do_not_stop_a_base_policy(
    runner: Runner, name: str
) -> None:
    """10,000 words; no words; non-finite features, which give evenly spaced tokens."""
    report = runner.run("base_policies")
    row, full = report["policies"][name], report["full"]
    assert row["survived"] == [full[at] - (TOKENS - 16) for at in (0, -1, 0)]
    assert row["fallbacks"][1]["uniform"] == 1
    assert not any(row["errors"].values())


@scenario
def shipped_by_request() -> Report:
    """Every shipped state, named by requests to one engine that runs another state.

    By state: prompt tokens by K, ``fallbacks`` and ``errors``.
    """
    example = examples(1)[0]
    llm = start(None, **SMALL)
    report: dict[str, Any] = {"full": generate(llm, [prompt(example)])[0]["prompt_tokens"]}
    release(llm)
    llm = start({**STATE, "state": "divprune", "requests": "states"}, **SMALL)
    meter = model_of(llm).autoprune_reporter.meter
    for name, file in shipped_states().items():
        shipped = materialize(load_state(file)).tokens_kept(TOKENS)
        forget(llm)  # names of one state share their cached rows
        before = meter.counts()
        entries: dict[int, dict[str, object]] = {shipped: {"state": name}}
        if shipped >= TOKENS:
            entries[HALF] = {"state": name, "budget": HALF}
        report[name] = {
            "lengths": {
                k: generate(llm, [prompt(example, **entry)])[0]["prompt_tokens"]
                for k, entry in entries.items()
            },
            "fallbacks": _increase(before, meter.counts()),
            "errors": dict(meter.errors),
        }
    return report


@pytest.mark.parametrize("name", shipped_states())
def test_a_request_may_name_a_shipped_state(name: str) -> None:
    """K tokens at the state's own budget, no fallback and no error.

    A state that keeps all 144 tokens of this model's images is also run at 72.
    """
    report = Runner("v1").run("shipped_by_request")
    served, fallbacks = report[name], report[name]["fallbacks"]
    assert min(map(int, served["lengths"])) < TOKENS
    for kept, length in served["lengths"].items():
        assert length == report["full"] - TOKENS + min(int(kept), TOKENS)
    assert served["errors"] == {}
    assert fallbacks["reference"] == fallbacks["uniform"] == 0 < fallbacks["none"]
