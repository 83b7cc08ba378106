"""Every base policy and every shipped state on a real engine.

That what transformers computes of the checkpoints is what ``LlavaVision`` reads of them:
``tests/test_checkpoint.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from tests.serving.engine import (
    CLIP,
    LLAVA,
    STATE,
    TOKENS,
    alone,
    breaking,
    examples,
    generate,
    generate_each,
    model_of,
    picture,
    prompt,
    release,
    start,
    watch,
)
from tests.serving.runners import Result, Runner, in_engine
from vllm_autoprune import materialize, refine
from vllm_autoprune.checkpoint import LlavaVision
from vllm_autoprune.selftest.serve import empty_caches
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, INSTRUCTION_NEEDS
from vllm_autoprune.tpdsl.loading import load_state, shipped_states

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


SMALL: Mapping[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "num_gpu_blocks_override": 64,
}
BUDGETS = (8, 16)


def _count(llm: LLM) -> Counter[str]:
    """Selections by their fallback, and errors, so far."""
    meter = model_of(llm).autoprune_reporter.meter
    return Counter({**meter.counts(), "errors": sum(meter.errors.values())})


def serve_base_policies() -> Result:
    """What each base policy does; requests to one engine bring them, which saves their starts.

    ``full`` has the prompt lengths of a server without a state. By policy: ``lengths`` of prompts
    by K and question, kept tokens ``kept`` and those of ``transformers`` where something was
    selected, how far their ``rows`` are apart; kept tokens ``together``, in one batch with empty
    caches, and ``single``; ``survived``: prompt lengths with a very long instruction, an empty one,
    and features that are not finite. ``fallbacks`` before the last of these and after it.
    """
    questions = examples(2)
    llm = start(None, **SMALL)
    answers = generate_each(llm, [prompt(e) for e in questions])
    report: dict[str, Any] = {"full": [answer["prompt_tokens"] for answer in answers]}
    release(llm)
    llm = start({**STATE, "requests": "states"}, **SMALL)
    offline = LlavaVision(LLAVA, CLIP, dtype="float32")
    seen = watch()
    for name in BASE_POLICIES:
        empty_caches(llm)
        seen.take()
        before, state, single = _count(llm), alone(name), {}
        row: dict[str, Any] = {"lengths": [], "kept": [], "transformers": [], "rows": []}
        for budget in BUDGETS:
            policy = materialize(load_state(json.dumps(state)), budget)
            for example in questions:
                fields = {"state": state, "budget": budget}
                (answer,) = generate(llm, [prompt(example, **fields)])
                row["lengths"].append(answer["prompt_tokens"])
                # None, where questions share what is kept.
                for plan, kept in seen.take().items():
                    single[str(plan)] = kept
                    image = offline.encode(picture(example.image), example.question)
                    expected = refine(policy, image)
                    apart = (seen.rows[plan] - expected.features[0]).abs().max()
                    row["kept"].append(kept)
                    row["transformers"].append(expected.indices[0].tolist())
                    row["rows"].append(float(apart))
        row["fallbacks"] = [_count(llm) - before]
        empty_caches(llm)
        seen.budgets.clear()
        generate(llm, [prompt(e, state=state, budget=16) for e in questions])
        row["together"] = {str(plan): kept for plan, kept in seen.take().items()}
        row |= {"single": single, "at_once": max(map(len, seen.budgets))}

        fields = {"state": state, "budget": 16}
        long = prompt(questions[0], instructions=[" ".join(["red"] * 10_000)], **fields)
        spoilt = prompt(questions[0], **fields)
        spoilt["multi_modal_data"]["image"] = picture(questions[0].image).rotate(9)  # not cached
        survived = generate_each(llm, [long, prompt(questions[-1], instructions=[""], **fields)])
        broken = breaking(model_of(llm).multi_modal_projector, float("nan"))
        survived += generate(llm, [spoilt])
        broken.remove()
        row["survived"] = [answer["prompt_tokens"] for answer in survived]
        row["fallbacks"].append(_count(llm) - before)
        report[name] = row
    return report


@pytest.mark.reads.with_args(serve_base_policies)
@pytest.mark.parametrize("name", BASE_POLICIES)
def test_a_base_policy_keeps_what_it_keeps_in_transformers(runner: Runner, name: str) -> None:
    """Equal tokens, and rows equal up to float32 rounding; each prompt is shorter by N - K.

    Alone and in one batch. A policy that does not read the instruction selects once an image: later
    questions find the rows in vLLM's caches. 10,000 words, no words, and features that are not
    finite, which give evenly spaced tokens, do not stop it.
    """
    report = runner.run(serve_base_policies)
    full, row = report["full"], report[name]
    assert row["lengths"] == [tokens - (TOKENS - budget) for budget in BUDGETS for tokens in full]
    base = BASE_POLICIES[name]
    reads_instruction = bool(base.needs_of(base.default_params) & INSTRUCTION_NEEDS)
    images = 2
    assert len(row["kept"]) == len(BUDGETS) * (len(full) if reads_instruction else images)
    assert row["kept"] == row["transformers"] and max(row["rows"]) < 1e-3
    assert row["together"] and row["at_once"] > 1
    assert row["together"] == {plan: row["single"][plan] for plan in row["together"]}
    assert row["survived"] == [full[at] - (TOKENS - 16) for at in (0, -1, 0)]
    usual, survived = (Counter[str](counts) for counts in row["fallbacks"])
    assert usual["reference"] == usual["uniform"] == survived["errors"] == 0 < usual["none"]
    assert survived["uniform"] == 1


@pytest.mark.only("v1")
@in_engine
def test_a_request_may_name_any_shipped_state() -> None:
    """Of an engine that runs another one: K tokens at its own budget, no fallback and no error.

    A state that keeps all 144 tokens of this model's images is also run at 72.
    """
    example = examples(1)[0]
    llm = start(None, **SMALL)
    full = generate(llm, [prompt(example)])[0]["prompt_tokens"]
    release(llm)
    llm = start({**STATE, "state": "divprune", "requests": "states"}, **SMALL)
    for name, file in shipped_states().items():
        shipped = materialize(load_state(file)).tokens_kept(TOKENS)
        empty_caches(llm)  # names of one state share their cached rows
        before = _count(llm)
        entries: dict[int, dict[str, object]] = {min(shipped, TOKENS): {"state": name}}
        if shipped >= TOKENS:
            entries[TOKENS // 2] = {"state": name, "budget": TOKENS // 2}
        for kept, entry in entries.items():
            (answer,) = generate(llm, [prompt(example, **entry)])
            assert answer["prompt_tokens"] == full - TOKENS + kept, name
        by = _count(llm) - before
        assert by["errors"] == by["reference"] == by["uniform"] == 0 < by["none"], name
