from __future__ import annotations

import pytest

from vllm_autoprune.serving.api.content_words import split_content_words


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


def test_a_question_of_frequent_words_alone_is_read_whole() -> None:
    assert split_content_words(" What is it? ") == ["What is it?"]
    assert split_content_words("") == [""]
