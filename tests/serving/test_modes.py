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
from prometheus_client import generate_latest
from safetensors.torch import load_file, save_file

from benchmarks.yardsticks.adapters import ADAPTERS, draw_adapter, write_adapters
from tests.serving.engine import (
    BLOCK,
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
from vllm_autoprune.http_client import Metrics

if TYPE_CHECKING:
    from vllm import LLM

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

Prompt = Mapping[str, object]
Ids = list[list[int]]
"""Token ids of answers."""


def start_mode(settings: Mapping[str, object] | None = None, **options: object) -> LLM:
    """An engine in a mode, whose requests may bring states."""
    return start(
        {**STATE, "requests": "states", **(settings or {})},
        **{"dtype": "float32", "max_model_len": 512, "disable_log_stats": False, **options},
    )


def mixed_prompts(keys: Sequence[tuple[Any, ...]] = REQUESTS) -> list[Prompt]:
    """Prompts of :data:`REQUESTS`, or of others like them."""
    questions = examples(6)
    return [render_prompt(questions, *key) for key in keys]


def _sampling(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def complete(llm: LLM, prompts: Sequence[Prompt], tokens: int = 12, **named: Any) -> Ids:
    """Greedy answers of so many tokens each."""
    outputs = llm.generate(list(prompts), _sampling(tokens), use_tqdm=False, **named)
    return [list(output.outputs[0].token_ids) for output in outputs]


def complete_alone(llm: LLM, prompts: Sequence[Prompt], tokens: int = 12) -> Ids:
    """Answers, each with empty caches."""
    answers = []
    for each in prompts:
        forget(llm)
        answers += complete(llm, [each], tokens)
    return answers


def counter(llm: LLM, name: str) -> float:
    """Sum of one of vLLM's counters over its labels."""
    return float(sum(getattr(m, "value", 0) for m in llm.get_metrics() if m.name == name))


def answer_together_and_alone(llm: LLM) -> dict[str, Any]:
    """Answers ``together``, and each ``alone`` with empty caches."""
    prompts = mixed_prompts()
    return {"together": complete(llm, prompts), "alone": complete_alone(llm, prompts)}


def assert_as_plain(runner: Runner, report: Mapping[str, Ids]) -> None:
    """Answers in a mode equal those without one, in one batch and alone."""
    plain = runner.run("plain_mode")["together"]
    assert report["together"] == report["alone"] == plain


@scenario
def plain_mode() -> Report:
    """Answers ``together``, and each ``alone`` with empty caches."""
    return answer_together_and_alone(start_mode())


def test_mixed_requests_are_answered_together_as_alone(runner: Runner) -> None:
    report = runner.run("plain_mode")
    assert_as_plain(runner, report)
    assert len({str(answer) for answer in report["together"]}) == len(report["together"])


@scenario
def shared_memory_mode() -> Report:
    """The same with processed images in shared memory, small enough to be overwritten."""
    return answer_together_and_alone(start_mode(mm_processor_cache_type="shm"))


def test_processor_cache_in_shared_memory(runner: Runner) -> None:
    assert_as_plain(runner, runner.run("shared_memory_mode"))


@scenario
def priority_mode() -> Report:
    """Requests by priority, three at once, in a small KV cache: running ones are preempted.

    ``order``: the priorities in the order in which the requests finished; ``preempted``.
    """
    llm = start_mode(
        scheduling_policy="priority", max_num_seqs=3, num_gpu_blocks_override=14, max_model_len=256
    )
    prompts = mixed_prompts([(at, 64, None, 0, 0) for at in range(6)])
    alone = complete_alone(llm, prompts, tokens=60)
    forget(llm)
    before = counter(llm, "vllm:num_preemptions")
    engine = llm.llm_engine
    finished: dict[int, list[int]] = {}

    def add(numbers: range) -> None:
        for at in numbers:
            (rendered,) = llm.renderer.render_cmpl([prompts[at]])
            engine.add_request(str(at), rendered, _sampling(60), priority=9 - at)

    def step() -> None:
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id)] = list(output.outputs[0].token_ids)

    # The first three run when the others, which matter more, arrive.
    add(range(3))
    for _ in range(3):
        step()
    add(range(3, 6))
    while engine.has_unfinished_requests():
        step()
    return {
        "together": [finished[at] for at in range(6)],
        "alone": alone,
        "order": [9 - at for at in finished],
        "preempted": counter(llm, "vllm:num_preemptions") - before,
    }


def test_priority_scheduling_with_preemption(runner: Runner) -> None:
    report = runner.run("priority_mode")
    assert report["together"] == report["alone"]
    assert report["preempted"] >= 1
    # A small number goes first: 9 ran before 4, 5 and 6 came, and made room for them.
    assert report["order"][-1] == 9
    assert [priority for priority in report["order"] if priority < 7] == [4, 5, 6]


@scenario
def sampled_mode() -> Report:
    """What a request may ask of sampling, about a pruned image.

    ``samples``: n = 3 drawn together, twice with one seed; ``choices``, ``pattern``: structured
    output. Answers ``before`` sleep and ``after`` each level, with why it was ``refused`` and
    ``runs`` of the vision tower; on a CPU vLLM frees no memory.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = start_mode()
    question = prompt(examples(1)[0])

    def texts(**sampling: Any) -> list[str]:
        params = SamplingParams(**{"max_tokens": 6, "temperature": 0, **sampling})
        (output,) = llm.generate([question], params, use_tqdm=False)
        return [sample.text for sample in output.outputs]

    runs = vision_runs(llm)
    report: dict[str, Any] = {
        "samples": [texts(n=3, temperature=2.0, seed=5) for _ in range(2)],
        "choices": texts(structured_outputs=StructuredOutputsParams(choice=["red", "blue"])),
        "pattern": texts(structured_outputs=StructuredOutputsParams(regex="(1|2|3) (4|5|6)")),
    }
    report["runs of all"] = vision_runs(llm) - runs
    report |= {"before": complete(llm, [question]), "after": [], "refused": [], "runs": []}
    for level in (0, 1, 2):
        runs = vision_runs(llm)
        try:
            llm.sleep(level)
            llm.wake_up(["scheduling"] if level == 0 else None)
            report["refused"].append("")
        except ValueError as error:
            report["refused"].append(str(error))
        report["after"].append(complete(llm, [question]))
        report["runs"].append(vision_runs(llm) - runs)
    return report


def test_several_samples_and_structured_output(runner: Runner) -> None:
    report = runner.run("sampled_mode")
    samples, again = report["samples"]
    assert len(samples) == 3 and samples == again
    assert len(set(samples)) > 1
    assert report["choices"][0] in ("red", "blue")
    digit, other_digit = report["pattern"][0].split()
    assert digit in "123" and other_digit in "456"
    assert report["runs of all"] == 1, "the vision tower runs once for all of them"


def test_sleep_and_wake_with_a_text_tower(runner: Runner) -> None:
    report = runner.run("sampled_mode")
    assert report["after"] == [report["before"]] * 3
    assert report["refused"][:2] == ["", ""]
    assert "--autoprune-text-tower" in report["refused"][2]
    # Level 1 empties vLLM's caches of images, and the features with them.
    assert report["runs"] == [0, 1, 0]


@scenario
def prompt_embeds_mode() -> Report:
    """Prompt embeddings beside images: in prompts of their own, and within one message.

    ``together``: :data:`REQUESTS` in one batch with an embedded prompt, whose answer is the last;
    ``embedded``: alone, and as the text it stands for. ``beside``: answers to a question whose last
    words are embeddings, text, and embeddings of other words; ``counted`` requests with images of
    these. ``unpruned``: answers about an image that is not pruned, and about its ``image_embeds``.
    """
    llm = start_mode(enable_prompt_embeds=True, enable_mm_embeds=True)
    table = model_of(llm).get_language_model().model.embed_tokens

    def embed(words: str, special: bool = False) -> tuple[list[int], torch.Tensor]:
        ids = llm.get_tokenizer().encode(words, add_special_tokens=special)
        with torch.no_grad():
            return ids, table(torch.tensor(ids)).float()

    ids, rows = embed("USER: Which shape is red? ASSISTANT:", special=True)
    report: dict[str, Any] = {
        "together": complete(llm, [*mixed_prompts(), {"prompt_embeds": rows}]),
        "embedded": complete_alone(llm, [{"prompt_embeds": rows}, {"prompt_token_ids": ids}]),
    }

    # Under a state that does not read the question, which has only its words in text.
    entry = {"autoprune": {"state": "visionzip", "budget": 16}}
    content = turn("Which digit is on the", examples(1)[0].image)["content"]
    before, report["beside"] = _count_requests(), []
    for words, embedded in ((" red circle", True), (" red circle", False), (" blue square", True)):
        end: dict[str, object] = {"type": "text", "text": words}
        if embedded:
            buffer = io.BytesIO()
            torch.save(embed(words)[1], buffer)
            data = base64.b64encode(buffer.getvalue()).decode()
            end = {"type": "prompt_embeds", "data": data}
        forget(llm)
        talk = [{"role": "user", "content": [*content, end]}]
        (output,) = llm.chat([talk], _sampling(12), use_tqdm=False, mm_processor_kwargs=entry)
        report["beside"].append(list(output.outputs[0].token_ids))
    report["counted"] = _count_requests() - before

    forget(llm)
    question = prompt(examples(1)[0])
    complete(llm, [question])
    (features,) = model_of(llm).autoprune.cache._entries.values()
    embeds = {"image": features.rows()[None]}
    report["unpruned"] = complete(llm, [prompt(examples(1)[0], enabled=False)])
    report["unpruned"] += complete(
        llm, [{"prompt": question["prompt"], "multi_modal_data": embeds}]
    )
    return report


def _count_requests() -> float:
    """Requests with images that the plugin's metrics have counted in this process."""
    return Metrics(generate_latest().decode()).total("autoprune_requests_total") or 0.0


def test_prompt_embeddings_beside_images(runner: Runner) -> None:
    report = runner.run("prompt_embeds_mode")
    *together, after = report["together"]
    assert together == runner.run("plain_mode")["together"]
    alone, as_text = report["embedded"]
    assert after == alone == as_text


def test_prompt_embeddings_within_a_message(runner: Runner) -> None:
    report = runner.run("prompt_embeds_mode")
    assert report["counted"] == 3
    embedded, text, others = report["beside"]
    assert embedded == text != others


def test_image_embeddings_are_served_unpruned(runner: Runner) -> None:
    image, embeds = runner.run("prompt_embeds_mode")["unpruned"]
    assert embeds == image


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


@pytest.mark.exhaustive
def test_pipeline_ranks(runner: Runner) -> None:
    report = runner.run("pipeline_mode")
    assert_as_plain(runner, report)
    assert report["layers"] == [3, 3]


@scenario
def ngram_mode() -> Report:
    """Answers ``together`` and ``alone``; ``drafted`` and ``accepted`` tokens."""
    return _speculate({"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3})


@scenario
def draft_model_mode() -> Report:
    """The same with mini-LLaVA's language model as the draft model, which sees no image."""
    prefix = "language_model."
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = load_file(LLAVA / "model.safetensors")
        text = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        save_file(text, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((LLAVA / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config["text_config"]))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(LLAVA / file, folder)
        return _speculate({"method": "draft_model", "model": name})


def _speculate(config: dict[str, object]) -> Report:
    llm = start_mode(speculative_config={**config, "num_speculative_tokens": 3})
    report = answer_together_and_alone(llm)
    for name in ("draft", "accepted"):
        report[name] = counter(llm, f"vllm:spec_decode_num_{name}_tokens")
    return report


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ngram_mode", "draft_model_mode"])
def test_speculative_decoding(runner: Runner, name: str) -> None:
    # Each in a process of its own: vLLM looks for n-grams with numba, and starts no second CPU
    # engine in a process that has loaded it.
    report = runner.run(name, {"SCENARIO": name})
    assert_as_plain(runner, report)
    assert report["draft"] > report["accepted"] > 0


@scenario
def lora_mode() -> Report:
    """Two adapters of the language model and none, on one image and on others.

    ``together``: every adapter's answers to every question in one batch, interleaved; ``alone``:
    each with empty caches; ``merged``: by models whose weights contain the adapter. ``cached``:
    cached tokens of a second question round; ``runs`` of the vision tower for one image.
    """
    from vllm.lora.request import LoRARequest

    asked = mixed_prompts(ADAPTED)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_adapters(folder)
        loras = [
            LoRARequest(name, at, str(folder / name)) if at else None
            for at, name in enumerate(("", *ADAPTERS))
        ]
        # On a CPU vLLM gives a request without an adapter that of the last slot, so one stays free.
        llm = start_mode(enable_lora=True, max_loras=3, max_lora_rank=8)
        pairs = [(each, lora) for each in asked for lora in loras]
        sent, by = zip(*pairs, strict=True)
        report: dict[str, Any] = {"together": complete(llm, sent, lora_request=list(by))}
        report |= {"alone": [], "cached": [], "merged": []}
        for each, lora in pairs:
            forget(llm)
            report["alone"] += complete(llm, [each], lora_request=[lora])
        forget(llm)
        runs = vision_runs(llm)
        for lora in (*loras, *loras):
            (output,) = llm.generate([asked[0]], _sampling(1), use_tqdm=False, lora_request=[lora])
            report["cached"].append(output.num_cached_tokens or 0)
        report["runs"] = vision_runs(llm) - runs
        release(llm)
        for adapter in ADAPTERS:
            llm = start_mode(model=str(_merge_adapter(folder, adapter)))
            report["merged"].append(complete(llm, asked))
            release(llm)
        return report


ADAPTED = [key for key in REQUESTS if key[2] is None or "core" in key[2]]


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


def test_adapters_of_the_language_model(runner: Runner) -> None:
    report, plain = runner.run("lora_mode"), runner.run("plain_mode")["together"]
    assert report["together"] == report["alone"]
    none, *adapted = (report["together"][at::3] for at in range(3))
    assert adapted == report["merged"]
    assert none == [answer for answer, key in zip(plain, REQUESTS, strict=True) if key in ADAPTED]
    assert none != adapted[0] != adapted[1] != none
    assert report["runs"] == 1, "adapters share the features of an image"
    assert report["cached"] == [0, 0, 0, BLOCK, BLOCK, BLOCK], "and no KV"
