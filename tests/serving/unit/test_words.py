from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.serving.unit.conftest import TinyClip
from tests.serving.unit.samples import BOS, EOS
from vllm_autoprune.serving.towers import describe_tower
from vllm_autoprune.serving.words import LAST_WORDS, Words

IMAGE = 4


def info() -> Any:
    """A model whose tokenizer gives each letter a token."""

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) if letter != "#" else IMAGE for letter in text]

    return SimpleNamespace(
        get_tokenizer=lambda: SimpleNamespace(encode=encode),
    )


def test_only_who_reads_is_told() -> None:
    words = Words(info(), None, IMAGE)
    assert words.read("ab", ()) == ((), ())
    assert words.read("ab", {"cls_attention", "tower", "next_layer"}) == ((), ())
    assert words.read("ab", {"instruction"}) == ((97, 98), ())
    assert words.read("ab", {"language"}) == ((), (97, 98))
    assert words.read("ab", {"instruction", "language"}) == ((97, 98), (97, 98))


def test_a_text_tower_has_words_of_its_own(tiny_clip: TinyClip) -> None:
    words = Words(info(), describe_tower(str(tiny_clip.folder)), IMAGE)
    said, read = words.read("the cat", {"instruction", "language"})
    assert (said[0], said[-1], len(said)) == (BOS, EOS, 4)
    assert read == tuple(map(ord, "the cat"))


def test_a_literal_image_token_is_no_word() -> None:
    words = Words(info(), None, IMAGE)
    assert words.read("a#b", {"instruction", "language"}) == ((97, 98), (97, 98))
    assert words.read("#", {"language"}) == ((), ())


def test_the_language_model_sees_the_end_of_a_long_instruction() -> None:
    long = "a" * 10_000 + "b" * (LAST_WORDS - 1)
    said, read = Words(info(), None, IMAGE).read(long, {"instruction", "language"})
    assert len(said) == len(long)
    assert read == (97,) + (98,) * (LAST_WORDS - 1)
