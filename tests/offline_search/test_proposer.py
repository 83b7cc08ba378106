"""Prompts, and the endpoint that answers them."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.common.fake_server import Answer, Body, FakeServer
from offline_search.candidates import (
    PURPOSES,
    Expectation,
    base_state,
    minimal_state,
    paper_state,
)
from offline_search.components import JsonObject
from offline_search.history import History, Trial
from offline_search.prompt import (
    Messages,
    crossover_prompt,
    list_prompt,
    proposal_prompt,
    repair_list_prompt,
    summarize,
)
from offline_search.proposer import EndpointProposer, EndpointSettings, Reply
from offline_search.settings import Settings
from tests.offline_search.synthetic import completion, endpoint, error, trial
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.questions import Example
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

# ---- prompt ----

SETTINGS = Settings(budgets=(8,), base_policy="visionzip", proposer="scripted")
LISTS = SETTINGS.model_copy(update={"proposals_per_reply": 5})
ADVICE = re.compile(
    r"\b(safe|safer|helps?|should|prefer\w*|avoid|recommend\w*|pays?|usually|try|good|advice|"
    r"instead|better to|don't|not to repeat)\b",
    re.IGNORECASE,
)
EXAMPLES = tuple(
    Example(image=f"{number}.png", question=f"Q{number}?", answer="a", category=category)
    for number, category in enumerate(["text"] * 4 + ["relation"] * 12)
)
BASE = np.full(16, -3.0)
NOISE = np.tile([-0.2, 0.2], 8)


def history_of(*trials: Trial) -> History:
    return History(trial("0.0", BASE), list(trials), EXAMPLES)


@pytest.fixture
def history() -> History:
    paper, changed = paper_state(SETTINGS), paper_state(SETTINGS, quota=4)
    merge = paper.reassembly.model_copy(update={"strength": 1.0})
    other = paper.model_copy(update={"reassembly": merge})
    return history_of(
        trial("1.0", [-1.0] * 4 + [-2.0] * 12, paper),
        trial("2.0", [-1.1] * 4 + [-1.9] * 12, changed, parent="1.0"),
        trial("2.1", [-2.5] * 2, minimal_state(SETTINGS), "dropped"),
        trial("2.2", None, other, "same", same_as="1.0"),
        trial("2.3", [0.0] * 4 + [-1.0] * 12, other, parent="1.0"),
    )


def test_prompts_give_no_advice(history: History) -> None:
    """A proposer is told what it may write and what was measured, not what to conclude."""
    prompts = [
        proposal_prompt(SETTINGS, summarize(history), minimal_state(SETTINGS), 0, 5),
        crossover_prompt(SETTINGS, history.ranked()[:2]),
        list_prompt(LISTS, summarize(history), minimal_state(LISTS), 0, 5, 5, list(PURPOSES)),
    ]
    prompts.append(repair_list_prompt(prompts[-1], "reply", {2: ["is invalid"]}, 5))
    for messages in prompts:
        text = "\n".join(message["content"] for message in messages)
        assert not ADVICE.findall(text)


def test_the_summary_of_a_history(history: History) -> None:
    """Categories with the questions that lose most, trends, and each candidate with its changes."""
    text = summarize(history)
    lines = text.splitlines()
    assert lines[0] == "Base policy alone: -3000."
    assert "- relation: 12, -3000, -1000, 100%" in lines and "- text: 4, -3000, +0, 0%" in lines
    assert "Questions of relation that lose most: Q4?; Q5?" in lines
    assert "Scores by round, best and median: 1: -1750, -1750; 2: -750, -1700." in lines
    assert "- 2.3: -750; 1.0 with /reassembly/strength 0.0005 -> 1" in lines
    assert "At the upper end of its range in 2.3: reassembly/strength = 1." in lines
    assert "2.2 kept the same tokens as 1.0." in lines
    assert "- 2.0: -1700 (-950 ± " in text and "1.0 with /constraints/selector/q_e 2 -> 4" in text
    assert not any(line.startswith("- 1.0") for line in lines), "2.3 is the best of its structure"
    # A category that gains has a negative share of the loss.
    history.trials.append(trial("3.0", [1.0] * 4 + [-1.0] * 12, paper_state(SETTINGS)))
    text = summarize(history)
    assert "- relation: 12, -3000, -1000, 150%" in text and "- text: 4, -3000, +1000, -50%" in text
    # A candidate that was dropped names questions, not its answers at several budgets.
    dropped = history.trials[2]
    twice = dropped.result.model_copy(update={"examples": 4})
    history.trials[2:] = [dataclasses.replace(dropped, result=twice)]
    assert "2.1 was dropped after 2 questions at about " in summarize(history)


def test_the_summary_of_failures() -> None:
    failed = [trial(f"1.{n}", None, None, "invalid", reason="no such atom") for n in range(3)]
    assert "- no such atom (3 times)" in summarize(history_of(*failed))
    assert summarize(History(trial("0.0", BASE))) == "Base policy alone: -3000."


def test_base_policies_are_named_where_a_model_chooses_them(history: History) -> None:
    settings = SETTINGS.model_copy(update={"other_bases": ("dart", "trim")})
    dart = base_state(Settings(budgets=(8,), base_policy="dart")).base_policy
    other = history.trials[0].require_state().model_copy(update={"base_policy": dart})
    history.trials.append(trial("3.0", [0.0] * 16, other, parent="1.0"))
    history.names_bases = True
    messages = proposal_prompt(settings, summarize(history), other, 0, 5)
    for name in settings.bases:
        assert f"- {name}: {BASE_POLICIES[name].doc}" in messages[0]["content"]
    assert "1.0 with /base_policy/name visionzip -> dart\n" in messages[1]["content"]
    assert '"base_policy":{"name":"dart"}' in messages[1]["content"]
    plain = proposal_prompt(SETTINGS, "", other, 0, 5)[0]["content"]
    assert "base_policy" not in plain
    # A selector says what does not act on it.
    (line,) = (line for line in plain.splitlines() if "runtime_reference_anchor_pool" in line)
    assert "signals act by the pool, the kernel not" in line


def outcomes(*trials: Trial) -> dict[str, str]:
    """What the summary says of each hypothesis of the last round."""
    lines = summarize(history_of(*trials)).splitlines()
    return dict(line[2:].split(" => ", 1) for line in lines if " => " in line)


@pytest.mark.parametrize("parent", ["base", "1.0"])
@pytest.mark.parametrize(
    ("change", "expect", "outcome"),
    [
        (0.5, "higher", "-2500, +500 ± 52: confirmed"),
        (0.5, "same", "-2500, +500 ± 52: not confirmed"),
        (0.5, "lower", "-2500, +500 ± 52: not confirmed"),
        (0.1, "higher", "-2900, +100 ± 52: not confirmed"),
        (0.1, "same", "-2900, +100 ± 52: confirmed"),
        (-0.5, "lower", "-3500, -500 ± 52: confirmed"),
        (-0.1, "lower", "-3100, -100 ± 52: not confirmed"),
    ],
)
def test_a_hypothesis_is_confirmed_by_two_standard_errors(
    change: float, expect: Expectation, outcome: str, parent: str
) -> None:
    measured = [] if parent == "base" else [trial("1.0", BASE)]
    named = "" if parent == "base" else parent
    child = trial("2.0", BASE + change + NOISE, parent=named, expect=expect)
    line = f"2.0 (ablate of {parent}, expected {expect}): Why 2.0."
    assert outcomes(*measured, child) == {line: outcome}


def test_what_hypotheses_are_compared_on() -> None:
    lines = outcomes(
        trial("1.0", [-1.0] * 4 + [-9.0] * 12, expect="higher"),
        trial("2.0", -2.0 + NOISE[:4], None, "dropped", "1.0", expect="lower"),
        trial("2.1", None, None, "same", "1.0", same_as="1.0", expect="same"),
        trial("2.2", None, None, "same", same_as="base", expect="higher"),
        trial("2.3", None, None, "unsafe", reason="preserve_budget failed", expect="higher"),
        trial("2.4", None, None, "invalid", reason="x" * 500, expect="higher"),
        trial("2.5", [-2.0], None, "dropped", expect="same"),
        trial("2.6", BASE),
    )
    assert [line[:3] for line in lines] == [f"2.{n}" for n in range(6)], "last round only"
    assert list(lines.values()) == [
        "-2000, -1000 ± 115 on the first 4 questions: confirmed",
        "-7000, +0 ± 0: confirmed",
        "-3000, +0 ± 0: not confirmed",
        "not measured, unsafe: preserve_budget failed",
        f"not measured, invalid: {'x' * 100}",
        "-2000, +1000 ± inf on the first 1 questions: not confirmed",
    ]


# ---- proposer ----

HELLO: Messages = ({"role": "user", "content": "hello"},)
SCHEMA: JsonObject = {"type": "object"}
Answering = Callable[[Body, int], Answer]


def fast_settings(server: FakeServer, **changes: object) -> EndpointSettings:
    fast: dict[str, Any] = {"retries": 3, "timeout": 2.0, **changes}
    return EndpointSettings(f"{server.url}/v1", "m", **fast)


async def replies_to(settings: EndpointSettings, *seeds: int) -> list[Reply]:
    """Replies to one request after another."""
    async with EndpointProposer(settings) as proposer:
        return [await proposer.reply(HELLO, SCHEMA, seed) for seed in seeds or (7,)]


async def test_a_reply_has_text_and_cost() -> None:
    with endpoint(lambda body, n: completion("{}")) as server:
        changes = {"price": (1e6, 2e6), "temperature": 0.5, "reply_tokens": 99}
        (reply,) = await replies_to(fast_settings(server, **changes))
        await replies_to(fast_settings(server, seeded=False))
    assert (reply.text, reply.failure) == ("{}", "")
    assert (reply.cost.prompt_tokens, reply.cost.completion_tokens) == (10, 5)
    assert reply.cost.money == 20.0
    seeded, unseeded = server.requests
    assert seeded["response_format"]["json_schema"]["schema"] == SCHEMA
    assert (seeded["seed"], seeded["temperature"], seeded["max_tokens"]) == (7, 0.5, 99)
    assert "seed" not in unseeded


def fail_first(status: int, times: int = 1, **headers: str) -> Answering:
    """An endpoint whose first answers are errors."""
    return lambda body, n: completion("{}") if n >= times else error(status, "busy", **headers)


@pytest.mark.parametrize(
    ("answer", "sent", "failure"),
    [
        *((fail_first(status, 2, retry_after_ms="5"), 3, "") for status in (429, 500, 503, 408)),
        (fail_first(503, 99, retry_after_ms="5"), 4, "after at most 3 retries"),
        *((fail_first(status, 99), 1, "busy") for status in (401, 403, 404)),
        (fail_first(429, 99, retry_after="1000"), 0, "it asks to wait 1000 s"),
        (fail_first(400, 99), 2, "busy"),  # with the schema and without it
        (lambda body, n: completion(None, refusal="I will not."), 1, ""),
    ],
    ids=["429", "500", "503", "408", "always 503", "401", "403", "404", "long", "400", "refusal"],
)
async def test_what_may_pass_is_retried_and_what_remains_is_reported(
    answer: Answering, sent: int, failure: str
) -> None:
    with endpoint(answer) as server:
        (reply,) = await replies_to(fast_settings(server))
    assert failure in reply.failure and (reply.text is None) == bool(failure)
    assert len(server.requests) == sent or not sent
    assert reply.text in (None, "{}", "I will not."), "a refusal is a reply to repair"


def refusing(*names: str, status: int = 400, text: str = "{} is unsupported") -> Answering:
    """An endpoint that refuses each of these fields."""

    def answer(body: Body, number: int) -> Answer:
        refused = [name for name in names if name in body]
        return error(status, text.format(*refused), retry_after_ms="1") if refused else (
            completion("{}"))  # fmt: skip

    return answer


SENT = {"model", "messages", "max_tokens", "temperature", "seed", "response_format"}
RENAMED = SENT - {"max_tokens"} | {"max_completion_tokens"}
FORBIDDEN = json.dumps({"detail": [{"loc": ["body", "seed"], "msg": "extra"}]}).encode()


@pytest.mark.parametrize(
    ("answer", "fields", "refused"),
    [
        (lambda body, n: completion("{}"), SENT, []),
        (refusing("max_tokens", text="use 'max_completion_tokens', not '{}'"), RENAMED, [0]),
        (refusing("temperature"), SENT - {"temperature"}, [0]),
        (refusing("seed", status=422), SENT - {"seed"}, [0]),
        (refusing("seed", "temperature", "max_tokens"), RENAMED - {"temperature", "seed"}, [0] * 3),
        (refusing("response_format"), SENT - {"response_format"}, [1]),
        *((refusing("response_format", status=status, text="grammar"), SENT - {"response_format"},
           [1]) for status in (422, 500)),
        (lambda body, n: (422, FORBIDDEN, {}) if "seed" in body else completion("{}"),
         SENT - {"seed"}, [0]),
        # Not the field's fault: nothing is left out from then on.
        (lambda body, n: error(400, "seed 1") if body["seed"] == 1 else completion("{}"), SENT, []),
    ],
)  # fmt: skip
async def test_refused_fields_are_left_out_from_then_on(
    answer: Answering, fields: set[str], refused: list[int]
) -> None:
    lines = list[str]()
    with endpoint(answer) as server:
        async with EndpointProposer(fast_settings(server), lines.append) as proposer:
            await proposer.prepare()
            checked, length = len(lines), len(server.requests)
            await proposer.reply(HELLO, SCHEMA, 1)
            reply = await proposer.reply(HELLO, SCHEMA, 2)
    assert reply.text == "{}" and set(server.requests[-1]) == fields
    assert server.requests[-1].get("max_completion_tokens", 1024) == 1024
    assert checked == refused.count(0) == length - 1, "found by the first check"
    assert len(lines) == len(refused) and len({line.split()[3] for line in lines}) == len(lines)


async def test_options_are_part_of_every_request() -> None:
    with endpoint(lambda body, n: completion("{}")) as server:
        options = {"reasoning_effort": "high", "response_format": {"type": "json_object"}}
        async with EndpointProposer(fast_settings(server, options=options)) as proposer:
            await proposer.prepare()
            await proposer.reply(HELLO, SCHEMA, 1)
    assert [options.items() <= body.items() for body in server.requests] == [True, True]


THOUGHT = {"role": "assistant", "content": None, "reasoning": "{}"}
PARTS = [{"type": "thinking", "thinking": [{"type": "text", "text": "{}"}]},
         {"type": "text", "text": "[1, "}, {"type": "output_text", "text": "2]"}]  # fmt: skip
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{1}"}}


def choices(message: object, finish: object = "stop") -> Answer:
    return completion("", choices=[{"message": message, "finish_reason": finish}])


@pytest.mark.parametrize(
    ("answer", "text", "failure", "cost"),
    [
        (choices(THOUGHT), "<think>", "", (10, 5)),
        (choices(THOUGHT | {"reasoning": "", "reasoning_content": "{}"}), "<think>", "", (10, 5)),
        (choices(THOUGHT | {"content": "{2}"}), "{2}", "", (10, 5)),
        (choices({"content": PARTS}), "[1, 2]", "", (10, 5)),
        (choices({"content": None, "refusal": "No."}), "No.", "", (10, 5)),
        (choices({"content": None, "tool_calls": [CALL]}), "{1}", "", (10, 5)),
        (choices({"content": None}, "content_filter"), "", "", (10, 5)),
        (choices({}, None), "", "", (10, 5)),
        (completion("{}", usage=None), "{}", "", (0, 0)),
        (completion("{}", usage="many"), "{}", "", (0, 0)),
        (completion("{}", usage={"prompt_tokens": "7"}), "{}", "", (7, 0)),
        (completion("{}", usage={"prompt_tokens": None, "completion_tokens": 3}), "{}", "", (0, 3)),
        (completion("{}", usage={"prompt_tokens": "ten", "completion_tokens": -1}), "{}", "",
         (0, 0)),
        (completion("", choices=None, error={"message": "no credit"}), None, "no credit", (0, 0)),
        (completion("", choices=[]), None, '"choices": []', (0, 0)),
        (choices(None), None, "no chat completion", (0, 0)),
        (completion("", choices=["x"]), None, "no chat completion", (0, 0)),
        ((200, b"<html>sign in</html>", {}), None, "<html>sign in", (0, 0)),
        ((200, b'data: {"choices": []}\n\ndata: [DONE]\n\n', {"Content-Type": "text/event-stream"}),
         None, "data: {", (0, 0)),
        ((200, completion("{}")[1][:50], {}), None, "no chat completion", (0, 0)),
        ((200, completion("{}")[1], {"Content-Encoding": "gzip"}), None, "DecodingError", (0, 0)),
        ((307, b"", {"Location": "/v2"}), None, "status 307", (0, 0)),
    ],
)  # fmt: skip
async def test_what_a_response_holds(
    answer: Answer, text: str | None, failure: str, cost: tuple[int, int]
) -> None:
    with endpoint(lambda body, n: answer) as server:
        (reply,) = await replies_to(fast_settings(server, retries=0))
    assert reply.text == text and failure in reply.failure and "\n" not in reply.failure
    assert (reply.cost.prompt_tokens, reply.cost.completion_tokens) == cost and not reply.cut


@pytest.mark.parametrize(
    "answer",
    [
        (200, b"<html>busy</html>", {}),
        (200, b'{"choices": [', {}),
        (200, b"", {}),
        (200, b'{"choices": []}', {}),
        (200, b"null", {}),
        (200, b"[" * 20_000 + b"]" * 20_000, {}),
        (200, b'{"choices": [{"message": 3}]}', {}),
        (418, b"teapot", {}),
    ],
    ids=["no JSON", "cut", "empty", "no choices", "null", "deep", "message", "status"],
)
async def test_malformed_responses_are_failures(answer: Answer) -> None:
    with endpoint(lambda body, n: answer) as server:
        (reply,) = await replies_to(fast_settings(server, retries=1))
    assert reply.text in (None, "") and len(reply.failure) < 400


async def test_an_unreachable_or_silent_endpoint_fails() -> None:
    nowhere = EndpointSettings("http://127.0.0.1:9/v1", "m", retries=1)
    (reply,) = await replies_to(nowhere)
    assert reply.text is None and "after at most 1 retries" in reply.failure
    with pytest.raises(ConfigError, match="does not answer"):
        await EndpointProposer(nowhere).prepare()

    def sleep(body: Body, number: int) -> Answer:
        time.sleep(0.5)
        return completion("{}")

    with endpoint(sleep) as server:
        (reply,) = await replies_to(fast_settings(server, retries=0, timeout=0.2))
    assert reply.text is None and "imeout" in reply.failure


@pytest.mark.parametrize(
    ("answer", "where"),
    [
        (error(401, "bad key"), "--proposer-key-env"),
        (error(403, "not yours"), "--proposer-key-env"),
        (error(404, "no such model"), "--proposer-model"),
        (error(400, "what?"), "--proposer-url"),
        (error(402, "no money"), "--proposer-url"),
        ((307, b"", {"Location": "/v2"}), "--proposer-url"),
        ((429, b'{"error": {"code": "insufficient_quota"}}', {}), "--proposer-url"),
        (completion("", choices=None, error={"message": "no credit"}), "--proposer-url"),
        ((200, b"<html>sign in</html>", {}), "--proposer-url"),
        (completion("yes"), ""),
        (error(429), ""),  # it is busy now
        (error(503), ""),
    ],
)
async def test_a_wrong_key_or_model_is_found_before_the_search(answer: Answer, where: str) -> None:
    with endpoint(lambda body, n: answer) as server:
        async with EndpointProposer(fast_settings(server)) as proposer:
            if not where:
                await proposer.prepare()
                return
            with pytest.raises(ConfigError) as caught:
                await proposer.prepare()
    (problem,) = caught.value.problems
    assert problem.where == where and problem.what and problem.fix
    assert where != "--proposer-model" or problem.fix.endswith(": m")
