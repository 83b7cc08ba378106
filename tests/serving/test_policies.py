"""Every base policy, every shipped state, and states that requests bring, on a real engine.

That what transformers computes of the checkpoints is what ``LlavaVision`` reads of them:
``tests/test_checkpoint.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch

from benchmarks.yardsticks.examples import as_picture
from tests.serving.engine import (
    CLIP,
    LLAVA,
    STATE,
    TOKENS,
    Engine,
    alone,
    assert_same,
    examples,
    greedy,
    prompt,
    start,
    watch,
)
from tests.serving.runners import in_engine
from vllm_autoprune import materialize, refine
from vllm_autoprune.checkpoint import LlavaVision
from vllm_autoprune.selftest.run import BLOCK
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, INSTRUCTION_NEEDS
from vllm_autoprune.tpdsl.loading import load_state, shipped_states
from vllm_autoprune.tpdsl.tokens import POSITIONS

pytestmark = pytest.mark.engine

SMALL: Mapping[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "num_gpu_blocks_override": 64,
}


def _assert_no_fallback(engine: Engine, earlier: Counter[str], name: str) -> None:
    by = _count(engine) - earlier
    assert by["errors"] == by["reference"] == by["uniform"] == 0 < by["none"], name


def _count(engine: Engine) -> Counter[str]:
    """Selections by their fallback, and errors, so far."""
    reporter = engine.model.autoprune_reporter
    counts = Counter({"errors": sum(reporter.errors.values())})
    for (kind, _), images in reporter.counts().items():
        counts[kind] += images
    return counts


@in_engine
def test_a_base_policy_keeps_what_it_keeps_in_transformers() -> None:
    """Equal tokens, and rows equal up to float32 rounding; each prompt is shorter by N - K.

    Requests to one engine bring the policies. One that does not read the instruction selects once
    an image: later questions find the rows in vLLM's caches.
    """
    budgets = (8, 16)
    questions = examples(2)
    engine = start({**STATE, "requests": "states"}, **SMALL)
    unpruned = engine.generate_each(
        [prompt(example, enabled=False) for example in questions]
    )
    offline = LlavaVision(LLAVA, CLIP, dtype="float32")
    record = watch()
    for name, base in BASE_POLICIES.items():
        engine.empty_caches()
        earlier = _count(engine)
        state = alone(name)
        selections = 0
        for budget, number in product(budgets, range(len(questions))):
            policy = materialize(load_state(json.dumps(state)), budget)
            (answer,) = engine.generate(
                [prompt(questions[number], state=state, budget=budget)]
            )
            assert (
                answer["prompt_tokens"]
                == unpruned[number]["prompt_tokens"] - TOKENS + budget
            ), name
            for plan, indices in record.take().items():
                image = as_picture(questions[number].image)
                expected = refine(
                    policy, offline.encode(image, questions[number].question)
                )
                assert indices == expected.indices[0].tolist(), name
                assert (record.rows[plan] - expected.features[0]).abs().max() < 1e-3, (
                    name
                )
                selections += 1
        reads_instruction = bool(base.needs_of(base.default_params) & INSTRUCTION_NEEDS)
        images = 2
        assert selections == len(budgets) * (
            len(questions) if reads_instruction else images
        ), name
        _assert_no_fallback(engine, earlier, name)


@pytest.mark.both
@in_engine
def test_answers_are_those_of_transformers_with_the_same_tokens_and_positions() -> None:
    """Greedy tokens and their log-probabilities, in float32."""
    budget = 18
    questions = examples(2)[:6]
    engine = start({**STATE, "requests": "states"}, **SMALL)
    offline = LlavaVision(LLAVA, CLIP, dtype="float32")
    model = offline.model
    image_token = model.config.image_token_id
    for where in POSITIONS:
        state = {**alone("cen_divprune"), "positions": where}
        policy = materialize(load_state(json.dumps(state)), budget)
        for example in questions:
            request = prompt(example, state=state, budget=budget)
            (output,) = engine.llm.generate(
                [request], greedy(4, logprobs=0), use_tqdm=False
            )
            tokens = offline.encode(as_picture(example.image), example.question)
            selection = refine(policy, tokens)
            places = {"true": selection.indices[0], "packed": torch.arange(budget)}.get(
                where
            )
            if places is None:
                places = torch.arange(budget) * TOKENS // budget
            answer = output.outputs[0]
            ids = torch.tensor([*output.prompt_token_ids, *answer.token_ids])
            is_image = ids == image_token
            first_row = int(is_image.nonzero()[0])
            positions = torch.arange(len(ids)) + (
                0 if where == "packed" else TOKENS - budget
            )
            positions[:first_row] = torch.arange(first_row)
            positions[is_image] = first_row + places
            rows = model.get_input_embeddings()(ids)
            rows[is_image] = selection.features[0]
            with torch.no_grad():
                hidden = model.model.language_model(
                    inputs_embeds=rows[None],
                    position_ids=positions[None],
                    attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                ).last_hidden_state
                scores = model.lm_head(hidden)[0].log_softmax(-1)
            behind = torch.tensor(answer.token_ids)
            predicted = scores[len(output.prompt_token_ids) - 1 : -1]
            assert torch.equal(predicted.argmax(-1), behind)
            logprob = float(predicted.gather(1, behind[:, None]).sum())
            assert answer.cumulative_logprob == pytest.approx(logprob, abs=2e-3)


@pytest.mark.only("v1")
@in_engine
def test_a_request_may_name_any_shipped_state() -> None:
    """Of an engine that runs another one: K tokens at its own budget, no fallback and no error.

    A state that keeps all 144 tokens of this model's images is also run at 72.
    """
    example = examples(1)[0]
    engine = start({**STATE, "state": "divprune", "requests": "states"}, **SMALL)
    (full,) = engine.generate([prompt(example, enabled=False)])
    for name, file in shipped_states().items():
        shipped = materialize(load_state(file)).tokens_kept(TOKENS)
        engine.empty_caches()  # names of one state share their cached rows
        earlier = _count(engine)
        entries: dict[int, dict[str, object]] = {min(shipped, TOKENS): {"state": name}}
        if shipped >= TOKENS:
            entries[TOKENS // 2] = {"state": name, "budget": TOKENS // 2}
        for budget, entry in entries.items():
            (answer,) = engine.generate([prompt(example, **entry)])
            assert answer["prompt_tokens"] == full["prompt_tokens"] - TOKENS + budget, (
                name
            )
        _assert_no_fallback(engine, earlier, name)


@in_engine
def test_a_state_of_a_request_is_served_as_the_state_of_a_server() -> None:
    """Named or whole; to an engine of another state all at once, and one by one, nothing cached."""
    questions = examples(1)[:2]
    names = ("autoprune", "visionzip", "fastv")
    keys = list(product(names, (8, 24), range(len(questions))))
    native = []
    for name in names:
        engine = start({**STATE, "state": name, "requests": "budget"})
        native += engine.generate_each(
            [prompt(questions[i], budget=k) for state, k, i in keys if state == name]
        )
        engine.stop()
    engine = start({**STATE, "state": alone("divprune"), "requests": "states"})
    documents = [
        load_state(name).model_dump(mode="json") if i else name for name, _, i in keys
    ]
    brought = [
        prompt(questions[i], budget=k, state=state)
        for (_, k, i), state in zip(keys, documents, strict=True)
    ]
    together = engine.generate(brought)
    engine.empty_caches()
    assert_same(together, native, tolerance=3e-2)
    assert_same(engine.generate_each(brought), native, tolerance=3e-2)

    # The prefix cache is not shared between states.
    engine.empty_caches()
    mine = keys.index(("visionzip", 24, 0))
    other = keys.index(("autoprune", 24, 0))
    answers = engine.generate_each([brought[mine], brought[mine], brought[other]])
    new, repeated, of_another_state = (answer["cached"] for answer in answers)
    assert new == of_another_state == 0 and repeated >= BLOCK
