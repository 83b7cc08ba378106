from __future__ import annotations

import re
from collections import Counter

from benchmarks.common.fake_server import Body, Reply, fake_server
from benchmarks.demo.speed import QUESTIONS, Plan, time_requests
from tests.benchmarks.demo.sample_replies import pruning

PLAN = Plan(alone=2, together=8, images=2)


def image_of(body: Body) -> str:
    return str(body["messages"][0]["content"][0]["image_url"]["url"])


def test_every_arm_sends_the_same_requests_and_shares_no_image() -> None:
    def reply(body: Body) -> Reply:
        return Reply(("w1",), first=0.02, usage={"prompt_tokens": 600})

    steps: list[int] = []
    with fake_server(reply, model=None) as server:
        row = time_requests(server.url, {}, PLAN, 100, 0, lambda: steps.append(1))
        first = list(server.seen)
        time_requests(server.url, {"keep": "resized"}, PLAN, 100, 1000, lambda: steps.append(1))
        second = server.seen[len(first) :]
    assert len(first) == len(second) == PLAN.requests == len(steps) // 2
    assert (row.prompt_tokens, row.kv_bytes) == (600, 60_000)
    assert row.alone.count == 2 and row.together.count == 8 and len(row.questions) == QUESTIONS
    assert row.alone.median >= 20
    assert {pruning(body).get("keep") for body in second} == {"resized"}
    assert not {image_of(body) for body in first} & {image_of(body) for body in second}


def test_only_the_images_of_several_questions_are_sent_again() -> None:
    with fake_server(lambda body: Reply(("w1",)), model=None) as server:
        time_requests(server.url, {}, PLAN, 100, 0, lambda: None)
    times_sent = Counter(Counter(image_of(body) for body in server.seen).values())
    assert times_sent == {1: 2 + 2 + 8, QUESTIONS: 2}
    texts = [re.findall(r"w\d+", str(b["messages"][0]["content"][1]["text"])) for b in server.seen]
    assert len({tuple(text) for text in texts}) == len(texts)
