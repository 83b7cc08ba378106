"""How messages write places and values of a JSON text: one short, printable line.

Knows nothing about states. What it is given may be hostile: escape sequences, line breaks and
a megabyte of text must not reach a terminal or a log.
"""

from __future__ import annotations

import json


def printable(text: str, limit: int = 60) -> str:
    """The text with escapes for what does not print, shortened to ``limit`` characters."""
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def pointer(where: str, step: str | int) -> str:
    """The JSON pointer (RFC 6901) one step below another."""
    said = printable(str(step), 80)
    return f"{where}/{said.replace('~', '~0').replace('/', '~1')}"


def shown(value: object, limit: int = 60) -> str:
    """A JSON value on one line of about ``limit`` characters at most."""
    if isinstance(value, str):
        return f'"{printable(value, limit)}"'
    text = ""
    for piece in json.JSONEncoder().iterencode(value):  # a piece at a time: most is never made
        text += piece
        if len(text) > limit:
            return f"{text[: limit - 3]}..."
    return text
