"""What operators see: metrics, log, refusals at the start, data parallelism."""

from __future__ import annotations

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server import CPU_ENVIRONMENT, Server, _free_port, command, serve
from benchmarks.yardsticks.examples import IMAGE_TOKEN
from tests.serving.conftest import COMMON, PRUNED
from tests.serving.engine import LLAVA, TOKENS, examples
from tests.serving.http import (
    ask,
    assert_grows,
    body,
    entry,
    prompt_tokens,
    samples,
    text_of,
)
from tests.serving.runners import Runner
from tests.tpdsl.samples import edited, sample, shipped
from vllm_autoprune.http_client import CHAT, Metrics
from vllm_autoprune.ops.dtype import choose_dtype

pytestmark = pytest.mark.engine


KV_BYTES = 2 * 6 * 6 * 32 * {"bfloat16": 2, "float32": 4}[choose_dtype()]
"""Keys and values of one token of mini-LLaVA: 2 x 6 layers x 6 heads x 32 x bytes of the dtype."""


def test_recalled_tokens_are_prompt_tokens_and_are_counted(
    two_front_ends: Server,
) -> None:
    conversation = body(two_front_ends, examples(12)[-5])
    conversation["messages"] += [
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "And its shape?"},
    ]
    looked_at = {"model": two_front_ends.model, "messages": conversation["messages"]}

    def send_requests() -> None:
        counted: Any = two_front_ends.post("/tokenize", looked_at)[1]
        status, answer = two_front_ends.post(CHAT, conversation)
        assert status == 200
        assert counted["count"] == prompt_tokens(answer)
        assert counted["tokens"].count(IMAGE_TOKEN) == 16 + 5

    gains = {"recalled_tokens": 5, "visual_tokens stage=after": 16 + 5}
    assert_grows(two_front_ends, send_requests, {**gains, "images chooser=state": 1})


def test_requests_are_counted(pruned: Server) -> None:
    # Images that no other test uses: vLLM's encoder cache would hide the worker's counts.
    questions = examples(12)[-4:]

    def send_requests() -> None:
        for k, example in enumerate(questions):
            ask(pruned, example, **entry(budget=50 + k))
        ask(pruned, questions[0], **entry(enabled=False))
        ask(pruned, questions[0], **entry(state="dart", budget=9))
        assert (
            pruned.post(CHAT, body(pruned, questions[0], **entry(budget=0)))[0] == 400
        )

    after = 50 + 51 + 52 + 53 + TOKENS + 9
    expected = {
        "requests state=autoprune": 4,
        "requests state=off": 1,
        "requests state=dart": 1,
        "requests_refused reason=malformed": 1,
        "images chooser=state": 6,
        "visual_tokens stage=before": 6 * TOKENS,
        "visual_tokens stage=after": after,
        "kv_bytes_saved": (6 * TOKENS - after) * KV_BYTES,
        # In the worker: one image per step, without the tower if its features are cached.
        "selection_seconds_count": 6,
        "fallbacks fallback=reference reason=unsafe": 0,
        "fallbacks fallback=reference reason=error": 0,
    }
    grown = assert_grows(pruned, send_requests, expected)
    assert grown["selection_seconds_sum"] > 0
    hits = grown["feature_cache_hits"]
    assert hits + grown["feature_cache_misses"] == 6
    # Stock vLLM serves the unpruned image, without caching features.
    assert hits >= 6 - 1 - len({example.image_id for example in questions})
    assert samples(pruned)["feature_cache_bytes"] > 0


def test_two_front_ends_answer_alike_and_report_the_same_totals(
    stock: Server, two_front_ends: Server
) -> None:
    questions = examples(1)[:2]
    full = prompt_tokens(ask(stock, questions[0]))
    answers = [ask(two_front_ends, questions[0]) for _ in range(24)]
    expected = full - TOKENS + 16, text_of(answers[0])
    assert {(prompt_tokens(answer), text_of(answer)) for answer in answers} == {
        expected
    }
    processes = r"\((ApiServer_\d+) pid=\d+\).*Received request"
    assert len(set(re.findall(processes, two_front_ends.logged()))) == 2, (
        "both have answered"
    )

    def send_requests() -> None:
        for i in range(20):
            ask(two_front_ends, questions[i % 2])

    saved = 20 * (TOKENS - 16) * KV_BYTES
    counted = {"requests state=autoprune": 20, "kv_bytes_saved": saved}
    assert_grows(two_front_ends, send_requests, counted)
    # Every front end reports all totals, including those of the workers.
    scrapes = [samples(two_front_ends) for _ in range(8)]
    for name in ("requests state=autoprune", "selection_seconds_count"):
        assert len({scrape[name] for scrape in scrapes}) == 1
    assert scrapes[0]["selection_seconds_count"] > 0


def test_requests_add_no_lines(pruned: Server) -> None:
    """One request of every kind a round; states and unknown names differ by round."""
    # vLLM's own: uvicorn's line a request, and its figures every ten seconds.
    vllm = re.compile(r'HTTP/1\.1" \d{3}|Engine \d{3}: |\[loggers\.py')
    questions = examples(4)
    lines_after_start = 0
    for number in range(12):
        weight = {
            "/scoring/signals/0/weight": (number + 1) / 100,
            "/name": f"own-{number}",
        }
        unknown = {"/name": f"bad-{number}", "/base_policy/name": f"none-{number}"}
        entries: list[dict[str, object]] = [
            {"budget": 8 + number},
            {"keep": "random", "budget": 8},
            {"enabled": False},
            {"state": edited(sample(), weight), "budget": 24},
            {"state": "visionzip", "budget": 16},
            {"recall": 4},
            {"state": edited(sample(), unknown)},
            {f"unknown-{number}": 1},
            {"budget": 0},
            {"budget": f"word-{number}"},
        ]
        example = questions[number % len(questions)]
        sent = [
            body(pruned, example, max_tokens=1, **entry(**fields)) for fields in entries
        ]
        statuses = [pruned.post(CHAT, request)[0] for request in sent]
        assert statuses == [200] * 6 + [400] * 4
        # What is said once is said in the first round.
        lines_after_start = lines_after_start or len(pruned.logged().splitlines())
    added = pruned.logged().splitlines()[lines_after_start:]
    assert sum('HTTP/1.1" ' in line for line in added) == 11 * len(entries)
    assert [line for line in added if not vllm.search(line)] == []


def test_all_problems_of_a_start_are_reported_with_pointers(tmp_path: Path) -> None:
    """Before the weights are loaded, and without a traceback."""
    wrong: dict[str, object] = {
        "/scoring/signals/3/m": 0,
        "/constraints/selector/atom": "reference_residual_exchange_selecto",
    }
    file = tmp_path / "state.json"
    file.write_text(json.dumps(edited(shipped("autoprune"), wrong)))
    flags = {
        "state": file,
        "budget": 0,
        "text-tower": tmp_path,
        "feature-cache-gb": "much",
    }
    pruning = (
        word
        for name, value in flags.items()
        for word in (f"--autoprune-{name}", str(value))
    )
    done = subprocess.run(
        command(LLAVA, _free_port(), ("--enforce-eager", *pruning)),
        env={**os.environ, **CPU_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert "Traceback" not in output and "Loading safetensors" not in output
    for text in (
        *(f"{file}#{pointer}" for pointer in wrong),
        "did you mean 'reference_residual_exchange_selector'",
        *(f"- --autoprune-{name}" for name in flags if name != "state"),
    ):
        assert text in output


@pytest.mark.exhaustive
def test_both_engines_answer_alike(runner: Runner) -> None:
    """Requests go to either engine, each with a feature cache of its own."""
    flags = (
        *COMMON,
        *PRUNED,
        "--data-parallel-size",
        "2",
        "--autoprune-requests",
        "budget:1-64",
    )
    questions = examples(4)
    with serve(LLAVA, *flags, env=runner.environment) as server:

        def answer(number: int) -> tuple[int, str]:
            reply = ask(
                server,
                questions[number % len(questions)],
                **entry(budget=16 + number % 2),
            )
            return prompt_tokens(reply) - number % 2, text_of(reply)

        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(answer, range(4 * len(questions))))
        again = [answer(number) for number in range(2 * len(questions))]
        metrics = Metrics(server.get("/metrics"))
    finished = [
        metrics.total("vllm:request_success_total", engine=engine) for engine in "01"
    ]
    assert all(finished), "both engines answer"
    assert sum(count or 0 for count in finished) == len(together) + len(again)
    assert metrics.total("autoprune_requests_total") == len(together) + len(again)
    assert together == again * 2
