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
from vllm_autoprune.serving.plan import LANGUAGE_IDS, RELEVANCE_IDS
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


WAYS_TO_SAY: list[object] = [
    text("what?"),
    {"type": "input_text", "text": "what?"},
    {"type": "output_text", "text": "what?"},
    {"text": "what?"},
    "what?",
]
NEITHER: list[object] = [
    {"type": "audio_url", "audio_url": {"url": "http://x/y.wav"}},
    {"type": "video_url", "video_url": {"url": "http://x/y.mp4"}},
    *({"type": "refusal", "refusal": "no"}, {"type": "text", "text": None}, {"type": "text"}),
    *({}, None, 3),
]


@pytest.mark.parametrize("image", IMAGES)
def test_every_way_to_send_images_texts_and_details(image: dict[str, Any]) -> None:
    for said in WAYS_TO_SAY:
        assert extract_instructions([user(image, said)]) == ["what?"]
    for part in NEITHER:
        assert extract_instructions([user(part, text("what?"))]) == []
        assert extract_instructions([user(part, image, text("what?"))]) == ["what?"]
    inside = isinstance(image.get("image_url"), dict)
    detail: object
    for detail in ("low", "high", "auto", "original", "LOW", "", None, 1, {}, []):
        level: dict[str, object] = {"detail": detail}
        detailed = {**image, **({"image_url": level} if inside else level)}
        expected = detail if detail in ("low", "high") else None
        assert extract_details([user(detailed)]) == [expected]


ANSWER = {"role": "assistant", "content": "It is red."}


@pytest.mark.parametrize(
    ("talk", "instructions", "turns"),
    [
        ([user(text(" look: "), URL, text("what?\n"))], ["look: \nwhat?"], [0]),
        ([user(URL, text("same?"), URL)], ["same?", "same?"], [0, 0]),
        (
            [user(URL, text("first")), ANSWER, user(text("2nd"), URL), user(text("And now?"))],
            ["first", "2nd"],
            [0, 2],
        ),
        ([{"role": "system", "content": "Be brief."}, user(URL, text("what?"))], ["what?"], [1]),
        (
            [user(text("Buy.")), ANSWER, {"role": "tool", "content": [text("Done."), URL]}],
            ["Buy.\nDone."],
            [None],
        ),
        ([user(text("hi")), {"role": "user", "content": "hi"}, "not a message", None], [], []),
        ([], [], []),
    ],
)
def test_an_image_has_the_text_of_its_own_turn(
    talk: list[Any], instructions: list[str], turns: list[int | None]
) -> None:
    assert (extract_instructions(talk), extract_turns(talk)) == (instructions, turns)


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


def test_neither_a_long_task_nor_a_long_page_hides_the_other() -> None:
    task, page = LONG + "Buy a lamp.", LONG + "Lamps: 3"
    (read,) = extract_instructions([said("user", task), said("tool", page), user(URL)])
    assert "Buy a lamp.\n" in read and read.endswith("Lamps: 3")
    assert len(read) < 4 * 256


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


@pytest.mark.parametrize(
    ("asked", "needs", "relevance", "language"),
    [
        ("ab", (), "", ""),
        ("ab", ("cls_attention", "tower"), "", ""),
        ("ab", ("instruction",), "ab", ""),
        ("ab", ("instruction", "language"), "ab", "ab"),
        # A literal image token has no meaning.
        ("a#b", ("instruction", "language"), "ab", "ab"),
        ("#", ("language",), "", ""),
        # Words are tokenized one by one, without frequent ones; the whole text has them as well.
        ("is ab the c?", ("words",), "", "abc"),
        ("is ab", ("words", "language"), "", "is ab"),
        ("", ("words",), "", ""),
        ("ab " * 300, ("words",), "", "ab" * (LANGUAGE_IDS // 2)),
        # Only the end of a long text is read.
        (LONG, ("instruction", "language"), LONG[-RELEVANCE_IDS:], LONG[-LANGUAGE_IDS:]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_instructions_are_tokenized_for_states_that_read_them(
    asked: str, needs: tuple[Need, ...], relevance: str, language: str
) -> None:
    """By a model whose tokenizer gives each letter a token."""

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) if letter != "#" else IMAGE_ID for letter in text]

    info: Any = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(encode=encode))
    ids = InstructionTokenizer(info, None, IMAGE_ID).tokenize(asked, needs)
    assert ids == (tuple(map(ord, relevance)), tuple(map(ord, language)))


@pytest.mark.parametrize("tail", ["", "what is on the table?", "x" * 50, " two  spaces "])
def test_the_end_of_a_text_of_words_has_the_last_ids_of_all_of_it(tail: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(LLAVA))
    clip = AutoTokenizer.from_pretrained(str(CLIP))
    source = Random(3)
    known = ["red", "circle", "what", "is", "left", "of", "the", "three", "?", "Strasse", "\u4f60"]
    text = " ".join(source.choice(known) for _ in range(20_000)) + tail
    end = truncate_text(text)
    assert text.endswith(end) and len(end) <= MAX_CHARACTERS
    every_id = tokenizer.encode(text, add_special_tokens=False)
    assert (
        tokenizer.encode(end, add_special_tokens=False)[-RELEVANCE_IDS:]
        == every_id[-RELEVANCE_IDS:]
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
