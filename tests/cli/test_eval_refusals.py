"""What eval refuses to measure: states, servers and options."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.benchmarks.accuracy.minillava_server import answering, arm, asked, reply
from tests.cli.evaluations import CASES, Call
from tests.fake_server import Answer, Body
from tests.offline_search.synthetic import completion, endpoint, error
from tests.tables import parametrize_from_file
from tests.videos import write_video
from vllm_autoprune import load_state
from vllm_autoprune.cli.main import main
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

Answering = Callable[[Body, int], Answer]


@pytest.mark.parametrize(
    ("refused", "refusal", "message"),
    [
        # Of vLLM, whose param is the modality.
        (("full",), error(400, "At most 0", "video"),
         ": takes no video (status 400: At most 0) -> serve a model of whose videos"),
        (("vcast", "norm"), error(400, "all kept -> drop it", "a/video_budget#whole_video"),
         "refuses every state: status 400: all kept -> serve a model of whose videos"),
        # Of a plugin without kinds.
        (("vcast", "norm"), error(400, "all kept"),
         "all kept -> name one that prunes videos, such as --state vcast, or serve a model"),
        # It takes neither field of such requests, and names the first.
        (("full",), error(400, "no", "mm_processor_kwargs"),
         "--autoprune-requests states --trust-request-mm-kwargs"),
    ],
)  # fmt: skip
def test_a_server_of_whose_videos_no_token_is_chosen_is_refused(
    call: Call, refused: tuple[str, ...], refusal: Answer, message: str
) -> None:
    write_video(call.folder / "a.mp4", 12)
    line = {"question": "Which colour?", "answer": "red", "video": "a.mp4"}
    (call.folder / "questions.jsonl").write_text(json.dumps(line))

    def answer(body: Body, number: int) -> Answer:
        return refusal if arm(body) in refused else reply(body)

    words = ("--frames", "8", "--budgets", "1/4", "--state", "vcast")
    with endpoint(answer) as server:
        assert call(server.url, *words) == 1
    assert message in call.printed().err


@pytest.mark.parametrize(
    ("said", "labelled", "message"),
    [
        (
            completion(""),
            False,
            "gives no answer whose tokens can be scored, such as '' -> ask",
        ),
        (
            completion("1"),
            True,
            "is right even with all tokens, of the 4 asked first -> ",
        ),
        (error(400, "no logprobs"), False, "status 400: no logprobs -> serve it with"),
    ],
)
def test_what_no_score_can_come_of_is_refused_before_the_long_run(
    call: Call, said: Answer, labelled: bool, message: str
) -> None:
    def answer(body: Body, number: int) -> Answer:
        if len(body["messages"]) > 1 or body["max_tokens"] == 1:
            return reply(body)
        return said

    if not labelled:
        call.drop_answers()
    with endpoint(answer) as server:
        assert call(server.url, "--reference", "unpruned") == 1
        assert len(server.requests) <= len(CASES) + 8
        assert message in call.printed().err
        # Nothing is left to resume.
        assert not (call.folder / "out" / "samples.jsonl").exists()


def refusing(policy: str) -> Answering:
    """A server that refuses the states upon a base policy."""
    return lambda body, number: (
        error(400, "needs inputs that this model has not")
        if f'"base_policy": {{"name": "{policy}"' in json.dumps(body)
        else answering(body, number)
    )


def test_every_base_policy_is_measured_on_any_server(call: Call) -> None:
    with endpoint(refusing("fastv")) as server:
        assert call(server.url, "--state", "all") == 0
    page = call.printed().out
    assert "| fastv | 8 | status 400: needs inputs that this model has not |" in page
    for policy in BASE_POLICIES.keys() - {"fastv"}:
        state = "autoprune" if policy == "cdpruner" else f"autoprune-on-{policy}"
        assert f"| {policy} | 100.0 |" in page and f"| {state} | 100.0 |" in page
    with endpoint(
        answering
    ) as server:  # another start of it may serve what one refused
        assert call(server.url, "--state", "all", "--resume") == 0
        assert set(Counter(map(arm, asked(server.requests)))) == {
            "fastv",
            "autoprune-on-fastv",
        }
    assert "| fastv | 100.0 |" in call.printed().out


def test_a_server_that_does_not_answer_is_named(call: Call) -> None:
    assert call("http://127.0.0.1:9") == 1
    assert "does not answer" in call.printed().err


def test_data_is_refused_before_the_server_is_asked(call: Call) -> None:
    url = "http://127.0.0.1:9"
    path = call.folder / "questions.jsonl"
    path.write_text('{"image": "none.png", "question": "?", "answer": "x"}')
    assert call.own(url) == 1
    assert f"{path}:1: image 'none.png': cannot be read" in call.printed().err
    words = ["--suite", "lmms:x", "--served-name", "m", "--server-url", url]
    assert main(["eval", *words]) == 1
    assert "does not know x -> use: paper" in call.printed().err


def test_a_server_that_cannot_be_measured_leaves_nothing_to_resume(call: Call) -> None:
    with endpoint(refusing("cdpruner")) as server:
        assert call(server.url) == 1
        assert not asked(server.requests)
    message = call.printed().err
    reason = "status 400: needs inputs that this model has not"
    assert f"refuses every state: {reason} -> " in message
    assert "-> name states that its model serves" in message
    with endpoint(answering) as server:
        assert call(server.url, "--served-name", "llava") == 1
        assert "serves m -> serve llava" in call.printed().err
        assert call(server.url) == 0


@parametrize_from_file("param", "message")
def test_why_every_state_is_refused_is_read_of_a_field_and_not_of_the_message(
    call: Call, param: str | None, message: str
) -> None:
    def answer(body: Body, number: int) -> Answer:
        if arm(body) == "full":
            return reply(body)
        return error(400, "no -> --autoprune-requests", param)

    with endpoint(answer) as server:
        assert call(server.url) == 1
    assert f"refuses every state{message}" in call.printed().err


SERVES: dict[str, Any] = {
    "state": "autoprune",
    "digest": load_state("autoprune").digest,
    "requests": "any state",
    "allows": {"level": "states"},
}


START = "-> start it with --autoprune-state NAME --autoprune-requests states"


@pytest.mark.parametrize(
    ("page", "param", "message"),
    [
        ({"state": None}, "", f"serves no state {START}"),
        ({**SERVES, "requests": "their budget", "allows": {"level": "budget"}},
         "", f"lets requests set their budget {START}"),
        # Of vLLM, without --trust-request-mm-kwargs.
        (None, "mm_processor_kwargs", f"(it takes no mm_processor_kwargs of theirs) {START}"),
        (None, "media_io_kwargs", "media_io_kwargs of theirs) -> start it with "),
        (None, "a/budget#not_allowed", f"lets requests choose nothing (status 400: no) {START}"),
    ],
)  # fmt: skip
def test_a_server_whose_requests_may_not_choose_is_refused_by_the_flag_to_give(
    call: Call, page: object, param: str, message: str
) -> None:
    refusal = error(400, "no -> serve with B", param)
    with endpoint(lambda body, number: refusal) as server:
        server.pages["/v1/autoprune"] = (
            None if page is None else (200, json.dumps(page).encode(), {})
        )
        assert call(server.url) == 1
        assert len(server.requests) == (page is None)
    printed = call.printed().err
    assert message in printed and printed.count("\n") == 1
    assert ("--trust" in printed) == (param == "media_io_kwargs")


@pytest.mark.parametrize(
    ("page", "cell", "count"),
    [
        (json.dumps(SERVES), "| autoprune (the server's own) |", 1),
        (json.dumps({**SERVES, "state": "mine", "digest": "0"}),
         "| mine (the server's own) | 0 | was not asked -> name it with --state mine, or", 1),
        ("<html>here is a gateway</html>", "(the server's own)", 0),
        ('{"allows": {"level": 3}}', "(the server's own)", 0),
    ],
)  # fmt: skip
def test_the_servers_own_state_is_marked_or_said_to_be_missing(
    call: Call, page: str, cell: str, count: int
) -> None:
    with endpoint(answering) as server:
        server.pages["/v1/autoprune"] = (200, page.encode(), {})
        assert call(server.url) == 0
        assert call("http://h:1", "--resume") == 0  # nothing is left to ask
    printed = call.printed()
    assert printed.out.count(cell) == 2 * count
    assert ("no row is marked as its own state -> start it with " in printed.err) == (
        count == 0
    )


@pytest.mark.parametrize(
    ("page", "words", "message"),
    [
        ({"state": ""}, (), "does not say which state it serves -> name one, or start it with"),
        ({"state": "mine"}, ("--cells", "flat"), "mine, which http://"),
        ({"state": None}, (), "serves no state -> start it with --autoprune-state NAME"),
    ],
)  # fmt: skip
def test_without_a_name_a_server_has_to_say_what_it_serves(
    call: Call, page: dict[str, Any], words: tuple[str, ...], message: str
) -> None:
    with endpoint(answering) as server:
        server.pages["/v1/autoprune"] = (200, json.dumps(page).encode(), {})
        assert call.own(server.url, *words) == 1
    assert message in call.printed().err


@parametrize_from_file("call", "message")
def test_a_run_that_cannot_start_says_why(
    call: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *call.split()]) == 1
    assert message in capsys.readouterr().err
