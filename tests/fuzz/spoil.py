"""Mutations of the text of a state, as characters and as bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random

from tests.fuzz.grammar import Json

NUMBERS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e999999999",
    "1e-400",
    "-0",
    "-0.0",
    "1E+2",
    "2.0",
    "2e0",
    "01",
    "+1",
    ".5",
    "1.",
    "0x10",
    "1_000",
    "--1",
    "9" * 400,
    "9" * 5000,
    "0." + "3" * 5000,
)

INSERTED = (
    ",",
    ":",
    '"',
    "\\",
    "\0",
    "{",
    "}",
    "[",
    "]",
    "'",
    "// so\n",
    "/* so */",
    "# so\n",
    "\u00a0",
    "\u2028",
    "\t",
    "\\ud800",
    "\\u0000",
    "null",
    "<",
)


def written(state: Json, random: Random) -> str:
    """One of the JSON texts of a state."""
    indent = random.choice((None, None, 2, "\t"))
    ascii_only = random.random() < 0.5
    text = json.dumps(state, indent=indent, ensure_ascii=ascii_only)
    return random.choice(("", "", "\n", " \r\n\t")) + text


def _number(text: str, random: Random) -> str:
    actual = list(re.finditer(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", text))
    if not actual:
        return text + random.choice(NUMBERS)
    at = random.choice(actual)
    return text[: at.start()] + random.choice(NUMBERS) + text[at.end() :]


def _twice(text: str, random: Random) -> str:
    """Repeat a key at the head of an object."""
    keys = re.findall(r'"[^"\\]*"(?=\s*:)', text) or ['"a"']
    heads = [match.end() for match in re.finditer(r"\{", text)] or [0]
    at, key = random.choice(heads), random.choice(keys)
    return f"{text[:at]}{key}: {random.choice(('1', 'null', '[]'))}, {text[at:]}"


def _cut(text: str, random: Random) -> str:
    at = random.randrange(len(text) + 1)
    return random.choice((text[:at], text[at:], text[:at] + text[at + 1 + random.randrange(5) :]))


def _insert(text: str, random: Random) -> str:
    at = random.randrange(len(text) + 1)
    return text[:at] + random.choice(INSERTED) + text[at:]


def _deep(text: str, random: Random) -> str:
    depth = random.choice((10, 33, 1000, 100_000))
    opening, closing = random.choice((("[", "]"), ('{"a":', "}")))
    return text.replace("null", opening * depth + "1" + closing * depth, 1) + random.choice(
        ("", "", "[" * depth)
    )


def _many(text: str, random: Random) -> str:
    items = random.choice(("0", "[]", "{}", '"x"', '{"atom":"x"}', "1.5"))
    count = random.choice((100, 9000, 11_000, 60_000))
    return text.replace("[", "[" + f"{items}," * count, 1)


def _doubled(text: str, random: Random) -> str:
    return text + random.choice(("", " ", ",", "\n")) + text


def _quotes(text: str, random: Random) -> str:
    return text.replace('"', random.choice(("'", "“", "")))


def _nothing(text: str, random: Random) -> str:
    return random.choice(
        ("", " ", "null", "[]", "0", '"{}"', "{", "}", "{}", "true", "\ufeff", "NaN", "1e999")
    )


CHARACTERS: tuple[Callable[[str, Random], str], ...] = (
    _number,
    _number,
    _twice,
    _twice,
    _twice,
    _cut,
    _insert,
    _insert,
    _deep,
    _many,
    _doubled,
    _quotes,
    _nothing,
)

ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be", "utf-7")


def _encoded(text: str, random: Random) -> bytes:
    return text.encode(random.choice(ENCODINGS), "surrogatepass")


def _latin(text: str, random: Random) -> bytes:
    return text.replace("a", "ä").encode("latin-1", "replace")


def _bytes(text: str, random: Random) -> bytes:
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(random.choice((1, 1, 3, 30))):
        if content:
            content[random.randrange(len(content))] = random.randrange(256)
    return bytes(content)


def _binary(text: str, random: Random) -> bytes:
    return random.randbytes(random.choice((1, 100, 5000)))


def _padded(text: str, random: Random) -> bytes:
    return text.encode("utf-8", "surrogatepass") + b" " * random.choice((1 << 20, 3 << 20))


BYTES: tuple[Callable[[str, Random], bytes], ...] = (
    _encoded,
    _encoded,
    _latin,
    _bytes,
    _bytes,
    _bytes,
    _binary,
    _padded,
)


def spoil(text: str, random: Random) -> tuple[str | bytes, str]:
    """A mutated text, and the name of its mutation."""
    if random.random() < 0.6:
        change = random.choice(CHARACTERS)
        return change(text, random), change.__name__.strip("_")
    damage = random.choice(BYTES)
    return damage(text, random), damage.__name__.strip("_")
