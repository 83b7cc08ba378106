from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.serving.paths import CLIP, LLAVA
from tests.serving.unit.conftest import TinyClip
from tests.serving.unit.samples import BOS, EOS
from vllm_autoprune.serving.api.instruction_tokens import (
    MAX_CHARACTERS,
    InstructionTokenizer,
    truncate_clip_ids,
    truncate_text,
)
from vllm_autoprune.serving.shared.plan import LANGUAGE_IDS, RELEVANCE_IDS, ItemPlan
from vllm_autoprune.serving.shared.text_tower import read_text_tower
from vllm_autoprune.tpdsl.tokens import Need

IMAGE = 4


def info() -> Any:
    """A model whose tokenizer gives each letter a token."""

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) if letter != "#" else IMAGE for letter in text]

    return SimpleNamespace(
        get_tokenizer=lambda: SimpleNamespace(encode=encode),
    )


def test_instructions_are_given_only_to_states_that_read_them() -> None:
    words = InstructionTokenizer(info(), None, IMAGE)
    assert words.tokenize("ab", ()) == ((), ())
    assert words.tokenize("ab", {"cls_attention", "tower", "next_layer"}) == ((), ())
    assert words.tokenize("ab", {"instruction"}) == ((97, 98), ())
    assert words.tokenize("ab", {"language"}) == ((), (97, 98))
    assert words.tokenize("ab", {"instruction", "language"}) == ((97, 98), (97, 98))


def test_words_are_tokenized_one_by_one_without_frequent_ones() -> None:
    tokenizer = InstructionTokenizer(info(), None, IMAGE)
    assert tokenizer.tokenize("is ab the c?", {"words"}) == ((), (97, 98, 99))
    # The language model's first layers read the whole text, and then the words are those.
    both = tokenizer.tokenize("is ab", {"words", "language"})
    assert both == tokenizer.tokenize("is ab", {"language"})
    assert tokenizer.tokenize("", {"words"}) == ((), ())
    many = " ".join(["ab"] * LANGUAGE_IDS)
    assert tokenizer.tokenize(many, {"words"})[1] == (97, 98) * (LANGUAGE_IDS // 2)


def test_a_text_tower_has_words_of_its_own(tiny_clip: TinyClip) -> None:
    words = InstructionTokenizer(info(), read_text_tower(str(tiny_clip.folder)), IMAGE)
    said, read = words.tokenize("the cat", {"instruction", "language"})
    assert (said[0], said[-1], len(said)) == (BOS, EOS, 4)
    assert read == tuple(map(ord, "the cat"))


def test_a_literal_image_token_is_no_word() -> None:
    words = InstructionTokenizer(info(), None, IMAGE)
    assert words.tokenize("a#b", {"instruction", "language"}) == ((97, 98), (97, 98))
    assert words.tokenize("#", {"language"}) == ((), ())


def test_only_the_end_of_a_long_instruction_is_read() -> None:
    long = "a" * 10_000 + "b" * (LANGUAGE_IDS - 1)
    said, read = InstructionTokenizer(info(), None, IMAGE).tokenize(
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
    ids = InstructionTokenizer(known, None, IMAGE).tokenize(document, needs)
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


def test_a_text_without_spaces_is_cut_where_it_has_to_be() -> None:
    assert truncate_text("x" * 10**6) == "x" * MAX_CHARACTERS
    assert truncate_text("a b") == "a b"
    cut = truncate_text("y" + " " + "x" * (MAX_CHARACTERS - 1) + " z")
    assert cut == "z"
