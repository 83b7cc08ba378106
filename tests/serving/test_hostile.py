"""Invariant 5: no request stops the engine."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from unittest.mock import patch

import httpx
import psutil  # type: ignore[import-untyped]
import pytest
import torch
from PIL import Image
from prometheus_client import generate_latest

import tests.hostile.attacks  # noqa: F401  (registers its attacks)
from benchmarks.server import Server, serve
from benchmarks.yardsticks.adapters import ADAPTERS, write_adapters
from benchmarks.yardsticks.examples import as_picture
from tests.fuzz.generator import MutatedRequest, draw_request
from tests.hostile.site import ATTACKS, Client, Reply, run_attack
from tests.serving.conftest import COMMON
from tests.serving.engine import (
    CLIP,
    LLAVA,
    STATE,
    breaking,
    examples,
    prompt,
    start,
    turn,
)
from tests.serving.http import ask, body, text_of
from tests.serving.runners import Runner, in_engine
from tests.tpdsl.samples import edited, sample
from vllm_autoprune.http_client import CHAT, Metrics
from vllm_autoprune.serving.request_states import load_request_state
from vllm_autoprune.tpdsl import refine as executor

pytestmark = pytest.mark.engine

FALLBACKS: Mapping[str, tuple[str, Mapping[str, str], int]] = {
    # NaN and Inf in an image's features: evenly spaced tokens are kept.
    "uniform": (
        "autoprune_fallbacks_total",
        {"fallback": "uniform", "reason": "scores"},
        2,
    ),
    "reference": (
        "autoprune_fallbacks_total",
        {"fallback": "reference", "reason": "error"},
        2,
    ),
    "errors": ("autoprune_selection_errors_total", {"error": "RuntimeError"}, 2),
}
"""Metrics, and by how much the next test makes them grow."""


@pytest.mark.both
@in_engine
def test_engine_survives_failing_policies_and_invalid_requests() -> None:

    def count_fallbacks() -> dict[str, float]:
        metrics = Metrics(generate_latest().decode())
        return {
            key: metrics.total(name, **labels) or 0
            for key, (name, labels, _) in FALLBACKS.items()
        }

    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    def raising(*args: object) -> torch.Tensor:
        raise RuntimeError("made to fail")

    failing = partial(patch.object, executor, "run_fusion", raising)
    engine = start({**STATE, "budget": 8, "requests": "states"})
    example = examples(2)[0]
    other = examples(2)[-1]
    sane = engine.ask(example)
    fallbacks = count_fallbacks()
    tiny = Image.new("RGB", (1, 1), (255, 0, 0))
    engine.chat([turn("What is it?", tiny)], [turn("", other.image)])

    # After each of these, a usual question is answered as before.
    long = prompt(other, instructions=[" ".join(["red"] * 10_000)])
    for number, kind in enumerate(("long", "nan", "inf", "raised"), 3):
        unseen = as_picture(other.image).rotate(number)  # its features are not cached
        if kind == "long":
            engine.generate([long])
        elif kind == "raised":
            with failing():
                engine.chat([turn("raise?", other.image)])
        else:
            broken = breaking(engine.model.multi_modal_projector, float(kind))
            engine.chat([turn("What is it?", unseen)])
            broken.remove()
        engine.empty_caches()
        assert engine.ask(example) == sane, kind

    # A request's state that fails is served by its base policy, until the fault is removed.
    state = edited(sample(), {"/constraints/selector/q_e": 5})
    load_request_state(state)  # passes the checks at start-up
    question = examples(3)[1]
    engine.empty_caches()
    with failing():
        (broken_state,) = engine.generate([prompt(question, state=state, budget=8)])
    engine.empty_caches()
    base = [prompt(question, state=state, budget=8, keep="reference")]
    assert [broken_state] == engine.generate(base)
    after = count_fallbacks()
    grown = {key: after[key] - fallbacks[key] for key in FALLBACKS}
    assert grown == {key: count for key, (*_, count) in FALLBACKS.items()}

    # A request that was refused for a sampling parameter: its image reaches the engine later.
    refused = prompt(other, instructions=["Which one was refused?"])
    with pytest.raises(VLLMValidationError, match="allowed_token_ids"):
        engine.llm.generate(
            [refused], SamplingParams(allowed_token_ids=[10**9]), use_tqdm=False
        )
    repeated = engine.generate([refused])
    engine.empty_caches()
    assert repeated == engine.generate([refused])


QUICK = [
    name
    for name, attack in ATTACKS.items()
    if attack.quick and "default" in attack.profiles and "llava" in attack.backbones
]


@pytest.mark.parametrize("name", QUICK)
def test_an_attack_is_withstood(stock: Server, pruned: Server, name: str) -> None:
    servers: dict[str, Server] = {"default": pruned, "stock": stock}
    run_attack(name, "default", servers.__getitem__)


def send_mutated_requests(
    server: Server, stock: Server, count: int, adapters: Sequence[str] = ()
) -> Counter[int]:
    """Statuses of ``count`` mutated requests, four at a time; fails where one is served otherwise.

    No server error that stock vLLM does not give, no answer that the engine gives and that does not
    arrive, and a usual question is answered as before.
    """
    example = examples(2)[0]
    client = Client(server)
    judge = Client(stock)
    bodies = [body(server, example, max_tokens=1) for example in examples(2)]
    statuses = Counter[int]()
    by_stock = set[str]()
    failed: list[tuple[str, str]] = []

    def count_answers() -> float:
        """Answers that the engine has finished without an error, by vLLM's own count."""
        name = "vllm:request_success_total"
        return client.metric(name) - client.metric(name, finished_reason="error")

    def cause(reply: Reply) -> str:
        """An error's message without the numbers in it."""
        return re.sub(r"[0-9a-f]{8,}|\d+", "…", f"{reply.status} {reply.message[:120]}")

    def exchange(number: int) -> tuple[int, MutatedRequest, Reply, Reply | None]:
        request = draw_request(bodies, Random(f"5/{number}"), (server.model, *adapters))
        reply = client.send(CHAT, request.content)
        # What vLLM reads itself, stock vLLM may refuse or fail too.
        read_by_vllm = reply.failed or request.kind in ("body", "conversation")
        judged = request.stock is not None and read_by_vllm
        return (
            number,
            request,
            reply,
            judge.send(CHAT, request.stock or {}) if judged else None,
        )

    answer = text_of(ask(server, example))
    finished = count_answers()
    answers = 0
    with ThreadPoolExecutor(4) as pool:
        for number, request, reply, judgement in pool.map(exchange, range(count)):
            statuses[reply.status] += 1
            answers += len(reply.body["choices"]) if reply.status == 200 else 0
            if judgement is not None and judgement.failed:
                by_stock.add(cause(judgement))
            if reply.failed:
                what = f"number {number} ({request.kind}): {request.text[:200]}"
                failed.append((cause(reply), f"{what} -> {reply}"))
    # After the last one: what stock answers to a request depends on those before it.
    assert [fault for why, fault in failed if why not in by_stock] == []
    assert count_answers() - finished == answers
    assert text_of(ask(server, example)) == answer
    return statuses


@pytest.mark.only("v1")
def test_mutated_requests_do_not_affect_the_server(
    stock: Server, pruned: Server
) -> None:
    statuses = send_mutated_requests(pruned, stock, 300)
    assert min(statuses[200], statuses[400]) > 20


@pytest.mark.exhaustive
@pytest.mark.only("v1")
@pytest.mark.timeout(7200)
def test_thousands_of_mutated_requests_in_every_mode(
    runner: Runner, tmp_path: Path
) -> None:
    """Recall, cores, states by request, details, two adapters and two API servers."""
    flags = (*COMMON, "--num-gpu-blocks-override", "1024", *write_adapters(tmp_path))
    pruning = (
        "--autoprune-state",
        "minillava-split",
        "--autoprune-budget",
        "64",
        "--autoprune-text-tower",
        str(CLIP),
        "--autoprune-recall",
        "4",
        "--autoprune-requests",
        "states:1-256",
        "--autoprune-detail",
        "low=5%:1-8,high=64",
        "--api-server-count",
        "2",
    )
    env = runner.environment
    with (
        serve(LLAVA, *flags, env=env) as stock,
        serve(LLAVA, *flags, *pruning, env=env) as server,
    ):
        server.await_api_servers(2)
        statuses = send_mutated_requests(server, stock, 5000, ADAPTERS)
    assert min(statuses[200], statuses[400]) > 500


@pytest.mark.ends_servers
def test_pruned_server_ends_like_stock_after_a_killed_worker(
    stock: Server, pruned: Server
) -> None:
    """The last test of these servers (``conftest.pytest_collection_modifyitems``)."""

    def kill_worker(server: Server) -> tuple[set[int], bool]:
        """Statuses of requests that were running (0: no answer), and whether the server ended.

        The worker is stopped before they are sent, so that no machine answers them before the kill.
        """

        def ask(number: int) -> int:
            try:
                return server.post(CHAT, body(server, examples(2)[number]))[0]
            except httpx.HTTPError:
                return 0

        processes = psutil.Process(server.process.pid).children(recursive=True)
        titles = {" ".join(process.cmdline()): process for process in processes}
        # Of one rank, both are one process.
        engine = ("VLLM::Worker", "VLLM::EngineCore")
        worker = next(
            titles[t] for title in engine for t in titles if t.startswith(title)
        )
        worker.suspend()
        deadline = time.monotonic() + 600
        with ThreadPoolExecutor(4) as pool:
            requests = [pool.submit(ask, number) for number in range(4)]
            # Until all four are with the engine.
            wait_until_idle(server.process.pid, deadline)
            assert not any(request.done() for request in requests)
            worker.kill()
            statuses = {request.result() for request in requests}
            while server.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
        return statuses, server.process.poll() is not None

    def wait_until_idle(pid: int, deadline: float) -> None:
        """Wait for a process to use less than 2 % of a processor for three seconds."""
        process = psutil.Process(pid)
        used = -1.0
        while (now := sum(process.cpu_times()[:2])) - used > 0.06:
            assert time.monotonic() < deadline
            used = now
            time.sleep(3)

    statuses, ended = kill_worker(stock)
    assert kill_worker(pruned) == (statuses, ended)
    assert 200 not in statuses
