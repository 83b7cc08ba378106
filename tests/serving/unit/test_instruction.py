"""What messages say about their images: instruction, detail, turns; and an instruction's ids."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.serving.engine import CLIP, LLAVA
from tests.tables import parametrize_from_file
from vllm_autoprune.serving.api.instruction import (
    MAX_CHARACTERS,
    InstructionTokenizer,
    extract_fields,
    extract_prompt_instruction,
    find_question_turns,
    mark_recall_turns,
    split_content_words,
    truncate_text,
    truncate_tower_ids,
)
from vllm_autoprune.serving.api.request import RecallTurn
from vllm_autoprune.serving.plan import LANGUAGE_IDS, RELEVANCE_IDS
from vllm_autoprune.tpdsl.tokens import Need

URL: dict[str, Any] = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
LONG = "once upon a time " * 500


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def user(*parts: object) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def said(role: str, content: object, **fields: object) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


@parametrize_from_file("image")
def test_an_image_of_every_form_has_its_text_and_its_detail(
    image: dict[str, Any],
) -> None:
    for question in (
        {"type": "input_text", "text": "what?"},
        {"text": "what?"},
        "what?",
    ):
        assert extract_fields([user(image, question)])["instructions"] == ["what?"]
    other_parts: list[Any] = [
        {"type": "audio_url"},
        {"type": "text", "text": None},
        {},
        None,
        3,
    ]
    assert extract_fields([user(*other_parts, text("what?"))])["instructions"] == []
    assert extract_fields([user(*other_parts, image, text("what?"))])[
        "instructions"
    ] == ["what?"]
    level: object
    for level in ("low", "high", "auto", "LOW", 1, {}):
        where: Any = image.get("image_url")
        detail: dict[str, object] = {"detail": level}
        detailed = (
            {**image, "image_url": {**where, **detail}}
            if isinstance(where, dict)
            else None
        )
        expected = level if level in ("low", "high") else None
        assert extract_fields([user(detailed or {**image, **detail})])["details"] == [
            expected
        ]


ANSWER = said("assistant", "It is red.")


@pytest.mark.parametrize(
    ("talk", "instructions", "turns"),
    [
        ([user(text(" look: "), URL, text("what?\n"))], ["look: \nwhat?"], [0]),
        ([user(URL, text("same?"), URL)], ["same?", "same?"], [0, 0]),
        (
            [
                user(URL, text("first")),
                ANSWER,
                user(text("2nd"), URL),
                user(text("And now?")),
            ],
            ["first", "2nd"],
            [0, 2],
        ),
        (
            [user(text("Buy.")), ANSWER, said("tool", [text("Done."), URL])],
            ["Buy.\nDone."],
            [None],
        ),
        ([user(text("hi")), said("user", "hi"), "not a message", None], [], []),
    ],
)
def test_an_image_has_the_text_of_its_own_turn(
    talk: list[Any], instructions: list[str], turns: list[int | None]
) -> None:
    fields = extract_fields(talk)
    assert (fields["instructions"], fields["turns"]) == (instructions, turns)


@parametrize_from_file("preceding", "read")
def test_an_image_without_text_has_the_task_and_what_was_said_last(
    preceding: list[dict[str, Any]], read: str
) -> None:
    for shot, count in ((user(URL, URL), 2), (said("tool", [URL]), 1)):
        fields = extract_fields(
            [*preceding, shot, said("assistant", "And?"), user(text("Blue?"))]
        )
        assert fields["instructions"][-count:] == [read] * count
        assert fields["turns"][-count:] == [None] * count


def test_neither_a_long_task_nor_a_long_page_hides_the_other() -> None:
    task = LONG + "Buy a lamp."
    page = LONG + "Lamps: 3"
    (read,) = extract_fields([said("user", task), said("tool", page), user(URL)])[
        "instructions"
    ]
    assert "Buy a lamp.\n" in read and read.endswith("Lamps: 3")
    assert len(read) < 4 * 256


# ---- turns of a conversation ----


@parametrize_from_file("preceding", "texts", "turns", "expected")
def test_turns_end_where_a_question_does(
    preceding: list[str],
    texts: list[str],
    turns: list[int | None] | None,
    expected: list[int | None],
) -> None:
    assert find_question_turns(preceding, texts, turns) == expected


def test_later_user_turns_without_an_image_are_marked_in_front_of_their_text() -> None:
    empty: list[object] = [None, "", "  ", [], 5]
    messages = [
        said("system", "Be brief."),
        said("user", "Hello"),
        user(URL, text("What is it?")),
        said("assistant", "A cat."),
        said("user", "And its colour?"),
        *(said("user", content) for content in empty),
        user({"type": "refusal", "refusal": "hm"}, text("One"), text("more?")),
        user(text("Compare:"), URL),
        user({"type": "thinking", "thinking": "hm"}),
        user("Well?"),
    ]
    marked: Any
    marked, turns = mark_recall_turns(messages, "<image>", "\n")
    assert turns == [
        RecallTurn(images=1, text="And its colour?"),
        RecallTurn(images=1, text="One\nmore?"),
        RecallTurn(images=2, text="Well?"),
    ]
    expected = [dict(message) for message in messages]
    expected[4] = said("user", "<image>\nAnd its colour?")
    expected[10] = user(messages[10]["content"][0], text("<image>\nOne"), text("more?"))
    expected[13] = user("<image>\nWell?")
    assert marked == expected
    assert messages[4]["content"] == "And its colour?", "the caller's own"


@parametrize_from_file("other")
def test_no_turn_is_marked_where_marks_could_be_mistaken(
    other: dict[str, object],
) -> None:
    messages = [user(URL, text("What is it?")), other, said("user", "Sure?")]
    assert mark_recall_turns(messages, "<image>", "") == (messages, [])


# ---- prompts without messages ----

TOKEN = 9
WORDS = {
    1: "USER:",
    2: "ASSISTANT:",
    3: "what?",
    4: "where?",
    5: "<image>\n",
    TOKEN: "<image>",
}


def decode(ids: Sequence[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


@parametrize_from_file("ids", "suffix", "expected")
def test_the_instruction_of_a_prompt(
    ids: list[int], suffix: str, expected: str
) -> None:
    assert extract_prompt_instruction(ids, TOKEN, decode, suffix) == expected


def test_the_instruction_of_a_prompt_whose_images_are_no_tokens() -> None:
    ids = [1, 5, 3, 5, 4, 2]
    assert (
        extract_prompt_instruction(ids, TOKEN, decode, " ASSISTANT:", "<image>")
        == "where?"
    )


# ---- tokens of an instruction ----


@pytest.mark.parametrize(
    ("question", "needs", "relevance", "language"),
    [
        ("ab", ("cls_attention", "tower"), "", ""),
        ("ab", ("instruction",), "ab", ""),
        ("ab", ("instruction", "language"), "ab", "ab"),
        # A literal image token has no meaning.
        ("a#b", ("instruction", "language"), "ab", "ab"),
        # Words are tokenized one by one, without frequent ones; the whole text has them as well.
        ("is ab the c?", ("words",), "", "abc"),
        ("", ("words",), "", ""),
        ("ab " * 300, ("words",), "", "ab" * (LANGUAGE_IDS // 2)),
        # Only the end of a long text is read.
        (
            LONG,
            ("instruction", "language"),
            LONG[-RELEVANCE_IDS:],
            LONG[-LANGUAGE_IDS:],
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_instructions_are_tokenized_for_states_that_read_them(
    question: str, needs: tuple[Need, ...], relevance: str, language: str
) -> None:
    """By a model whose tokenizer gives each letter a token."""
    image_id = 4

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) if letter != "#" else image_id for letter in text]

    info: Any = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(encode=encode))
    ids = InstructionTokenizer(info, None, image_id).tokenize(question, needs)
    assert ids == (tuple(map(ord, relevance)), tuple(map(ord, language)))


@pytest.mark.parametrize(
    "tail", ["", "what is on the table?", "x" * 50, " two  spaces "]
)
def test_the_end_of_a_text_of_words_has_the_last_ids_of_all_of_it(tail: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(LLAVA))
    clip = AutoTokenizer.from_pretrained(str(CLIP))
    source = Random(3)
    vocabulary = [
        "red",
        "circle",
        "what",
        "is",
        "left",
        "of",
        "the",
        "three",
        "?",
        "Strasse",
        "\u4f60",
    ]
    text = " ".join(source.choice(vocabulary) for _ in range(20_000)) + tail
    end = truncate_text(text)
    assert text.endswith(end) and len(end) <= MAX_CHARACTERS
    last, every = (
        tokenizer.encode(part, add_special_tokens=False)[-RELEVANCE_IDS:]
        for part in (end, text)
    )
    assert last == every
    ids = truncate_tower_ids(tuple(clip(end, verbose=False)["input_ids"]))
    assert ids == truncate_tower_ids(tuple(clip(text, verbose=False)["input_ids"]))
    assert len(ids) == RELEVANCE_IDS
    assert (ids[0], ids[-1]) == (clip.bos_token_id, clip.eos_token_id)


@parametrize_from_file("text", "words")
def test_frequent_words_and_endings_of_benchmarks_are_left_out(
    text: str, words: list[str]
) -> None:
    assert split_content_words(text) == words
