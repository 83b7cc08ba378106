"""Two data-parallel engines behind one address."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.server import serve
from tests.serving.conftest import COMMON, PRUNED
from tests.serving.engine import examples
from tests.serving.http import ask, budget, prompt_tokens, text_of
from tests.serving.paths import LLAVA
from tests.serving.runners import Runner

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(900)]


def test_both_engines_answer_alike(runner: Runner) -> None:
    """Requests go to either engine, each with a feature cache of its own."""
    flags = (*COMMON, *PRUNED, "--data-parallel-size", "2", "--autoprune-requests", "budget:1-64")
    with serve(LLAVA, *flags, env=runner.environment, patience=600) as server:
        questions = examples(4)

        def one(at: int) -> tuple[int, str]:
            answer = ask(server, questions[at % len(questions)], **budget(16 + at % 2))
            return prompt_tokens(answer) - at % 2, text_of(answer)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(one, range(4 * len(questions))))
        again = [one(at) for at in range(2 * len(questions))]
        metrics = server.get("/metrics")
    pattern = r'vllm:request_success_total\{engine="(\d)".*\} (\S+)'
    finished = {"0": 0.0, "1": 0.0}
    for engine, count in re.findall(pattern, metrics):
        finished[engine] += float(count)
    assert min(finished.values()) > 0, "both engines answer"
    assert sum(finished.values()) == len(answers) + len(again)
    counted = re.findall(r"autoprune_requests_total\{.*\} (\S+)", metrics)
    assert sum(map(float, counted)) == len(answers) + len(again)
    for at, answer in enumerate(answers):
        assert answer == again[at % len(again)]
