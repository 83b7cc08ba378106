"""`vllm serve` with a state: token counts, budgets, caches and refusals, over HTTP."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.server import Server
from tests.serving.engine import examples
from tests.serving.http import ask, body, budget, cached_tokens, prompt_tokens, text_of
from tests.serving.paths import TOKENS

pytestmark = pytest.mark.engine


def test_prompt_tokens_fall_by_exactly_n_minus_k(stock: Server, pruned: Server) -> None:
    for example in examples(1)[:3]:
        full = prompt_tokens(ask(stock, example))
        assert prompt_tokens(ask(pruned, example)) == full - TOKENS + 32
        for k in (1, 8, 31, 143):
            reply = ask(pruned, example, **budget(k))
            assert prompt_tokens(reply) == full - TOKENS + k


def test_budgets_from_n_on_keep_everything(stock: Server, pruned: Server) -> None:
    for example in examples(1)[:3]:
        full = ask(stock, example, logprobs=True)
        for k in (TOKENS, 4096):
            kept = ask(pruned, example, logprobs=True, **budget(k))
            assert kept["usage"]["prompt_tokens"] == full["usage"]["prompt_tokens"]
            assert kept["choices"][0]["logprobs"] == full["choices"][0]["logprobs"]


def test_tokenize_predicts_the_prompt(pruned: Server) -> None:
    example = examples(1)[0]
    messages = body(pruned, example)["messages"]
    status, counted = pruned.post("/tokenize", {"model": pruned.model, "messages": messages})
    assert status == 200
    assert counted["count"] == prompt_tokens(ask(pruned, example))


def test_prefix_cache_is_not_shared_between_questions(pruned: Server) -> None:
    first, second = examples(6)[-2:]
    assert first.image_id == second.image_id
    assert cached_tokens(ask(pruned, first, **budget(40))) == 0
    assert cached_tokens(ask(pruned, second, **budget(40))) == 0
    assert cached_tokens(ask(pruned, first, **budget(40))) >= 32
    assert cached_tokens(ask(pruned, first, **budget(41))) == 0


def test_concurrent_requests_equal_single_ones(pruned: Server) -> None:
    questions = examples(4)
    budgets = [8 + 4 * (i % 12) for i in range(len(questions))]

    def one(i: int) -> tuple[str, int]:
        answer = ask(pruned, questions[i], **budget(budgets[i]))
        return text_of(answer), prompt_tokens(answer)

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(one, range(len(questions))))
    pruned.post("/reset_prefix_cache", {})
    alone = [one(i) for i in range(len(questions))]
    assert together == alone


def test_controls_keep_k_tokens_of_their_own_choice(pruned: Server) -> None:
    example = examples(1)[0]
    for keep in ("reference", "random", "resized"):
        entry = {"mm_processor_kwargs": {"autoprune": {"budget": 40, "keep": keep}}}
        answer = ask(pruned, example, **entry)
        assert prompt_tokens(answer) == prompt_tokens(ask(pruned, example, **budget(40)))


@pytest.mark.parametrize("k", [0, -3, "8", 1.5, True, None, 10**9])
def test_invalid_budget_is_a_bad_request(pruned: Server, k: object) -> None:
    if k is None:  # null means no budget
        ask(pruned, examples(1)[0], **budget(k))
        return
    status, answer = pruned.post("/v1/chat/completions", body(pruned, examples(1)[0], **budget(k)))
    assert status == 400
    assert "budget" in str(answer)
    ask(pruned, examples(1)[0])


def test_untrusted_requests_may_not_set_a_budget(two_front_ends: Server) -> None:
    request = body(two_front_ends, examples(1)[0], **budget(8))
    status, answer = two_front_ends.post("/v1/chat/completions", request)
    assert status == 400
    assert "--autoprune-requests budget" in str(answer)


def test_both_front_ends_answer_alike(stock: Server, two_front_ends: Server) -> None:
    example = examples(1)[0]
    full = prompt_tokens(ask(stock, example))
    answers = [ask(two_front_ends, example) for _ in range(24)]
    assert {prompt_tokens(answer) for answer in answers} == {full - TOKENS + 16}
    assert len({text_of(answer) for answer in answers}) == 1
    served_by = re.findall(
        r"\((ApiServer_\d+) pid=\d+\).*Received request", two_front_ends.logged()
    )
    assert len(set(served_by)) == 2, "both processes should have answered"


def test_flags_are_in_a_help_group_of_their_own() -> None:
    import subprocess
    import sys
    from pathlib import Path

    vllm = Path(sys.executable).with_name("vllm")
    shown = subprocess.run(
        [vllm, "serve", "--help=AutoPrune"], capture_output=True, text=True, check=True
    ).stdout
    for flag in ("state", "budget", "text-tower", "feature-cache-gb"):
        assert f"--autoprune-{flag}" in shown
