from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.serving.http import agent_chat, agent_messages, agent_responses
from vllm_autoprune.serving.api.instruction import (
    extract_details,
    extract_instructions,
    extract_prompt_instruction,
    extract_turns,
    find_question_turns,
)

URL: dict[str, Any] = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
IMAGES: list[dict[str, Any]] = [
    URL,
    {**URL, "uuid": "a"},
    {"type": "image_url", "image_url": None, "uuid": "a"},
    {"type": "image_pil", "image_pil": object()},
    {"type": "input_image", "image_url": "http://x/y.png"},
    {"type": "image_embeds", "image_embeds": "AA=="},
    {"image_url": "http://x/y.png"},
    {"image_pil": None, "uuid": "a"},
]


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def user(*parts: object) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize("image", IMAGES)
def test_every_way_to_send_an_image(image: dict[str, Any]) -> None:
    assert extract_instructions([user(image, text("what?"))]) == ["what?"]


@pytest.mark.parametrize(
    "said",
    [
        text("what?"),
        {"type": "input_text", "text": "what?"},
        {"type": "output_text", "text": "what?"},
        {"text": "what?"},
        "what?",
    ],
)
def test_every_way_to_send_a_text(said: object) -> None:
    assert extract_instructions([user(URL, said)]) == ["what?"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "audio_url", "audio_url": {"url": "http://x/y.wav"}},
        {"type": "video_url", "video_url": {"url": "http://x/y.mp4"}},
        {"type": "refusal", "refusal": "no"},
        {"type": "text", "text": None},
        {"type": "text"},
        {},
        None,
        3,
    ],
)
def test_other_parts_are_neither_image_nor_text(part: object) -> None:
    assert extract_instructions([user(part, text("what?"))]) == []
    assert extract_instructions([user(part, URL, text("what?"))]) == ["what?"]


def test_text_before_and_after_the_image_belongs_to_it() -> None:
    assert extract_instructions([user(text(" look: "), URL, text("what?\n"))]) == ["look: \nwhat?"]


def test_several_images_of_a_turn_share_its_text() -> None:
    assert extract_instructions([user(URL, text("same?"), URL)]) == ["same?", "same?"]


def test_images_of_several_turns_have_each_their_own() -> None:
    talk = [user(URL, text("first")), {"role": "assistant", "content": "a"}, user(text("2nd"), URL)]
    assert extract_instructions(talk) == ["first", "2nd"]


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": "It is red."},
        {"role": "user", "content": "And now?"},
        user(text("And now?")),
        {"role": "assistant", "content": None, "tool_calls": []},
    ],
)
def test_other_turns_change_nothing(turn: dict[str, Any]) -> None:
    talk = [user(URL, text("what?"))]
    assert extract_instructions([turn, *talk]) == extract_instructions([*talk, turn]) == ["what?"]


def test_a_system_prompt_is_not_part_of_it() -> None:
    for content in ("Be brief.", [text("Be brief.")]):
        talk = [{"role": "system", "content": content}, user(URL, text("what?"))]
        assert extract_instructions(talk) == ["what?"]


def test_an_image_without_text_has_an_empty_instruction() -> None:
    assert (
        extract_instructions([user(URL)]) == extract_instructions([user(URL, text("  "))]) == [""]
    )


def said(role: str, content: object, **more: object) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TASK = said("user", "Buy a lamp.")
LONG = "once upon a time " * 500


@pytest.mark.parametrize(
    ("before", "read"),
    [
        ([TASK], "Buy a lamp."),
        ([TASK, said("assistant", "I click.")], "Buy a lamp.\nI click."),
        (
            [TASK, said("assistant", [text("I click.")]), said("tool", "Done.")],
            "Buy a lamp.\nDone.",
        ),
        ([TASK, said("assistant", None, tool_calls=[{"id": "c"}])], "Buy a lamp."),
        ([TASK, said("assistant", "", reasoning="Hm."), said("tool", "")], "Buy a lamp."),
        ([TASK, said("assistant", "I click."), said("user", "Red.")], "Buy a lamp.\nRed."),
        ([user(URL, text("what?")), said("assistant", "A shop.")], "what?\nA shop."),
        ([said("system", "Read totals.")], "Read totals."),
        ([said("system", "x-anthropic-billing-header: cch=1\nRead totals.")], "Read totals."),
        ([said("system", "x-anthropic-billing-header: cch=1")], ""),
        ([said("system", "Be brief."), TASK, said("assistant", "I.")], "Buy a lamp.\nI."),
        ([], ""),
    ],
    ids=str,
)
def test_an_image_without_text_has_the_task_and_what_was_said_last(
    before: list[dict[str, Any]], read: str
) -> None:
    shots = [user(URL, URL), said("tool", [URL])]
    for shot in shots:
        talk = [*before, shot, said("assistant", "And now?"), user(text("Blue?"))]
        count = sum(part is URL for part in shot["content"])
        assert extract_instructions(talk)[-count:] == [read] * count
        assert extract_turns(talk)[-count:] == [None] * count


def test_what_a_tool_says_beside_its_image_is_no_question() -> None:
    talk = [TASK, said("assistant", "I click."), said("tool", [text("Done."), URL])]
    assert extract_instructions(talk) == ["Buy a lamp.\nDone."]
    assert extract_turns(talk) == [None]


def test_neither_a_long_task_nor_a_long_page_hides_the_other() -> None:
    task, page = LONG + "Buy a lamp.", LONG + "Lamps: 3"
    (read,) = extract_instructions([said("user", task), said("tool", page), user(URL)])
    assert "Buy a lamp.\n" in read and read.endswith("Lamps: 3")
    assert len(read) < 4 * 256


def test_images_of_one_message_are_of_one_turn() -> None:
    talk = [user(URL, text("what?"), URL), said("assistant", "a"), user(URL, text("what?"))]
    assert extract_turns(talk) == [0, 0, 2]


@pytest.mark.parametrize(
    ("before", "texts", "turns", "expected"),
    [
        (["USER:", "what? ASSISTANT: a USER:"], ["what?"] * 2, [0, 2], [0, 1]),
        (["USER:", "what? ASSISTANT: a USER:"], ["what?"] * 2, None, [0, 1]),
        (["USER:", "\n"], ["what?"] * 2, [0, 0], [0, 0]),
        (["USER:", "\n"], ["what?"] * 2, None, [0, 0]),
        (["USER:", "\n"], ["what?", "who?"], None, [0, 1]),
        (["USER: what?", ""], ["what?"] * 2, [0, 0], [None, None]),
        (["USER: what?\n", ""], ["what?"] * 2, None, [None, None]),
        (["USER:", "\nwhat?"], ["what?"] * 2, [0, 0], [0, None]),
        (["USER: one two"], ["one\ntwo"], [0], [None]),  # parts joined by the template
        (["USER: what? ASSISTANT: a USER:"], ["what?"], [2], [0]),  # asked earlier as well
        (["Say what you see. USER:"], ["what"], [1], [0]),
        (["USER: task USER:", ""], ["task"] * 2, [None, None], [None, None]),
        (["USER:"], [""], None, [None]),
    ],
)
def test_turns_end_where_a_question_does(
    before: list[str], texts: list[str], turns: list[int | None] | None, expected: list[int | None]
) -> None:
    assert find_question_turns(before, texts, turns) == expected


def test_a_conversation_without_images_has_none() -> None:
    assert extract_instructions([{"role": "user", "content": "hi"}, user(text("hi"))]) == []
    assert extract_instructions([]) == []
    assert extract_instructions(["not a message", None]) == []


def image(detail: object = "none given", **more: object) -> dict[str, Any]:
    level = {} if detail == "none given" else {"detail": detail}
    return {"type": "image_url", "image_url": {"url": "http://x/y.png", **level}, **more}


@pytest.mark.parametrize("detail", ["low", "high"])
def test_every_way_to_give_a_detail(detail: str) -> None:
    for part in (
        image(detail),
        image(detail, uuid="a"),
        {"type": "image_url", "image_url": {"detail": detail}, "uuid": "a"},
        {"type": "image_url", "image_url": None, "uuid": "a", "detail": detail},
        {"type": "input_image", "image_url": "http://x/y.png", "detail": detail},
        {"type": "image_pil", "image_pil": object(), "detail": detail},
    ):
        assert extract_details([user(part, text("what?"))]) == [detail]


@pytest.mark.parametrize("detail", ["none given", "auto", "original", "LOW", "", None, 1, {}, []])
def test_other_details_mean_the_budget_of_the_server(detail: object) -> None:
    assert extract_details([user(image(detail))]) == [None]


@pytest.mark.parametrize("part", IMAGES)
def test_every_image_has_a_detail(part: dict[str, Any]) -> None:
    talk = [user(text("what?"), part, image("low")), {"role": "assistant", "content": "It is red."}]
    assert extract_details(talk) == [None, "low"]
    assert len(extract_instructions(talk)) == 2


@pytest.mark.parametrize(
    "turns",
    [
        [user(text("And now?"))],
        [user(image("high"), text("And here?"))],
        [user(image(), text("And here?")), user(image("low"))],
    ],
    ids=["text", "image", "images"],
)
def test_appended_turns_keep_what_earlier_images_have(turns: list[dict[str, Any]]) -> None:
    talk = [user(image("low"), image("high"), image(), text("Which?"))]
    longer = [*talk, {"role": "assistant", "content": "The first."}, *turns]
    assert extract_details(longer)[:3] == extract_details(talk) == ["low", "high", None]
    assert extract_instructions(longer)[:3] == extract_instructions(talk) == ["Which?"] * 3


@pytest.mark.compat
@pytest.mark.parametrize("detail", ["low", "high"])
def test_vllm_hands_on_the_detail_of_chat_completions_and_responses(detail: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages

    talk = [user(image(detail), text("what?")), {"role": "assistant", "content": "red"}]
    chat = ChatCompletionRequest.model_validate({"messages": [*talk, user(image("auto"))]})
    assert extract_details(chat.messages) == [detail, None]
    sent = {"type": "input_image", "image_url": "http://x/y.png"}
    said = [user({"type": "input_text", "text": "what?"}, {**sent, "detail": detail}), user(sent)]
    responses = ResponsesRequest.model_validate({"input": said})
    messages = construct_input_messages(request_input=responses.input)
    assert extract_details(messages) == [detail, None]


def of_chat(turns: int) -> list[Any]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest.model_validate(agent_chat("Why?", ["x"] * turns)).messages


def of_responses(turns: int) -> list[Any]:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages

    sent = ResponsesRequest.model_validate(agent_responses("Why?", ["x"] * turns))
    return construct_input_messages(request_input=sent.input)


def of_messages(turns: int) -> list[Any]:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    body = {"model": "m", **agent_messages("Why?", ["data:image/png;base64,x"] * turns)}
    sent = AnthropicMessagesRequest.model_validate(body)
    return AnthropicServingMessages.to_chat_completion_request(sent).messages


@pytest.mark.compat
@pytest.mark.parametrize(
    ("converted", "said"),
    [(of_chat, "I look {}."), (of_responses, "I look {}."), (of_messages, "Done.")],
)
def test_screenshots_of_an_agent_have_its_task_by_every_endpoint(
    converted: Callable[[int], list[Any]], said: str
) -> None:
    whole = [f"Why?\n{said.format(i)}" for i in range(20)]
    for turns in range(21):
        assert extract_instructions(converted(turns)) == whole[:turns]


IMAGE = 9
WORDS = {1: "USER:", 2: "ASSISTANT:", 3: "what?", 4: "where?", IMAGE: "<image>"}


def decode(ids: Sequence[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


@pytest.mark.parametrize(
    ("ids", "suffix", "expected"),
    [
        ([1, IMAGE, 3, 2], " ASSISTANT:", "what?"),
        ([1, IMAGE, 3, 2], "", "what? ASSISTANT:"),
        ([1, IMAGE, 3], " ASSISTANT:", "what?"),
        ([1, 3, IMAGE, 4, 2], " ASSISTANT:", "where?"),
        ([1, IMAGE, 3, IMAGE, 4, 2], " ASSISTANT:", "where?"),
        ([1, IMAGE, 3, 2, 1, 4, 2], " ASSISTANT:", "what? ASSISTANT: USER: where?"),
        ([1, IMAGE, 2], " ASSISTANT:", ""),
        ([IMAGE], " ASSISTANT:", ""),
        ([1, 3, 2], " ASSISTANT:", "USER: what?"),
        ([], " ASSISTANT:", ""),
    ],
)
def test_the_instruction_of_a_prompt(ids: list[int], suffix: str, expected: str) -> None:
    assert extract_prompt_instruction(ids, IMAGE, decode, suffix) == expected
