"""Screenshots of an agent's session: a form fills, a dialog opens, a list scrolls."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from PIL import Image, ImageDraw, ImageFont

from benchmarks.common.shapes import draw_words

_FIELDS = 8
_LINES = 60
"""Fields of the form, and lines of the list."""
_INK = (30, 30, 30)
_BAR = (38, 50, 72)
_GREY = (243, 243, 245)


def draw_screens(
    count: int, width: int, height: int, seed: int = 0
) -> list[Image.Image]:
    """Draw the first ``count`` of 20 screens, each after one action of the agent.

    Eight fields of a form are filled in, a dialog opens and closes, and a list follows, of which
    rows are ticked and which scrolls twice.
    """
    random = Random(seed)
    words = [draw_words(60, random.randrange(10**6)) for _ in range(_LINES)]
    screens = _draw_session(words, width, height)
    return [screen for screen, _ in zip(screens, range(count), strict=False)]


def _draw_session(words: list[str], width: int, height: int) -> Iterator[Image.Image]:
    for filled in range(_FIELDS):
        yield _draw_form(words, width, height, filled)
    form = _draw_form(words, width, height, _FIELDS)
    dialog = form.copy()
    box = (width * 3 // 10, height * 7 // 20, width * 7 // 10, height * 13 // 20)
    ImageDraw.Draw(dialog).rectangle(box, "white", _INK, 2)
    _write(dialog, (box[0] + 20, box[1] + 20), "Save these entries? " + words[0][:20])
    yield dialog
    yield form
    ticked = set[int]()
    for step in range(10):
        first_line = 12 * sum(step >= scroll for scroll in (4, 8))
        if step not in (0, 4, 8):
            ticked.add(first_line + step)
        yield _draw_list(words, width, height, first_line, ticked)


def _draw_form(words: list[str], width: int, height: int, filled: int) -> Image.Image:
    """The form, with its next field marked."""
    image = _draw_frame(words, width, height)
    pen = ImageDraw.Draw(image)
    for field in range(_FIELDS):
        y = height * (field + 2) // (_FIELDS + 3)
        box = (width * 2 // 5, y, width * 9 // 10, y + height // 18)
        pen.rectangle(box, "white", _BAR if field == filled else _GREY, 2)
        _write(image, (width // 5, y + 8), words[field][:24])
        if field < filled:
            _write(image, (box[0] + 10, y + 8), words[_FIELDS + field][:30])
    return image


def _draw_list(
    words: list[str], width: int, height: int, first_line: int, ticked: set[int]
) -> Image.Image:
    image = _draw_frame(words, width, height)
    pen = ImageDraw.Draw(image)
    pitch = height // 18
    for row, line in enumerate(range(first_line, first_line + 15)):
        y = (row + 2) * pitch
        box = (width // 5, y + 6, width // 5 + 18, y + 24)
        pen.rectangle(box, _BAR if line in ticked else "white", _INK)
        _write(image, (width // 4, y + 6), words[line][:48])
    return image


def _draw_frame(words: list[str], width: int, height: int) -> Image.Image:
    """What all screens have: a bar at the top and a menu on the left."""
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 0, width, height // 20), _BAR)
    pen.rectangle((0, height // 20, width // 6, height), _GREY)
    for row in range(10):
        _write(image, (10, height * (row + 2) // 14), words[-1 - row][:14])
    return image


def _write(image: Image.Image, corner: tuple[int, int], text: str) -> None:
    ImageDraw.Draw(image).text(corner, text, _INK, ImageFont.load_default(16))
