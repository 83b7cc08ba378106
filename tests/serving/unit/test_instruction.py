"""The instruction of an image: read from messages and prompts, and tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.serving.engine import CLIP, LLAVA
from vllm_autoprune.serving.api.instruction import (
    MAX_CHARACTERS,
    InstructionTokenizer,
    extract_details,
    extract_instructions,
    extract_prompt_instruction,
    extract_turns,
    find_question_turns,
    split_content_words,
    truncate_clip_ids,
    truncate_text,
)
from vllm_autoprune.serving.plan import LANGUAGE_IDS, RELEVANCE_IDS, ItemPlan
from vllm_autoprune.tpdsl.tokens import Need

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


# ---- tokens of an instruction ----

IMAGE_ID = 4


def info() -> Any:
    """A model whose tokenizer gives each letter a token."""

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) if letter != "#" else IMAGE_ID for letter in text]

    return SimpleNamespace(
        get_tokenizer=lambda: SimpleNamespace(encode=encode),
    )


def test_instructions_are_given_only_to_states_that_read_them() -> None:
    words = InstructionTokenizer(info(), None, IMAGE_ID)
    assert words.tokenize("ab", ()) == ((), ())
    assert words.tokenize("ab", {"cls_attention", "tower", "next_layer"}) == ((), ())
    assert words.tokenize("ab", {"instruction"}) == ((97, 98), ())
    assert words.tokenize("ab", {"language"}) == ((), (97, 98))
    assert words.tokenize("ab", {"instruction", "language"}) == ((97, 98), (97, 98))


def test_words_are_tokenized_one_by_one_without_frequent_ones() -> None:
    tokenizer = InstructionTokenizer(info(), None, IMAGE_ID)
    assert tokenizer.tokenize("is ab the c?", {"words"}) == ((), (97, 98, 99))
    # The language model's first layers read the whole text, and then the words are those.
    both = tokenizer.tokenize("is ab", {"words", "language"})
    assert both == tokenizer.tokenize("is ab", {"language"})
    assert tokenizer.tokenize("", {"words"}) == ((), ())
    many = " ".join(["ab"] * LANGUAGE_IDS)
    assert tokenizer.tokenize(many, {"words"})[1] == (97, 98) * (LANGUAGE_IDS // 2)


def test_a_literal_image_token_is_no_word() -> None:
    words = InstructionTokenizer(info(), None, IMAGE_ID)
    assert words.tokenize("a#b", {"instruction", "language"}) == ((97, 98), (97, 98))
    assert words.tokenize("#", {"language"}) == ((), ())


def test_only_the_end_of_a_long_instruction_is_read() -> None:
    long = "a" * 10_000 + "b" * (LANGUAGE_IDS - 1)
    said, read = InstructionTokenizer(info(), None, IMAGE_ID).tokenize(
        long, {"instruction", "language"}
    )
    assert said == tuple(map(ord, long))[-RELEVANCE_IDS:]
    assert read == (97,) + (98,) * (LANGUAGE_IDS - 1)


def test_only_the_end_of_a_text_is_tokenized() -> None:
    asked: list[str] = []

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        asked.append(text)
        return [len(word) for word in text.split()]

    known: Any = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(encode=encode))
    document = "words " * 100_000 + "what is it?"
    needs: frozenset[Need] = frozenset({"instruction"})
    ids = InstructionTokenizer(known, None, IMAGE_ID).tokenize(document, needs)
    assert len(asked) == 1
    assert len(asked[0]) <= MAX_CHARACTERS
    assert len(ids[0]) == RELEVANCE_IDS
    assert ItemPlan(8, (0, 0), *ids).encode().nbytes < 10_000


@pytest.mark.parametrize("tail", ["", "what is on the table?", "x" * 50, " two  spaces "])
def test_the_end_of_a_text_of_words_has_the_last_ids_of_all_of_it(tail: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(LLAVA))
    clip = AutoTokenizer.from_pretrained(str(CLIP))
    source = Random(3)
    known = ["red", "circle", "what", "is", "left", "of", "the", "three", "?", "Strasse", "\u4f60"]
    text = " ".join(source.choice(known) for _ in range(20_000)) + tail
    end = truncate_text(text)
    assert text.endswith(end) and len(end) <= MAX_CHARACTERS
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert (
        tokenizer.encode(end, add_special_tokens=False)[-RELEVANCE_IDS:] == whole[-RELEVANCE_IDS:]
    )
    said = truncate_clip_ids(tuple(clip(end, verbose=False)["input_ids"]))
    assert said == truncate_clip_ids(tuple(clip(text, verbose=False)["input_ids"]))
    assert len(said) == RELEVANCE_IDS
    assert said[0] == clip.bos_token_id and said[-1] == clip.eos_token_id


# ---- content words ----


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("What colour is the circle?", ["colour", "circle"]),
        ("<image>\nIs THE dog's bowl empty", ["dog", "s", "bowl", "empty"]),
        (
            "How many?\nAnswer the question using a single word or phrase.",
            ["many"],
        ),
        (
            "Which is red?\nA. cup\nAnswer with the option's letter from the given choices "
            "directly.",
            ["red", "cup"],
        ),
        ("12 x 3", ["12", "x", "3"]),
    ],
)
def test_frequent_words_and_endings_of_benchmarks_are_left_out(text: str, words: list[str]) -> None:
    assert split_content_words(text) == words
