"""The same requests under the modes that operators run: LoRA, speculation, priorities and others.

Every scenario answers :data:`REQUESTS`, or what it says, with one engine in one mode. Tests compare
with :func:`plain_mode`, an engine without any. All in float32, so that steps of another size round
alike.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import REGISTRY

from tests.serving.engine import (
    STATE,
    examples,
    forget,
    model_of,
    prompt,
    start,
    turn,
    vision_runs,
)
from tests.serving.interleave import render_prompt
from tests.serving.scenarios import Report, scenario

if TYPE_CHECKING:
    from vllm import LLM

REQUESTS: tuple[tuple[int, int, str | None, int, int], ...] = (
    (0, 32, None, 0, 0),
    (1, 32, None, 0, 0),
    (0, 16, "visionzip", 0, 0),
    (2, 64, "cdpruner with a core", 0, 0),
    (3, 64, "cdpruner with a core", 1, 8),
    (0, 64, "autoprune with a core", 0, 0),
    (1, 32, None, 2, 8),
    (0, 16, "random", 0, 0),
    (4, 144, None, 0, 0),
    (2, 31, "off", 0, 0),
)
"""Question, K, state or control, later turns and K_r of each request."""

TOKENS = 12


def start_mode(settings: Mapping[str, object] | None = None, **options: object) -> LLM:
    """An engine in a mode, whose requests may bring states."""
    return start(
        {**STATE, "requests": "states", **(settings or {})},
        **{"dtype": "float32", "max_model_len": 512, "disable_log_stats": False, **options},
    )


def mixed_prompts() -> list[dict[str, object]]:
    """Prompts of :data:`REQUESTS`."""
    questions = examples(6)
    return [render_prompt(questions, *key) for key in REQUESTS]


def complete(llm: LLM, prompts: Sequence[Mapping[str, object]], **named: Any) -> list[list[int]]:
    """Token ids of greedy answers of :data:`TOKENS` tokens each."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(list(prompts), sampling, use_tqdm=False, **named)
    return [list(output.outputs[0].token_ids) for output in outputs]


def counter(llm: LLM, name: str) -> float:
    """Sum of one of vLLM's counters over its labels."""
    return float(sum(getattr(m, "value", 0) for m in llm.get_metrics() if m.name == name))


def answer_together_and_alone(llm: LLM) -> dict[str, Any]:
    """Answers ``together``, and each ``alone`` with empty caches."""
    prompts = mixed_prompts()
    report: dict[str, Any] = {"together": complete(llm, prompts), "alone": []}
    for one in prompts:
        forget(llm)
        report["alone"] += complete(llm, [one])
    return report


@scenario
def plain_mode() -> Report:
    """Answers ``together``, and each ``alone`` with empty caches."""
    return answer_together_and_alone(start_mode())


@scenario
def shared_memory_mode() -> Report:
    """The same with processed images in shared memory, small enough to be overwritten."""
    return answer_together_and_alone(start_mode(mm_processor_cache_type="shm"))


@scenario
def priority_mode() -> Report:
    """Requests by priority, three at once, in a small KV cache: running ones are preempted.

    ``order``: the priorities in the order in which the requests finished; ``preempted``.
    """
    from vllm import SamplingParams

    llm = start_mode(
        scheduling_policy="priority", max_num_seqs=3, num_gpu_blocks_override=14, max_model_len=256
    )
    questions = examples(6)
    prompts = [render_prompt(questions, at, 64, None, 0, 0) for at in range(6)]
    alone = []
    for one in prompts:
        forget(llm)
        alone.append(_long(llm, [one])[0])
    forget(llm)
    before = counter(llm, "vllm:num_preemptions")
    engine = llm.llm_engine
    finished: dict[str, list[int]] = {}
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    # The first three run when the others, which matter more, arrive.
    for at, one in enumerate(prompts[:3]):
        engine.add_request(str(at), _rendered(llm, one), sampling, priority=9 - at)
    for _ in range(3):
        finished |= _step(llm)
    for at, one in enumerate(prompts[3:], start=3):
        engine.add_request(str(at), _rendered(llm, one), sampling, priority=9 - at)
    while engine.has_unfinished_requests():
        finished |= _step(llm)
    return {
        "together": [finished[str(at)] for at in range(6)],
        "alone": alone,
        "order": [9 - int(name) for name in finished],
        "preempted": counter(llm, "vllm:num_preemptions") - before,
    }


def _long(llm: LLM, prompts: Sequence[Mapping[str, object]]) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = llm.generate(list(prompts), sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _rendered(llm: LLM, one: Mapping[str, object]) -> Any:
    (rendered,) = llm.renderer.render_cmpl([one])
    return rendered


def _step(llm: LLM) -> dict[str, list[int]]:
    return {
        output.request_id: list(output.outputs[0].token_ids)
        for output in llm.llm_engine.step()
        if output.finished
    }


@scenario
def sampled_mode() -> Report:
    """What a request may ask of sampling, about a pruned image.

    ``samples``: n = 3 drawn together, twice with one seed; ``alone``: the greedy answer;
    ``choices``, ``pattern``: structured output. ``sleep``: answers before and after each level.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = start_mode()
    question = prompt(examples(1)[0])

    def texts(**sampling: Any) -> list[str]:
        params = SamplingParams(**{"max_tokens": 6, "temperature": 0, **sampling})
        (output,) = llm.generate([question], params, use_tqdm=False)
        return [one.text for one in output.outputs]

    runs = vision_runs(llm)
    report: dict[str, Any] = {
        "samples": [texts(n=3, temperature=2.0, seed=5) for _ in range(2)],
        "alone": texts(),
        "choices": texts(structured_outputs=StructuredOutputsParams(choice=["red", "blue"])),
        "pattern": texts(structured_outputs=StructuredOutputsParams(regex="(1|2|3) (4|5|6)")),
    }
    report["runs"] = vision_runs(llm) - runs
    report["sleep"] = _sleep_and_wake(llm, question)
    return report


def _sleep_and_wake(llm: LLM, question: Mapping[str, object]) -> dict[str, Any]:
    """Answers ``before`` and after each level; on a CPU vLLM frees no memory."""
    report: dict[str, Any] = {"before": complete(llm, [question])}
    for level in (0, 1, 2):
        runs = vision_runs(llm)
        try:
            llm.sleep(level)
            llm.wake_up(["scheduling"] if level == 0 else None)
            report[f"refused {level}"] = ""
        except ValueError as error:
            report[f"refused {level}"] = str(error)
        report[f"after {level}"] = complete(llm, [question])
        report[f"runs {level}"] = vision_runs(llm) - runs
    return report


@scenario
def prompt_embeds_mode() -> Report:
    """Prompt embeddings beside images: in prompts of their own, and within one message.

    ``together``: :data:`REQUESTS` in one batch with an embedded prompt, and that prompt ``after``
    them; ``embedded``: alone, and as the text it stands for. ``beside``: answers to a question
    whose last words are embeddings, text, and embeddings of other words; ``counted`` requests with
    images of these. ``unpruned``: answers about an image that is not pruned, and about its
    ``image_embeds``.
    """
    llm = start_mode(enable_prompt_embeds=True, enable_mm_embeds=True)
    table = model_of(llm).get_language_model().model.embed_tokens
    words = "USER: Which shape is red? ASSISTANT:"
    ids = llm.get_tokenizer().encode(words)
    with torch.no_grad():
        embedded = {"prompt_embeds": table(torch.tensor(ids)).float()}
    *together, after = complete(llm, [*mixed_prompts(), embedded])
    forget(llm)
    report: dict[str, Any] = {
        "together": together,
        "after": after,
        "embedded": complete(llm, [embedded]) + complete(llm, [{"prompt_token_ids": ids}]),
    }
    before = counted_requests()
    report["beside"] = _ask_beside(llm, table)
    report["counted"] = counted_requests() - before
    report["unpruned"] = _ask_about_features(llm)
    return report


def _ask_about_features(llm: LLM) -> list[list[int]]:
    """Answers about an image that is not pruned, and about its features as ``image_embeds``."""
    forget(llm)
    question = prompt(examples(1)[0])
    complete(llm, [question])
    vision = model_of(llm).autoprune
    assert vision is not None
    (features,) = vision.cache._entries.values()
    whole = {**question, "mm_processor_kwargs": {"autoprune": {"enabled": False}}}
    given = {"prompt": question["prompt"], "multi_modal_data": {"image": features.rows()[None]}}
    return complete(llm, [whole]) + complete(llm, [given])


def counted_requests() -> float:
    """Requests with images that the plugin's metrics have counted."""
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "autoprune_requests_total"
    )


def _ask_beside(llm: LLM, table: torch.nn.Module) -> list[list[int]]:
    """Answers to a message whose last words are embeddings, text, and embeddings of other words.

    Under a state that does not read the question, which has only its words in text.
    """
    from vllm import SamplingParams

    question = turn("Which digit is on the", examples(1)[0].image)["content"]
    assert isinstance(question, list)
    ends = [
        _embed(llm, table, " red circle"),
        {"type": "text", "text": " red circle"},
        _embed(llm, table, " blue square"),
    ]
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    entry = {"autoprune": {"state": "visionzip", "budget": 16}}
    answers = []
    for end in ends:
        forget(llm)
        message = {"role": "user", "content": [*question, end]}
        (output,) = llm.chat([[message]], sampling, use_tqdm=False, mm_processor_kwargs=entry)
        answers.append(list(output.outputs[0].token_ids))
    return answers


def _embed(llm: LLM, table: torch.nn.Module, words: str) -> dict[str, object]:
    """Words as a part of a message that contains their embeddings."""
    ids = llm.get_tokenizer().encode(words, add_special_tokens=False)
    buffer = io.BytesIO()
    with torch.no_grad():
        torch.save(table(torch.tensor(ids)).float(), buffer)
    return {"type": "prompt_embeds", "data": base64.b64encode(buffer.getvalue()).decode()}
