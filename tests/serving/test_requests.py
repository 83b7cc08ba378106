"""States and budgets in requests: tokens of a server of that state, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.server import Server
from tests.serving.engine import examples
from tests.serving.http import ask, body, prompt_tokens, text_of
from tests.serving.interleave import TILED
from tests.serving.paths import TOKENS
from tests.serving.runners import Runner
from tests.tpdsl.samples import edited, sample

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(500),
    pytest.mark.scenarios("request_states", "every_kind", "mixed_tiles"),
]


def entry(**fields: object) -> dict[str, object]:
    return {"mm_processor_kwargs": {"autoprune": fields}}


def refusal(server: Server, **fields: object) -> str:
    sent = body(server, examples(1)[0], **entry(**fields))
    status, answer = server.post("/v1/chat/completions", sent)
    assert status == 400, answer
    return str(answer)


# ---- in a local engine ----


@pytest.mark.parametrize("how", ["together", "again"])
def test_a_state_of_a_request_is_served_as_the_state_of_a_server(runner: Runner, how: str) -> None:
    report = runner.run("request_states")
    assert report["native"].keys() == report[how].keys()
    for key, native in report["native"].items():
        answer = report[how][key]
        assert (answer["text"], answer["prompt_tokens"]) == (
            native["text"],
            native["prompt_tokens"],
        ), key
        assert answer["logprob"] == pytest.approx(native["logprob"], abs=3e-2), key


def test_states_and_budgets_share_a_step(runner: Runner) -> None:
    report = runner.run("request_states")
    assert max(len(set(step)) for step in report["batches"]) == 2
    assert max(map(len, report["batches"])) >= 6


def test_prefix_cache_is_not_shared_between_states(runner: Runner) -> None:
    first, again, other = runner.run("request_states")["cached"]
    assert (first, other) == (0, 0)
    assert again >= 32


def test_each_form_of_a_budget_for_two_images(runner: Runner) -> None:
    counts: dict[str, Any] = runner.run("request_states")["images"]
    words = counts["8"] - 16
    assert counts["[8, 20]"] == words + 28
    assert counts['{"shared": 21}'] == words + 21
    assert counts['{"shared": 1000}'] == words + 2 * TOKENS


def test_mixed_concurrent_requests_equal_single_ones(runner: Runner) -> None:
    report = runner.run("every_kind")
    assert (report["apart"], report["kept_apart"]) == ([], [])
    assert report["at_once"] > 1
    assert report["images_compared"] > 30


@pytest.mark.parametrize("backbone", TILED)
def test_images_of_mixed_tiles_keep_what_they_keep_alone(runner: Runner, backbone: str) -> None:
    report = runner.run("mixed_tiles")[backbone]
    assert (report["apart"], report["kept_apart"]) == ([], [])
    assert report["at_once"] > 1
    assert report["images_compared"] > 10


# ---- over HTTP ----


def test_states_over_http_without_trusting_other_kwargs(pruned: Server) -> None:
    example = examples(1)[0]
    full = prompt_tokens(ask(pruned, example, **entry(enabled=False)))
    for policy in ("visionzip", "dart", edited(sample(), {"/constraints/selector/q_e": 3})):
        answer = ask(pruned, example, **entry(state=policy, budget=20))
        assert prompt_tokens(answer) == full - TOKENS + 20
        assert text_of(answer)
    kwargs = {"autoprune": {"budget": 8}, "size": {"height": 10_000, "width": 10_000}}
    sent = body(pruned, example, mm_processor_kwargs=kwargs)
    status, answer = pruned.post("/v1/chat/completions", sent)
    assert status == 400
    assert "trust-request-mm-kwargs" in str(answer)


def test_no_pruning_is_the_stock_answer(stock: Server, pruned: Server) -> None:
    example = examples(1)[1]
    full = ask(stock, example, logprobs=True)
    same = ask(pruned, example, logprobs=True, **entry(enabled=False))
    assert same["choices"][0]["logprobs"] == full["choices"][0]["logprobs"]
    assert same["usage"]["prompt_tokens"] == full["usage"]["prompt_tokens"]


def test_refusal_has_pointer_and_fix(pruned: Server) -> None:
    assert "did you mean 'visionzip'" in refusal(pruned, state="visionzi")
    broken = edited(sample(), {"/scoring/fusion/atom": "weighted_produkt_fusion"})
    message = refusal(pruned, state=broken)
    assert "mm_processor_kwargs/autoprune/state/scoring/fusion/atom" in message
    assert "2 budgets for 1 images" in refusal(pruned, budget=[8, 8])
    huge = edited(sample(), {"/provenance": {"notes": "n" * 10_000_000}})
    assert "a request may bring" in refusal(pruned, state=huge)


def test_fields_in_the_wrong_place_are_answered(pruned: Server) -> None:
    example = examples(1)[0]
    for misplaced in ({"autoprune": {"budget": 8}}, {"mm_processor_kwargs": {"budget": 8}}):
        status, answer = pruned.post("/v1/chat/completions", body(pruned, example, **misplaced))
        assert status == 400, answer
        assert "one level down" in str(answer) or "at the top of a request" in str(answer)
