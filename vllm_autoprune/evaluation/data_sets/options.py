"""Multiple choice: options with letters, and which of them is right."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Literal

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.asked_question import AskedQuestion
from vllm_autoprune.evaluation.data_sets.registry import Record, make_question
from vllm_autoprune.evaluation.tables import read_list
from vllm_autoprune.stream import one_line

Way = Literal["letter", "number", "text"]
"""How an answer names its option."""
DIRECTLY = "Answer with the option's letter from the given choices directly."
"""lmms-eval writes this below the options."""


def read_options(record: Record, column: str) -> list[str]:
    """The options in ``column``: a list, or the text of one. Letters before them are removed."""
    value = record.fields[column]
    if isinstance(value, str):
        value = read_list(value)
    if not (isinstance(value, list) and value and len(value) <= len(ascii_uppercase)):
        what = f"{column!r} is not a list of options"
        fix = f"give 2 to {len(ascii_uppercase)} texts"
        raise ConfigError.of(record.where, what, fix, subject="data")
    options = [str(option) for option in value]
    lettered = [
        re.match(rf"\(?{letter}[.):]\s*", option)
        for letter, option in zip(ascii_uppercase, options, strict=False)
    ]
    if all(lettered):
        return [
            option[m.end() :] for m, option in zip(lettered, options, strict=True) if m
        ]
    return options


def find_letter(
    record: Record, options: Sequence[str], answer: object, *ways: Way
) -> str | None:
    """The letter of the option that ``answer`` names by its letter, number (from 0) or text.

    ``ways`` are the allowed ways, tried in order. Returns None without an answer. Raises
    :class:`ConfigError` if no option is named.
    """
    if answer is None or not (text := str(answer).strip()):
        return None
    letters = ascii_uppercase[: len(options)]
    spellings: dict[Way, Sequence[str]] = {
        "letter": [*letters],
        "number": [*map(str, range(len(options)))],
        "text": [option.strip() for option in options],
    }
    for way in ways:
        if text in (spelled := spellings[way]) and spelled.count(text) == 1:
            return letters[spelled.index(text)]
    what = f"has the answer {one_line(text, 40)!r}, which is none of its options"
    fix = f"give the {' or '.join(ways)} of one of {len(options)} options"
    raise ConfigError.of(record.where, what, fix, subject="data")


def list_options(options: Sequence[str]) -> str:
    """One line for each option, which begins with its letter."""
    pairs = zip(ascii_uppercase, options, strict=False)
    return "\n".join(f"{letter}. {option}" for letter, option in pairs)


def ask_options(
    record: Record,
    options: Sequence[str],
    letter: str | None,
    fields: Mapping[str, object],
    prompt: str = f"{{question}}\n{{options}}\n{DIRECTLY}",
) -> AskedQuestion:
    """The question of ``fields`` with ``options``; the right letter and its text are accepted.

    ``letter`` is that of the right option, None if it is not known.
    """
    question = fields.get("question")
    if isinstance(question, str) and question.strip():
        listed = list_options(options)
        question = prompt.replace("{options}", listed).replace("{question}", question)
    accepted: tuple[str, ...] = ()
    if letter is not None:
        accepted = (letter, options[ascii_uppercase.index(letter)])
    return make_question(record, {**fields, "question": question}, "choice", accepted)
