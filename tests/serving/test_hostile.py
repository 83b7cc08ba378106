"""Invariant 5: no request stops the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import httpx
import psutil  # type: ignore[import-untyped]
import pytest
import torch
from PIL import Image
from prometheus_client import generate_latest

import tests.hostile.attacks  # noqa: F401  (registers them)
from benchmarks.server import Server
from benchmarks.yardsticks.examples import Example
from tests.hostile.attack import ATTACKS
from tests.hostile.campaign import run_attack
from tests.hostile.mutate import run
from tests.serving.engine import (
    STATE,
    ask,
    breaking,
    chat,
    examples,
    forget,
    generate,
    model_of,
    picture,
    prompt,
    start,
    turn,
)
from tests.serving.http import body
from tests.serving.scenarios import Report, Runner, scenario
from tests.tpdsl.samples import edited, sample
from vllm_autoprune.serving.api.choices import load_request_state
from vllm_autoprune.tpdsl import refine as executor

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(590)]


@scenario
def hostile() -> Report:
    """Failing policies and invalid requests, and whether the engine still answers after each."""
    llm = start({**STATE, "budget": 8, "requests": "states"})
    model = model_of(llm)
    example, other = examples(2)[0], examples(2)[-1]
    sane = ask(llm, example).plain()
    report: dict[str, Any] = {"sane": sane, "after": {}}
    before = _exported({})

    def survived(name: str) -> None:
        forget(llm)
        report["after"][name] = ask(llm, example).plain()

    tiny = Image.new("RGB", (1, 1), (255, 0, 0))
    report["one_pixel"] = chat(llm, [[turn("What is it?", tiny)]])[0].plain()
    survived("one_pixel")
    report["empty"] = chat(llm, [[turn("", other.image)]])[0].plain()
    survived("empty")
    long = " ".join(["red"] * 10_000)
    report["long"] = generate(llm, [prompt(other, instruction=long)])[0].plain()
    survived("long")
    for name, value in (("nan", float("nan")), ("inf", float("inf"))):
        broken = breaking(model.multi_modal_projector, value)
        # A new image, whose features are not cached.
        unseen = picture(other.image).rotate(len(name) + 90 * (name == "inf"))
        report[name] = chat(llm, [[turn(f"{name}?", unseen)]])[0].plain()
        broken.remove()
        survived(name)
    report["fallbacks"] = model.autoprune_reporter.meter.counts()

    def raising(*args: object) -> torch.Tensor:
        raise RuntimeError("made to fail")

    with patch.object(executor, "run_fusion", raising):
        report["raised"] = chat(llm, [[turn("raise?", other.image)]])[0].plain()
    report["errors"] = model.autoprune_reporter.meter.errors
    survived("raised")
    report["unsafe"] = _fails_first_image_check(llm, raising)
    survived("unsafe")
    report["exported"] = _exported(before)
    report["repeated"], report["unrefused"] = _refused_and_repeated(llm, other)
    return report


def _refused_and_repeated(llm: LLM, example: Example) -> tuple[Report, Report]:
    """Answers to a request after it was refused for a sampling parameter, and without that."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    raw = prompt(example, instruction="Which one was refused?")
    with pytest.raises(VLLMValidationError, match="allowed_token_ids"):
        llm.generate([raw], SamplingParams(allowed_token_ids=[10**9]), use_tqdm=False)
    repeated = generate(llm, [raw])[0].plain()
    forget(llm)
    return repeated, generate(llm, [raw])[0].plain()


def _exported(before: Mapping[str, float]) -> dict[str, float]:
    """Counters of the plugin in this process's metrics, as differences from ``before``."""
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        - before.get(line.rpartition(" ")[0], 0.0)
        for line in generate_latest().decode().splitlines()
        if line.startswith("autoprune_") and "_created" not in line
    }


def _fails_first_image_check(llm: LLM, raising: Callable[..., object]) -> Report:
    """Answers of a state that fails its check on the first real image, and of its base policy.

    ``broken`` and ``fixed`` are its answers while it fails and after the fault is removed.
    """
    state = edited(sample(), {"/constraints/selector/q_e": 5})
    load_request_state(state)  # passes the checks at start-up
    question, other = examples(3)[1], examples(3)[-2]
    report: dict[str, Any] = {}

    def record_answer(name: str, about: Example, keep: str) -> None:
        entry = {"state": state, "budget": 8, "keep": keep}
        raw = {**prompt(about), "mm_processor_kwargs": {"autoprune": entry}}
        forget(llm)
        report[name] = generate(llm, [raw])[0].plain()

    with patch.object(executor, "run_fusion", raising):
        record_answer("broken", question, "state")
    record_answer("fixed", other, "state")
    record_answer("base", question, "reference")
    record_answer("other_base", other, "reference")
    first = model_of(llm).autoprune_first_check
    report["counted"] = 0 if first is None else first.unsafe
    return report


REQUESTS = ("one_pixel", "empty", "long", "nan", "inf", "raised")


@pytest.mark.both
@pytest.mark.parametrize("name", REQUESTS)
def test_engine_survives_and_answers(runner: Runner, name: str) -> None:
    report = runner.run("hostile")
    assert isinstance(report[name]["text"], str)
    assert report["after"][name] == report["sane"]


@pytest.mark.both
def test_fallbacks_are_counted_by_reason(runner: Runner) -> None:
    report = runner.run("hostile")
    # NaN and Inf in an image's features: evenly spaced tokens are kept.
    assert report["fallbacks"]["uniform"] == 2
    assert report["errors"] == {"RuntimeError": 1}


@pytest.mark.both
def test_fallbacks_are_in_the_metrics(runner: Runner) -> None:
    exported = runner.run("hostile")["exported"]
    assert exported['autoprune_fallbacks_total{fallback="uniform",reason="scores"}'] == 2
    assert exported['autoprune_fallbacks_total{fallback="reference",reason="error"}'] == 1
    assert exported['autoprune_selection_errors_total{error="RuntimeError"}'] == 1
    assert exported["autoprune_unsafe_states_total"] == 1


@pytest.mark.both
def test_a_state_that_fails_on_its_first_image_is_served_by_its_base_policy(runner: Runner) -> None:
    report = runner.run("hostile")["unsafe"]
    assert report["counted"] == 1
    assert report["broken"] == report["base"]
    # A state that failed once is not used again.
    assert report["fixed"] == report["other_base"]


@pytest.mark.both
def test_images_of_a_refused_request_reach_the_engine_with_the_next_one(runner: Runner) -> None:
    report = runner.run("hostile")
    assert report["repeated"] == report["unrefused"]


API_SERVER = (
    *("dear_states", "counted_though_not_served", "control_characters", "special_tokens"),
    *("truncated_prompts", "odd_sizes", "images_of_every_role", "odd_arguments_of_media"),
)
"""Attacks on the API server, which is the same for both model runners."""

WORKER = tuple(
    attack.name
    for attack in ATTACKS.values()
    if attack.quick
    and attack.profile == "default"
    and "llava" in attack.backbones
    # The plugin's endpoint is off on the shared servers.
    and attack.name not in (*API_SERVER, "paths_of_the_server")
)


def find_problems(name: str, runner: Runner, stock: Server, pruned: Server) -> list[str]:
    servers = {"default": pruned, "stock": stock}
    return run_attack(ATTACKS[name], "llava", runner.name, lambda p: servers[p]).problems


@pytest.mark.parametrize("name", WORKER)
def test_attack_on_the_worker_finds_no_problem(
    runner: Runner, stock: Server, pruned: Server, name: str
) -> None:
    assert find_problems(name, runner, stock, pruned) == []


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
@pytest.mark.parametrize("name", API_SERVER)
def test_attack_on_the_api_server_finds_no_problem(
    runner: Runner, stock: Server, pruned: Server, name: str
) -> None:
    assert find_problems(name, runner, stock, pruned) == []


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
def test_mutated_requests_do_not_affect_the_server(stock: Server, pruned: Server) -> None:
    tally = run(pruned, 300, seed=5, stock=stock)
    assert tally.faults == []
    assert min(tally.statuses[200], tally.statuses[400]) > 20


PATIENCE = 120.0
SETTLED = 3.0
"""Seconds in which answers that a worker has already made are delivered."""


@dataclass(frozen=True)
class Aftermath:
    """Statuses of the requests that ran (0: no answer), and the server's exit."""

    statuses: frozenset[int]
    ended: bool


def kill_worker(server: Server) -> Aftermath:
    worker = _worker(server)
    with ThreadPoolExecutor(4) as pool:
        deadline = time.monotonic() + PATIENCE
        requests: list[Future[int]] = []
        while not requests:
            assert time.monotonic() < deadline, "every request is answered before the kill"
            requests = _interrupt(server, worker, pool)
        worker.kill()
        statuses = frozenset(future.result() for future in requests)
        deadline = time.monotonic() + PATIENCE
        while server.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        return Aftermath(statuses, server.process.poll() is not None)


def _interrupt(
    server: Server, worker: psutil.Process, pool: ThreadPoolExecutor
) -> list[Future[int]]:
    """Send requests and stop the worker while some of them run; those that it has not answered.

    On a busy machine it may have answered some, or all, before it is stopped.
    """
    requests = [pool.submit(_status, server, i) for i in range(4)]
    while not all(request.done() for request in requests):
        if "vllm:num_requests_running" in _running(server):
            worker.suspend()
            time.sleep(SETTLED)
            break
        time.sleep(0.05)
    unanswered = [request for request in requests if not request.done()]
    if not unanswered:
        worker.resume()
    return unanswered


def _status(server: Server, number: int) -> int:
    long = {"max_tokens": 1800, "ignore_eos": True}
    try:
        return server.post("/v1/chat/completions", body(server, examples(2)[number], **long))[0]
    except httpx.HTTPError:
        return 0


def _running(server: Server) -> str:
    """Lines of ``/metrics`` that show running requests."""
    lines = server.get("/metrics").splitlines()
    return "\n".join(
        line
        for line in lines
        if line.startswith("vllm:num_requests_running{") and float(line.rsplit(" ", 1)[1]) > 0
    )


def _worker(server: Server) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    titles = {child: " ".join(child.cmdline()) for child in children}
    for title in ("VLLM::Worker", "VLLM::EngineCore"):
        for child, command in titles.items():
            if command.startswith(title):
                return child
    raise AssertionError(f"no worker among {list(titles.values())}")


@pytest.mark.ends_servers
def test_pruned_server_ends_like_stock_after_a_killed_worker(stock: Server, pruned: Server) -> None:
    """The last test of these servers (``conftest.pytest_collection_modifyitems``)."""
    aftermath = kill_worker(stock)
    assert kill_worker(pruned) == aftermath
    assert 200 not in aftermath.statuses
