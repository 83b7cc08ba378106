"""What engines share through vLLM's connectors: KV blocks, and outputs of the vision encoder.

The connectors are vLLM's own, which keep everything in a folder. Engines run one after the other:
what the second one finds there is of the first.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from benchmarks.server import Server, serve
from tests.serving.conftest import PRUNED
from tests.serving.engine import (
    LLAVA,
    STATE,
    Answer,
    alone,
    chat,
    examples,
    generate,
    prompt,
    release,
    start,
    turn,
    vision_runs,
)
from tests.serving.http import body, prompt_tokens, text_of
from tests.serving.scenarios import Report, Runner, scenario
from tests.serving.test_conversations import state_with_core
from tests.serving.test_modes import mixed_prompts
from vllm_autoprune.serving.api import planner
from vllm_autoprune.serving.plan import make_cache_identity

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]


TEXT = "Which shape is it? red green blue white"
"""A prompt of more than two KV blocks together with its image."""

VARIANTS: Mapping[str, Mapping[str, object]] = {
    "question": {"instructions": ["What is the number?"]},
    "state": {"state": "visionzip"},
    "reference": {"keep": "reference"},
    "random": {"keep": "random"},
    "core": {"state": "core"},
}
"""What requests change whose prompts have the very same token ids."""


@scenario
def shared_kv() -> Report:
    """Two engines on one store of KV, and one without.

    ``first`` and ``second``: their answers to the same prompts; ``alone``: those of an engine
    without a store. ``hits`` of the second one, in tokens. ``variants``: its answers to prompts of
    the same token ids with another question, state or control, by what differs; ``variants_alone``
    the same without a store.
    """
    with tempfile.TemporaryDirectory() as folder:
        llm = _start(folder)
        report: dict[str, Any] = {"first": _answers(llm, _shared())}
        release(llm)
        llm = _start(folder)
        report["second"] = _answers(llm, _shared())
        report["hits"] = _hits(llm)
        report["variants"] = {name: _variant(llm, name) for name in VARIANTS}
        release(llm)
        llm = _start(None)
        report["alone"] = _answers(llm, _shared())
        report["variants_alone"] = {name: _variant(llm, name) for name in VARIANTS}
        release(llm)
        return report


@scenario
def shared_kv_without_the_question() -> Report:
    """Negative control: the question is left out of identities, and a store is shared."""

    def without(image: str, served: str, budget: int, keep: Any, ids: Any, core: int) -> str:
        return make_cache_identity(image, served, budget, keep, None, core)

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(planner, "make_cache_identity", without),
    ):
        llm = _start(folder)
        _answers(llm, _shared())
        release(llm)
        llm = _start(folder)
        return {"question": _variant(llm, "question")}


def _start(folder: str | None) -> LLM:
    from vllm.config import KVTransferConfig

    options: dict[str, object] = {}
    if folder is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": folder},
        )
    return start(
        {**STATE, "requests": "states"},
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=2048,
        disable_log_stats=False,
        **options,
    )


def _shared() -> list[dict[str, object]]:
    return [_raw(), *mixed_prompts()]


def _raw(**entry: object) -> dict[str, object]:
    from benchmarks.yardsticks.examples import format_prompt

    example = examples(1)[0]
    fields = {"budget": 64, "instructions": [TEXT], **entry}
    if fields.get("state") == "core":
        from tests.serving.test_conversations import state_with_core

        # With its question before the image it stays one item, of the same token ids.
        fields["state"] = {**state_with_core(), "name": "core"}
    return {
        **prompt(example),
        "prompt": format_prompt(TEXT),
        "mm_processor_kwargs": {"autoprune": fields},
    }


def _answers(llm: LLM, prompts: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    return [generate(llm, [one], tokens=6)[0].plain() for one in prompts]


def _variant(llm: LLM, name: str) -> dict[str, object]:
    llm.reset_prefix_cache()
    return generate(llm, [_raw(**VARIANTS[name])], tokens=6)[0].plain()


def _hits(llm: LLM) -> float:
    from tests.serving.test_modes import counter

    return counter(llm, "vllm:external_prefix_cache_hits")


@scenario
def shared_encoder() -> Report:
    """An engine that encodes for another one, whose requests come without any text.

    ``answers`` of the second to questions about the image, its ``runs`` of the vision tower, and
    the answers ``alone``, of an engine that encodes for itself.
    """
    from vllm.config import ECTransferConfig

    state = {"state": alone("divprune"), "budget": 32}
    first, *others = examples(2)
    asked = [one for one in (first, *others) if one.image_id == first.image_id]

    def connected(role: str, folder: str) -> LLM:
        config = ECTransferConfig(
            ec_connector="ECExampleConnector",
            ec_role=role,
            ec_connector_extra_config={"shared_storage_path": folder},
        )
        return start(state, dtype="float32", ec_transfer_config=config)

    def answers(llm: LLM) -> list[Answer]:
        return [chat(llm, [[turn(one.question, one.image)]])[0] for one in asked]

    with tempfile.TemporaryDirectory() as folder:
        llm = connected("ec_producer", folder)
        profiled = vision_runs(llm)
        chat(llm, [[turn("", first.image)]], tokens=1)
        encoded = vision_runs(llm) - profiled
        release(llm)
        llm = connected("ec_consumer", folder)
        before = vision_runs(llm)
        found = [one.plain() for one in answers(llm)]
        runs = vision_runs(llm) - before
        release(llm)
    llm = start(state, dtype="float32")
    return {
        "answers": found,
        "runs": runs,
        "encoded": encoded,
        "alone": [one.plain() for one in answers(llm)],
    }


BLOCK = 32


def test_a_second_engine_takes_pruned_kv_of_the_first(runner: Runner) -> None:
    report = runner.run("shared_kv")
    loaded = 0
    for stored, taken, single in zip(
        report["first"], report["second"], report["alone"], strict=True
    ):
        assert taken["text"] == stored["text"] == single["text"]
        assert taken["logprob"] == pytest.approx(single["logprob"], abs=1e-3)
        assert taken["cached"] == (taken["prompt_tokens"] - 1) // BLOCK * BLOCK
        loaded += taken["cached"] - stored["cached"]
    assert report["hits"] == loaded > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_kv_of_another_request_is_never_taken(runner: Runner, name: str) -> None:
    """The token ids of the prompts are equal; question, state or control differ."""
    report = runner.run("shared_kv")
    answer, single = report["variants"][name], report["variants_alone"][name]
    assert answer["prompt_tokens"] == report["first"][0]["prompt_tokens"]
    assert answer["cached"] == 0
    assert answer["text"] == single["text"]
    assert answer["logprob"] == pytest.approx(single["logprob"], abs=1e-3)


def test_negative_control_without_the_question_in_the_identity(runner: Runner) -> None:
    wrong = runner.run("shared_kv_without_the_question")["question"]
    right = runner.run("shared_kv")["variants"]["question"]
    assert wrong["cached"] > 0
    assert wrong["text"] != right["text"] or wrong["logprob"] != pytest.approx(right["logprob"])


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
def test_images_encoded_by_another_engine(runner: Runner) -> None:
    """By V1 alone: in vLLM 0.32, V2 runs the language model of an encoding engine on meta."""
    report = runner.run("shared_encoder")
    assert report["encoded"] == 1
    assert report["runs"] == 0
    assert len(report["answers"]) > 2
    for found, single in zip(report["answers"], report["alone"], strict=True):
        assert found["text"] == single["text"]
        assert found["logprob"] == pytest.approx(single["logprob"], abs=1e-3)


COUNT = 500
# In float32, and with room for whole prompts in a step: the connector stores a prompt by its first.
FLAGS = (
    *(
        "--enforce-eager",
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
        "--block-size",
        str(BLOCK),
    ),
    *("--max-num-batched-tokens", "4096", "--max-num-seqs", "8", "--enable-prompt-tokens-details"),
    *PRUNED,
    *("--autoprune-requests", "states"),
)
ENTRIES: tuple[dict[str, object], ...] = (
    {"budget": 32},
    {"budget": 64},
    {"state": "visionzip", "budget": 64},
    {"state": {**state_with_core(), "name": "core"}, "budget": 64},
    {"keep": "random", "budget": 64},
    {"keep": "reference", "budget": 64},
    {"budget": 48, "recall": 8},
    {"enabled": False},
)
Key = tuple[int, int, bool]
"""Which question, which entry, and whether another turn follows."""


@pytest.fixture(scope="module")
def servers(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two servers on one store, and one without."""
    store = tmp_path_factory.mktemp("store")
    with ExitStack() as stack:
        yield [
            stack.enter_context(serve(LLAVA, *FLAGS, *_stored(folder), env=runner.environment))
            for folder in (store, store, None)
        ]


def _stored(folder: Path | None) -> tuple[str, ...]:
    if folder is None:
        return ()
    config = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return ("--kv-transfer-config", json.dumps(config))


def _send(server: Server, key: Key) -> tuple[str, int]:
    """The answer, and how many tokens the prompt has."""
    question, entry, follows = key
    sent: dict[str, Any] = body(server, examples(6)[question], max_tokens=6)
    sent["mm_processor_kwargs"] = {"autoprune": ENTRIES[entry]}
    if follows:
        said = {"role": "assistant", "content": "red"}
        sent["messages"] += [said, {"role": "user", "content": "And what is left of it?"}]
    status, answer = server.post("/v1/chat/completions", sent)
    assert status == 200, answer
    return text_of(answer), prompt_tokens(answer)


@pytest.mark.exhaustive
def test_requests_to_both_servers_are_answered_as_without_a_store(servers: list[Server]) -> None:
    every = list(product(range(12), range(len(ENTRIES)), (False, True)))
    expected = {key: _send(servers[2], key) for key in every}
    # Of a prompt one token longer than whole blocks vLLM 0.32's connector looks for a block less
    # than it then loads (`align_to_block_size` of one token less), and its engine ends.
    keys = [key for key, (_, length) in expected.items() if length % BLOCK != 1]
    assert len(keys) > len(every) // 2
    random = Random(0)
    # One at a time: the connector takes a folder for complete as soon as it is there.
    sent = [(random.choice(keys), random.randrange(2)) for _ in range(COUNT)]
    apart = [
        (key, target, text, expected[key])
        for key, target in sent
        if (text := _send(servers[target], key)) != expected[key]
    ]
    assert apart == []
    metrics = [server.get("/metrics") for server in servers[:2]]
    hits = [_sum(text, "vllm:external_prefix_cache_hits_total") for text in metrics]
    assert min(hits) > 0, "each server takes KV of the other"


def _sum(metrics: str, name: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith(f"{name}{{")]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)
