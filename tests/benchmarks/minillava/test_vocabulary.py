"""Both tokenizers: every wording survives, and the text tower pools on its end token."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from benchmarks.minillava.questions import every_text
from benchmarks.minillava.split import CLIP, LLAVA
from benchmarks.minillava.vocabulary import (
    CLIP_END,
    CLIP_LENGTH,
    clip_tokenizer,
    language_tokenizer,
    prompt,
    token_id,
)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return language_tokenizer()


@pytest.fixture(scope="module")
def eyes() -> Tokenizer:
    return clip_tokenizer()


def test_every_prompt_comes_back_from_its_tokens(words: Tokenizer) -> None:
    for text in every_text():
        ids = words.encode(prompt(text)).ids
        assert words.decode(ids, skip_special_tokens=False) == prompt(text)


def test_every_answer_is_one_token(words: Tokenizer) -> None:
    for answer in ("yes", "no", "red", "purple", "triangle", "0", "9"):
        assert len(words.encode(f" {answer}").ids) == 1


def test_every_question_fits_the_text_tower_and_ends_where_it_pools(eyes: Tokenizer) -> None:
    end = token_id(eyes, CLIP_END)
    assert end != 2  # transformers reads 2 as a legacy description and pools elsewhere
    for text in every_text():
        ids = eyes.encode(text).ids
        assert len(ids) <= CLIP_LENGTH
        assert ids.index(end) == len(ids) - 1
        assert eyes.decode(ids).strip() == text.lower()


def test_committed_tokenizers_are_the_ones_the_code_makes(
    words: Tokenizer, eyes: Tokenizer
) -> None:
    for made, folder in ((words, LLAVA), (eyes, CLIP)):
        kept = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert kept.get_vocab() == made.get_vocab()
