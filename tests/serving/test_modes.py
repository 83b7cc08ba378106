"""The same requests under the modes that operators run: LoRA, speculation, priorities and others.

Each test answers :data:`REQUESTS`, or what it says, with one engine in one mode, and compares with
an engine without any. All in float32, so that steps of another size round alike.
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
    LLAVA,
    STATE,
    Prompt,
    complete,
    complete_alone,
    counter,
    examples,
    greedy,
    model_of,
    prompt,
    release,
    render_prompt,
    start,
    turn,
    vision_runs,
)
from tests.serving.runners import Runner, in_engine
from vllm_autoprune.http_client import Metrics
from vllm_autoprune.selftest.run import BLOCK
from vllm_autoprune.selftest.serve import empty_caches

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.engine


REQUESTS: Sequence[tuple[int, int, str | None, int, int]] = (
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

Ids = list[list[int]]
"""Token ids of answers."""


def mixed_prompts() -> list[Prompt]:
    """Prompts of :data:`REQUESTS`."""
    return [render_prompt(*key) for key in REQUESTS]


def start_mode(**options: Any) -> LLM:
    """An engine in a mode, whose requests may bring states."""
    usual: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "disable_log_stats": False,
    }
    return start({**STATE, "requests": "states"}, **{**usual, **options})


_PLAIN: list[Ids] = []


def answer_plainly() -> Ids:
    """Answers without a mode, by an engine that this process starts once."""
    if not _PLAIN:
        llm = start_mode()
        _PLAIN.append(complete(llm, mixed_prompts()))
        release(llm)
    return _PLAIN[0]


def assert_as_plain(llm: LLM) -> None:
    """Answers in a mode equal those without one, in one batch and alone with empty caches."""
    prompts = mixed_prompts()
    together, alone = complete(llm, prompts), complete_alone(llm, prompts)
    release(llm)
    assert together == alone == answer_plainly()


@pytest.mark.parametrize("options", [{}, {"mm_processor_cache_type": "shm"}], ids=["none", "shm"])
@in_engine
def test_mixed_requests_are_answered_together_as_alone(options: Mapping[str, Any]) -> None:
    """Also with processed images in shared memory, small enough to be overwritten."""
    assert_as_plain(start_mode(**options))
    assert len({str(answer) for answer in answer_plainly()}) == len(REQUESTS)


@in_engine
def test_priority_scheduling_with_preemption() -> None:
    """Three at once, in a small KV cache: running requests are preempted."""
    llm = start_mode(
        scheduling_policy="priority", max_num_seqs=3, num_gpu_blocks_override=14, max_model_len=256
    )
    prompts = [render_prompt(at, 64) for at in range(6)]
    alone = complete_alone(llm, prompts, tokens=60)
    empty_caches(llm)
    before = counter(llm, "vllm:num_preemptions")
    engine = llm.llm_engine
    finished: dict[int, list[int]] = {}

    def add(numbers: range) -> None:
        for at in numbers:
            (rendered,) = llm.renderer.render_cmpl([prompts[at]])
            sampling = greedy(60, ignore_eos=True)
            engine.add_request(str(at), rendered, sampling, priority=9 - at)

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
    assert [finished[at] for at in range(6)] == alone
    assert counter(llm, "vllm:num_preemptions") - before >= 1
    # A small number goes first: 9 ran before 4, 5 and 6 came, and made room for them.
    order = [9 - at for at in finished]
    assert order[-1] == 9
    assert [priority for priority in order if priority < 7] == [4, 5, 6]


@in_engine
def test_sampling_structured_output_and_sleep() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = start_mode()
    question = prompt(examples(1)[0])

    def sample(**sampling: Any) -> list[str]:
        params = SamplingParams(**{"max_tokens": 6, "temperature": 0, **sampling})
        (output,) = llm.generate([question], params, use_tqdm=False)
        return [sample.text for sample in output.outputs]

    runs = vision_runs(llm)
    samples, again = (sample(n=3, temperature=2.0, seed=5) for _ in range(2))
    assert samples == again and len(samples) == 3 and len(set(samples)) > 1
    (choice,) = sample(structured_outputs=StructuredOutputsParams(choice=["red", "blue"]))
    assert choice in ("red", "blue")
    (digits,) = sample(structured_outputs=StructuredOutputsParams(regex="(1|2|3) (4|5|6)"))
    assert digits[0] in "123" and digits[-1] in "456"
    assert vision_runs(llm) - runs == 1, "the vision tower runs once for all of them"

    # On a CPU vLLM frees no memory. Level 1 empties vLLM's caches of images, and the features with
    # them; level 2 would lose the text tower.
    before = complete(llm, [question])
    for level, expected_runs in ((0, 0), (1, 1)):
        runs = vision_runs(llm)
        llm.sleep(level)
        llm.wake_up(["scheduling"] if level == 0 else None)
        assert complete(llm, [question]) == before
        assert vision_runs(llm) - runs == expected_runs
    with pytest.raises(ValueError, match="--autoprune-text-tower"):
        llm.sleep(2)
    assert complete(llm, [question]) == before


def _count_requests() -> float:
    """Requests with images that the plugin's metrics have counted in this process."""
    return Metrics(generate_latest().decode()).total("autoprune_requests_total") or 0.0


@in_engine
def test_embeddings_beside_images() -> None:
    """Of prompts: in one of their own, and within a message; of images: served unpruned."""
    llm = start_mode(enable_prompt_embeds=True, enable_mm_embeds=True)
    table = model_of(llm).get_language_model().model.embed_tokens

    def embed(words: str, special: bool = False) -> tuple[list[int], torch.Tensor]:
        ids = llm.get_tokenizer().encode(words, add_special_tokens=special)
        with torch.no_grad():
            return ids, table(torch.tensor(ids)).float()

    ids, rows = embed("USER: Which shape is red? ASSISTANT:", special=True)
    *together, embedded = complete(llm, [*mixed_prompts(), {"prompt_embeds": rows}])
    alone, as_text = complete_alone(llm, [{"prompt_embeds": rows}, {"prompt_token_ids": ids}])
    assert embedded == alone == as_text

    # Under a state that does not read the question, which has only its words in text.
    entry = {"autoprune": {"state": "visionzip", "budget": 16}}
    content = turn("Which digit is on the", examples(1)[0].image)["content"]
    before, answers = _count_requests(), []
    for words, as_embeds in ((" red circle", True), (" red circle", False), (" blue square", True)):
        end: dict[str, object] = {"type": "text", "text": words}
        if as_embeds:
            buffer = io.BytesIO()
            torch.save(embed(words)[1], buffer)
            data = base64.b64encode(buffer.getvalue()).decode()
            end = {"type": "prompt_embeds", "data": data}
        empty_caches(llm)
        talk, sampling = [{"role": "user", "content": [*content, end]}], greedy(12, ignore_eos=True)
        (output,) = llm.chat([talk], sampling, use_tqdm=False, mm_processor_kwargs=entry)
        answers.append(list(output.outputs[0].token_ids))
    assert answers[0] == answers[1] != answers[2]
    assert _count_requests() - before == 3

    empty_caches(llm)
    question = prompt(examples(1)[0])
    complete(llm, [question])
    (features,) = model_of(llm).autoprune.cache._entries.values()
    embeds = {"image": features.rows()[None]}
    unpruned = complete(llm, [prompt(examples(1)[0], enabled=False)])
    assert complete(llm, [{"prompt": question["prompt"], "multi_modal_data": embeds}]) == unpruned
    release(llm)
    assert together == answer_plainly()


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
@in_engine
def test_pipeline_ranks() -> None:
    llm = start_mode(pipeline_parallel_size=2)
    llm.collective_rpc(allocate_intermediate_tensors)
    assert llm.collective_rpc(count_layers) == [3, 3]
    assert_as_plain(llm)


def speculate(method: str) -> Ids:
    """By n-grams, or by mini-LLaVA's language model as the draft model, which sees no image."""
    with tempfile.TemporaryDirectory() as name:
        config: dict[str, object] = {"method": method, "num_speculative_tokens": 3}
        if method == "ngram":
            config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
        else:
            folder, prefix = Path(name), "language_model."
            weights = load_file(LLAVA / "model.safetensors")
            text = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
            save_file(text, folder / "model.safetensors", {"format": "pt"})
            described = json.loads((LLAVA / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(described["text_config"]))
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(LLAVA / file, folder)
            config["model"] = name
        llm = start_mode(speculative_config=config)
        prompts = mixed_prompts()
        answers = complete(llm, prompts)
        assert answers == complete_alone(llm, prompts)
        counts = (counter(llm, f"vllm:spec_decode_num_{n}_tokens") for n in ("draft", "accepted"))
        drafted, accepted = counts
        assert drafted > accepted > 0
        return answers


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculative_decoding(runner: Runner, method: str) -> None:
    # Each in a process of its own: vLLM looks for n-grams with numba, and starts no second CPU
    # engine in a process that has loaded it.
    answers = runner.run(speculate, environment={"SPECULATION": method}, method=method)
    assert answers == runner.run(answer_plainly)


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


@in_engine
def test_adapters_of_the_language_model() -> None:
    """Two adapters and none, on one image and others: as by models whose weights contain them."""
    from vllm.lora.request import LoRARequest

    asked = [render_prompt(*key) for key in ADAPTED]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_adapters(folder)
        loras = [None] + [
            LoRARequest(name, at, str(folder / name)) for at, name in enumerate(ADAPTERS, 1)
        ]
        # On a CPU vLLM gives a request without an adapter that of the last slot, so one stays free.
        llm = start_mode(enable_lora=True, max_loras=3, max_lora_rank=8)
        pairs = [(each, lora) for each in asked for lora in loras]
        sent, by = zip(*pairs, strict=True)
        together, alone = complete(llm, sent, lora_request=list(by)), []
        for each, lora in pairs:
            empty_caches(llm)
            alone += complete(llm, [each], lora_request=[lora])
        empty_caches(llm)
        runs, cached = vision_runs(llm), []
        for lora in (*loras, *loras):
            (output,) = llm.generate([asked[0]], greedy(1), use_tqdm=False, lora_request=[lora])
            cached.append(output.num_cached_tokens or 0)
        assert cached == [0, 0, 0, BLOCK, BLOCK, BLOCK], "adapters share no KV"
        assert vision_runs(llm) - runs == 1, "but the features of an image"
        release(llm)
        merged = []
        for adapter in ADAPTERS:
            llm = start_mode(model=_merge_adapter(folder, adapter))
            merged.append(complete(llm, asked))
            release(llm)
    assert together == alone
    none, *adapted = (together[at::3] for at in range(3))
    assert adapted == merged
    plain = zip(answer_plainly(), REQUESTS, strict=True)
    assert none == [answer for answer, key in plain if key in ADAPTED]
    assert none != adapted[0] != adapted[1] != none
