"""The same requests under the modes that operators run: LoRA, speculation, priorities, connectors.

Each test answers :data:`REQUESTS`, or what it says, with one engine in one mode, and compares with
an engine without any. All in float32, so that steps of another size round alike.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.yardsticks.adapters import ADAPTERS, write_adapters
from benchmarks.yardsticks.examples import as_picture, format_prompt
from tests.serving.engine import (
    LLAVA,
    STATE,
    Answer,
    Engine,
    Prompt,
    Request,
    alone,
    assert_same,
    examples,
    greedy,
    prompt,
    raw_prompt,
    render_prompt,
    start,
    state_with_core,
    turn,
)
from tests.serving.runners import Runner, in_engine
from vllm_autoprune.selftest.run import BLOCK

pytestmark = pytest.mark.engine

REQUESTS: Sequence[Request] = (
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
Ids = list[list[int]]
"""Token ids of answers."""


def mixed_prompts() -> list[Prompt]:
    return [render_prompt(*request) for request in REQUESTS]


def start_mode(**options: Any) -> Engine:
    """An engine in a mode, whose requests may bring states."""
    usual: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "disable_log_stats": False,
    }
    return start({**STATE, "requests": "states"}, **{**usual, **options})


@cache
def answer_plainly() -> Ids:
    """Answers without a mode, by an engine that this process starts once."""
    engine = start_mode()
    answers = engine.complete(mixed_prompts())
    engine.stop()
    assert len({str(answer) for answer in answers}) == len(REQUESTS)
    return answers


def assert_as_plain(engine: Engine) -> None:
    """Answers in a mode equal those without one, in one batch and alone with empty caches."""
    prompts = mixed_prompts()
    together = engine.complete(prompts)
    alone = engine.complete_alone(prompts)
    engine.stop()
    assert together == alone == answer_plainly()


@in_engine
def test_processed_images_in_shared_memory() -> None:
    """So small that they are overwritten."""
    assert_as_plain(start_mode(mm_processor_cache_type="shm"))


@in_engine
def test_priority_scheduling_with_preemption() -> None:
    """Three at once, in a small KV cache: running requests are preempted."""
    engine = start_mode(
        scheduling_policy="priority",
        max_num_seqs=3,
        num_gpu_blocks_override=14,
        max_model_len=256,
    )
    prompts = [render_prompt(number, 64) for number in range(6)]
    alone = engine.complete_alone(prompts, tokens=60)
    engine.empty_caches()
    preemptions = engine.counter("vllm:num_preemptions")
    llm_engine = engine.llm.llm_engine
    finished: dict[int, list[int]] = {}

    def add(numbers: range) -> None:
        for number in numbers:
            (rendered,) = engine.llm.renderer.render_cmpl([prompts[number]])
            sampling = greedy(60, ignore_eos=True)
            llm_engine.add_request(str(number), rendered, sampling, priority=9 - number)

    def step() -> None:
        for output in llm_engine.step():
            if output.finished:
                finished[int(output.request_id)] = list(output.outputs[0].token_ids)

    # The first three run when the others, which matter more, arrive.
    add(range(3))
    for _ in range(3):
        step()
    add(range(3, 6))
    while llm_engine.has_unfinished_requests():
        step()
    assert [finished[number] for number in range(6)] == alone
    assert engine.counter("vllm:num_preemptions") - preemptions >= 1
    # A small number goes first: 9 ran before 4, 5 and 6 came, and made room for them.
    order = [9 - number for number in finished]
    assert order[-1] == 9
    assert [priority for priority in order if priority < 7] == [4, 5, 6]


@in_engine
def test_sampling_structured_output_and_sleep() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    engine = start_mode()
    question = prompt(examples(1)[0])

    def sample(**sampling: Any) -> list[str]:
        params = SamplingParams(**{"max_tokens": 6, "temperature": 0, **sampling})
        (output,) = engine.llm.generate([question], params, use_tqdm=False)
        return [sample.text for sample in output.outputs]

    runs = engine.runs
    samples, again = (sample(n=3, temperature=2.0, seed=5) for _ in range(2))
    assert samples == again and len(samples) == 3 and len(set(samples)) > 1
    (choice,) = sample(
        structured_outputs=StructuredOutputsParams(choice=["red", "blue"])
    )
    assert choice in ("red", "blue")
    (digits,) = sample(
        structured_outputs=StructuredOutputsParams(regex="(1|2|3) (4|5|6)")
    )
    assert digits[0] in "123" and digits[-1] in "456"
    assert engine.runs - runs == 1, "the vision tower runs once for all of them"

    # On a CPU vLLM frees no memory. Level 1 empties vLLM's caches of images, and the features with
    # them; level 2 would lose the text tower.
    expected = engine.complete([question])
    for level, expected_runs in ((0, 0), (1, 1)):
        runs = engine.runs
        engine.llm.sleep(level)
        engine.llm.wake_up(["scheduling"] if level == 0 else None)
        assert engine.complete([question]) == expected
        assert engine.runs - runs == expected_runs
    with pytest.raises(ValueError, match="--autoprune-text-tower"):
        engine.llm.sleep(2)
    assert engine.complete([question]) == expected


@in_engine
def test_prompt_embeddings_beside_images() -> None:
    """In one batch. Within a message: `test_field_inputs.py`."""
    engine = start_mode(enable_prompt_embeds=True)
    ids = engine.llm.get_tokenizer().encode("USER: Which shape is red? ASSISTANT:")
    with torch.no_grad():
        table = engine.model.get_language_model().model.embed_tokens
        rows = table(torch.tensor(ids)).float()
    *together, embedded = engine.complete([*mixed_prompts(), {"prompt_embeds": rows}])
    as_rows, as_text = engine.complete_alone(
        [{"prompt_embeds": rows}, {"prompt_token_ids": ids}]
    )
    engine.stop()
    assert embedded == as_rows == as_text
    assert together == answer_plainly()


def allocate_intermediate_tensors(worker: Any) -> int:
    """Runs in every worker: what vLLM's warm-up allocates on later ranks; layers that it holds.

    vLLM 0.32's CPU worker leaves the warm-up out where nothing is compiled and the size of the KV
    cache is given, and a later rank then fails at its first step, with the plugin or without.
    """
    runner = worker.worker.model_runner
    if getattr(runner, "intermediate_tensors", None) is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens,
            dtype=runner.model_config.dtype,
            device=runner.device,
        )
    model = runner.model.get_language_model().model
    return int(model.end_layer - model.start_layer)


@pytest.mark.exhaustive
@in_engine
def test_pipeline_ranks() -> None:
    engine = start_mode(pipeline_parallel_size=2)
    assert engine.llm.collective_rpc(allocate_intermediate_tensors) == [3, 3]
    assert_as_plain(engine)


def speculate(method: str) -> Ids:
    """By n-grams, or by mini-LLaVA's language model as the draft model, which sees no image."""
    with tempfile.TemporaryDirectory() as name:
        config: dict[str, object] = {"method": method, "num_speculative_tokens": 3}
        if method == "ngram":
            config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
        else:
            folder = Path(name)
            prefix = "language_model."
            weights = load_file(LLAVA / "model.safetensors")
            text = {
                k.removeprefix(prefix): v
                for k, v in weights.items()
                if k.startswith(prefix)
            }
            save_file(text, folder / "model.safetensors", {"format": "pt"})
            described = json.loads((LLAVA / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(described["text_config"]))
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(LLAVA / file, folder)
            config["model"] = name
        engine = start_mode(speculative_config=config)
        prompts = mixed_prompts()
        answers = engine.complete(prompts)
        assert answers == engine.complete_alone(prompts)
        drafted, accepted = (
            engine.counter(f"vllm:spec_decode_num_{n}_tokens")
            for n in ("draft", "accepted")
        )
        assert drafted > accepted > 0
        return answers


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculative_decoding(runner: Runner, method: str) -> None:
    # Each in a process of its own: vLLM looks for n-grams with numba, and starts no second CPU
    # engine in a process that has loaded it.
    answers = runner.run(speculate, environment={"SPECULATION": method}, method=method)
    assert answers == runner.run(answer_plainly)


@in_engine
def test_adapters_of_the_language_model() -> None:
    """Two adapters and none, on one image and others, at once and alone."""
    from vllm.lora.request import LoRARequest

    adapted = [
        number
        for number, (_, _, state, *_) in enumerate(REQUESTS)
        if not state or "core" in state
    ]
    prompts = [render_prompt(*REQUESTS[number]) for number in adapted]
    with tempfile.TemporaryDirectory() as folder:
        write_adapters(Path(folder))
        loras = [None] + [
            LoRARequest(name, number, f"{folder}/{name}")
            for number, name in enumerate(ADAPTERS, 1)
        ]
        # On a CPU vLLM gives a request without an adapter that of the last slot, so one stays free.
        engine = start_mode(enable_lora=True, max_loras=3, max_lora_rank=8)
        pairs = [(prompt, lora) for prompt in prompts for lora in loras]
        sent, by = zip(*pairs, strict=True)
        together = engine.complete(sent, lora_request=list(by))
        alone = []
        for prompt, lora in pairs:
            engine.empty_caches()
            alone += engine.complete([prompt], lora_request=[lora])
        engine.empty_caches()
        runs = engine.runs
        cached = []
        for lora in (*loras, *loras):
            (output,) = engine.llm.generate(
                [prompts[0]], greedy(1), use_tqdm=False, lora_request=[lora]
            )
            cached.append(output.num_cached_tokens or 0)
        assert cached == [0, 0, 0, BLOCK, BLOCK, BLOCK], "adapters share no KV"
        assert engine.runs - runs == 1, "but the features of an image"
        engine.stop()
    assert together == alone
    none, *by_adapter = (together[number::3] for number in range(3))
    assert none == [answer_plainly()[number] for number in adapted]
    assert none != by_adapter[0] != by_adapter[1] != none


# ---- what engines share through vLLM's connectors, which keep everything in a folder ----

# A prompt of more than two KV blocks together with its image.
TEXT = "Which shape is it? red green blue white"
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "question": {"instructions": ["What is the number?"]},
    "state": {"state": "visionzip"},
    "reference": {"keep": "reference"},
    "random": {"keep": "random"},
    # With its question before the image it stays one item, of the same token ids.
    "core": {"state": {**state_with_core(), "name": "core"}},
}
"""What requests change whose prompts have the very same token ids."""


def _start_sharing(folder: str | None) -> Engine:
    """An engine that finds and leaves its KV in a folder, or shares none."""
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": folder},
    )
    sharing = None if folder is None else config
    return start_mode(max_num_batched_tokens=2048, kv_transfer_config=sharing)


def _prompt(**entry: object) -> Prompt:
    image = as_picture(examples(1)[0].image)
    return raw_prompt(
        format_prompt(TEXT), image, **{"budget": 64, "instructions": [TEXT], **entry}
    )


@in_engine
def test_a_second_engine_takes_pruned_kv_of_the_first_and_of_no_other_request() -> None:
    prompts = [_prompt(), *mixed_prompts()]
    answers: dict[str, list[Answer]] = {}
    variants: dict[str, list[Answer]] = {"second": [], "alone": []}
    with tempfile.TemporaryDirectory() as store:
        for name, folder in (("first", store), ("second", store), ("alone", None)):
            engine = _start_sharing(folder)
            answers[name] = engine.generate_each(prompts, tokens=6)
            if name == "second":
                hits = engine.counter("vllm:external_prefix_cache_hits")
            for entry in VARIANTS.values() if name in variants else ():
                engine.llm.reset_prefix_cache()
                variants[name] += engine.generate([_prompt(**entry)], tokens=6)
            engine.stop()
    for name in ("first", "second"):
        assert_same(answers[name], answers["alone"])
    for taken in answers["second"]:
        assert taken["cached"] == (taken["prompt_tokens"] - 1) // BLOCK * BLOCK
    cached = {
        name: sum(answer["cached"] for answer in of_request)
        for name, of_request in answers.items()
    }
    assert hits == cached["second"] - cached["first"] > 0

    # The token ids of these prompts are equal; question, state or control differ.
    assert_same(variants["second"], variants["alone"])
    length = answers["first"][0]["prompt_tokens"]
    assert {(a["cached"], a["prompt_tokens"]) for a in variants["second"]} == {
        (0, length)
    }


@pytest.mark.only("v1")
@in_engine
def test_images_encoded_by_another_engine() -> None:
    """Which is sent them without any text. By V1 alone: in vLLM 0.32, V2 runs the language model of
    an encoding engine on meta."""
    from vllm.config import ECTransferConfig

    questions = [e for e in examples(2) if e.image_id == examples(2)[0].image_id]
    image = questions[0].image
    talks = [[turn(question.question, image)] for question in questions]
    answers: dict[str | None, list[Answer]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for role, expected_runs in (("ec_producer", 1), ("ec_consumer", 0), (None, 1)):
            config = role and ECTransferConfig(
                ec_connector="ECExampleConnector",
                ec_role=role,
                ec_connector_extra_config={"shared_storage_path": folder},
            )
            state = {"state": alone("divprune"), "budget": 32}
            engine = start(state, dtype="float32", ec_transfer_config=config)
            runs = engine.runs
            turns, tokens = (
                ([[turn("", image)]], 1) if role == "ec_producer" else (talks, 4)
            )
            answers[role] = [engine.chat(talk, tokens=tokens)[0] for talk in turns]
            assert engine.runs - runs == expected_runs
            engine.stop()
    assert len(questions) > 2
    assert_same(answers["ec_consumer"], answers[None])
