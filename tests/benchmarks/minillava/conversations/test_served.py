"""Requests of a chat client: the turns so far, and what each asks of the plugin."""

from __future__ import annotations

import pytest

from benchmarks.common import BenchmarkError
from benchmarks.common.client import Client
from benchmarks.common.fake_server import MODEL, Body, Reply, fake_server
from benchmarks.minillava.conversations.arms import FULL, Arm
from benchmarks.minillava.conversations.draw import Conversation, draw_conversations
from benchmarks.minillava.conversations.served import ask_arm, ask_turns

RECALL = Arm("minillava-split", 8, 4)


@pytest.fixture(scope="module")
def conversation() -> Conversation:
    return draw_conversations("validation", 1)[0]


def test_a_request_has_all_turns_before_it_and_one_image(conversation: Conversation) -> None:
    with fake_server(Reply(first=0, gaps=(0,))) as server:
        ask_turns(Client(server.url), MODEL, conversation, RECALL)

    assert len(server.seen) == 4
    for turn, body in enumerate(server.seen):
        users, answers = body["messages"][::2], body["messages"][1::2]
        assert len(body["messages"]) == 2 * turn + 1
        assert [user["content"][-1]["text"] for user in users] == [
            one.question for one in conversation[: turn + 1]
        ]
        assert [answer["content"] for answer in answers] == [
            one.answer for one in conversation[:turn]
        ]
        images = [part for user in users for part in user["content"] if "image_url" in part]
        assert len(images) == 1 and "image_url" in users[0]["content"][0]
        assert body["temperature"] == 0


@pytest.mark.parametrize(
    ("arm", "fields"),
    [
        (FULL, {"enabled": False}),
        (Arm("minillava", 16), {"state": "minillava", "budget": 16, "recall": 0}),
        (RECALL, {"state": "minillava-split", "budget": 8, "recall": 4}),
    ],
)
def test_every_request_names_state_budget_and_recall(
    conversation: Conversation, arm: Arm, fields: dict[str, object]
) -> None:
    with fake_server(Reply(first=0, gaps=(0,))) as server:
        ask_turns(Client(server.url), MODEL, conversation, arm)

    assert [body["mm_processor_kwargs"]["autoprune"] for body in server.seen] == [fields] * 4


def test_answers_are_graded_and_prompts_counted(conversation: Conversation) -> None:
    def reply(body: Body) -> Reply:
        turn = len(body["messages"]) // 2
        text = f" {conversation[turn].answer}" if turn != 1 else " nothing"
        usage = {"prompt_tokens": 30 + turn, "prompt_tokens_details": {"cached_tokens": turn}}
        return Reply(deltas=(text,), first=0, gaps=(0,), usage=usage)

    with fake_server(reply) as server:
        steps: list[None] = []
        answers = ask_arm(
            Client(server.url), MODEL, [conversation] * 3, RECALL, 2, lambda: steps.append(None)
        )

    assert len(steps) == len(answers) == 3
    assert answers[0].right == (True, False, True, True)
    assert answers[0].prompt_tokens == (30, 31, 32, 33)
    assert answers[0].cached_tokens == (0, 1, 2, 3)


def test_a_refused_request_names_arm_and_turn(conversation: Conversation) -> None:
    refusal = Reply(status=400, error="recall: unknown field")
    with (
        fake_server(refusal) as server,
        pytest.raises(BenchmarkError, match=r"minillava-split 8 recall 4 by question, turn 1.*400"),
    ):
        ask_turns(Client(server.url), MODEL, conversation, RECALL)
