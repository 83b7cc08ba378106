"""The same requests under the modes that operators run: LoRA, speculation, priorities and others.

Every scenario answers :data:`REQUESTS`, or what it says, with one engine in one mode. Tests compare
with :func:`plain_mode`, an engine without any. All in float32, so that steps of another size round
alike.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from prometheus_client import REGISTRY
from safetensors.torch import load_file, save_file

from benchmarks.yardsticks.adapters import ADAPTERS, draw_adapter, write_adapters
from tests.serving.engine import (
    LLAVA,
    STATE,
    examples,
    forget,
    model_of,
    prompt,
    release,
    start,
    turn,
    vision_runs,
)
from tests.serving.interleave import render_prompt
from tests.serving.scenarios import Report, Runner, scenario

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.engine


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


@scenario
def pipeline_mode() -> Report:
    """Answers ``together``, and each ``alone`` with empty caches; ``layers`` of each rank."""
    llm = start_mode(pipeline_parallel_size=2)
    llm.collective_rpc(allocate_intermediate_tensors)
    return {**answer_together_and_alone(llm), "layers": llm.collective_rpc(count_layers)}


def allocate_intermediate_tensors(worker: Any) -> None:
    """Runs in every worker: what vLLM's warm-up allocates on later ranks.

    vLLM 0.32's CPU worker leaves the warm-up out where nothing is compiled and the size of the KV
    cache is given, and a later rank then fails at its first step, with the plugin or without.
    """
    runner = worker.worker.model_runner
    if getattr(runner, "intermediate_tensors", None) is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def count_layers(worker: Any) -> int:
    """Runs in every worker: layers of the language model that it holds."""
    model = worker.worker.model_runner.model.get_language_model().model
    return int(model.end_layer - model.start_layer)


_PREFIX = "language_model."


@scenario
def ngram_mode() -> Report:
    """Answers ``together`` and ``alone``; ``drafted`` and ``accepted`` tokens."""
    return _speculate({"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3})


@scenario
def draft_model_mode() -> Report:
    """The same with mini-LLaVA's language model as the draft model, which sees no image."""
    with tempfile.TemporaryDirectory() as folder:
        return _speculate({"method": "draft_model", "model": str(_write_draft(Path(folder)))})


def _speculate(config: dict[str, object]) -> Report:
    llm = start_mode(speculative_config={**config, "num_speculative_tokens": 3})
    report = answer_together_and_alone(llm)
    for name in ("draft", "accepted"):
        report[name] = counter(llm, f"vllm:spec_decode_num_{name}_tokens")
    return report


def _write_draft(folder: Path) -> Path:
    """The language model of mini-LLaVA as a checkpoint of its own."""
    weights = load_file(LLAVA / "model.safetensors")
    text = {k.removeprefix(_PREFIX): v for k, v in weights.items() if k.startswith(_PREFIX)}
    save_file(text, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((LLAVA / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config["text_config"]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAVA / name, folder)
    return folder


@scenario
def lora_mode() -> Report:
    """Two adapters of the language model and none, on one image and on others.

    ``together``: every adapter's answers to every question in one batch, interleaved; ``alone``:
    each with empty caches; ``merged``: by models whose weights contain the adapter. ``cached``:
    cached tokens of a second question round; ``runs`` of the vision tower for one image.
    """
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_adapters(folder)
        loras: dict[str | None, LoRARequest | None] = {
            None: None,
            **{
                name: LoRARequest(name, at, str(folder / name))
                for at, name in enumerate(ADAPTERS, 1)
            },
        }
        # On a CPU vLLM gives a request without an adapter that of the last slot, so one stays free.
        llm = start_mode(enable_lora=True, max_loras=3, max_lora_rank=8)
        report = _adapted(llm, loras)
        release(llm)
        report["merged"] = []
        for adapter in ADAPTERS:
            merged = _merge_adapter(folder, adapter)
            llm = start_mode(model=str(merged))
            report["merged"].append(complete(llm, _asked()))
            release(llm)
        return report


def _asked() -> list[dict[str, object]]:
    questions = examples(6)
    keys = [key for key in REQUESTS if key[2] is None or "core" in key[2]]
    return [render_prompt(questions, *key) for key in keys]


def _adapted(llm: LLM, loras: Mapping[str | None, LoRARequest | None]) -> dict[str, Any]:
    asked = _asked()
    pairs = [(one, lora) for one in asked for lora in loras.values()]
    sent, by = [one for one, _ in pairs], [lora for _, lora in pairs]
    report: dict[str, Any] = {"together": complete(llm, sent, lora_request=by), "alone": []}
    for one, lora in pairs:
        forget(llm)
        report["alone"] += complete(llm, [one], lora_request=[lora])
    forget(llm)
    runs = vision_runs(llm)
    report["cached"] = []
    for lora in (*loras.values(), *loras.values()):
        report["cached"].append(_cached(llm, asked[0], lora))
    report["runs"] = vision_runs(llm) - runs
    return report


def _cached(llm: LLM, one: Mapping[str, object], lora: LoRARequest | None) -> int:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.generate([one], sampling, use_tqdm=False, lora_request=[lora])
    return int(output.num_cached_tokens or 0)


def _merge_adapter(folder: Path, adapter: str) -> Path:
    """mini-LLaVA with an adapter added to its weights."""
    merged = folder / f"merged-{adapter}"
    shutil.copytree(LLAVA, merged)
    weights = load_file(merged / "model.safetensors")
    for module, (down, up) in draw_adapter(ADAPTERS.index(adapter)).items():
        name = f"{module}.weight"
        weights[name] = (weights[name].float() + up @ down).to(torch.float32)
    (merged / "model.safetensors").unlink()
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    return merged


BLOCK = 32


def test_mixed_requests_are_answered_together_as_alone(runner: Runner) -> None:
    report = runner.run("plain_mode")
    assert report["together"] == report["alone"]
    assert len({str(answer) for answer in report["together"]}) == len(report["together"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ngram_mode", "draft_model_mode"])
def test_speculative_decoding(runner: Runner, name: str) -> None:
    # Each in a process of its own: vLLM looks for n-grams with numba, and starts no second CPU
    # engine in a process that has loaded it.
    report = runner.run(name, {"SCENARIO": name})
    plain = runner.run("plain_mode")["together"]
    assert report["together"] == report["alone"] == plain
    assert report["draft"] > report["accepted"] > 0


@pytest.mark.exhaustive
def test_pipeline_ranks(runner: Runner) -> None:
    report = runner.run("pipeline_mode")
    plain = runner.run("plain_mode")["together"]
    assert report["together"] == report["alone"] == plain
    assert report["layers"] == [3, 3]


def test_processor_cache_in_shared_memory(runner: Runner) -> None:
    report = runner.run("shared_memory_mode")
    plain = runner.run("plain_mode")["together"]
    assert report["together"] == report["alone"] == plain


def test_priority_scheduling_with_preemption(runner: Runner) -> None:
    report = runner.run("priority_mode")
    assert report["together"] == report["alone"]
    assert report["preempted"] >= 1
    # A small number goes first: 9 ran before 4, 5 and 6 came, and made room for them.
    assert report["order"][-1] == 9
    assert [one for one in report["order"] if one < 7] == [4, 5, 6]


def test_several_samples_and_structured_output(runner: Runner) -> None:
    report = runner.run("sampled_mode")
    first, second = report["samples"]
    assert len(first) == 3 and first == second
    assert len(set(first)) > 1
    assert report["choices"][0] in ("red", "blue")
    first_digit, second_digit = report["pattern"][0].split()
    assert first_digit in "123" and second_digit in "456"
    assert report["runs"] == 1, "the vision tower runs once for all of them"


def test_sleep_and_wake_with_a_text_tower(runner: Runner) -> None:
    report = runner.run("sampled_mode")["sleep"]
    assert report["before"] == report["after 0"] == report["after 1"] == report["after 2"]
    assert report["refused 0"] == report["refused 1"] == ""
    assert "--autoprune-text-tower" in report["refused 2"]
    # Level 1 empties vLLM's caches of images, and the features with them.
    assert [report[f"runs {level}"] for level in (0, 1, 2)] == [0, 1, 0]


def test_adapters_of_the_language_model(runner: Runner) -> None:
    report = runner.run("lora_mode")
    assert report["together"] == report["alone"]
    none, first, second = (report["together"][at::3] for at in range(3))
    assert [first, second] == report["merged"]
    assert none != first and first != second and second != none
    assert report["runs"] == 1, "adapters share the features of an image"


def test_requests_without_an_adapter_are_not_changed_by_those_with_one(runner: Runner) -> None:

    plain = runner.run("plain_mode")["together"]
    expected = [
        answer
        for answer, key in zip(plain, REQUESTS, strict=True)
        if key[2] is None or "core" in key[2]
    ]
    assert runner.run("lora_mode")["together"][::3] == expected


def test_adapters_share_no_kv(runner: Runner) -> None:
    assert runner.run("lora_mode")["cached"] == [0, 0, 0, BLOCK, BLOCK, BLOCK]


def test_prompt_embeddings_beside_images(runner: Runner) -> None:
    report = runner.run("prompt_embeds_mode")
    assert report["together"] == runner.run("plain_mode")["together"]
    alone, as_text = report["embedded"]
    assert report["after"] == alone == as_text


def test_prompt_embeddings_within_a_message(runner: Runner) -> None:
    report = runner.run("prompt_embeds_mode")
    assert report["counted"] == 3
    embedded, text, others = report["beside"]
    assert embedded == text != others


def test_image_embeddings_are_served_unpruned(runner: Runner) -> None:
    whole, given = runner.run("prompt_embeds_mode")["unpruned"]
    assert given == whole
