"""Types of options: every wrong value is answered in one line before anything starts."""

from __future__ import annotations

import argparse
import difflib
import math
import shlex
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import NoReturn, TypeVar, get_args

from benchmarks.load.requests import Format
from benchmarks.load.workload import parse_mix

T = TypeVar("T")
WholeNumbers = tuple[tuple[int, float], ...]
Texts = tuple[tuple[str, float], ...]
FIND = "find"


class OneLineParser(argparse.ArgumentParser):
    """A parser that answers a mistake in one line, without its usage, and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake, and the option that was probably meant."""
        text = message.removeprefix("argument ")
        if text.startswith("unrecognized arguments: "):
            unknown = text.removeprefix("unrecognized arguments: ").split()[0]
            text = f"{unknown} is not an option{self.suggest_option(unknown)}"
        print(f"load: {text}", file=sys.stderr)
        sys.exit(2)

    def suggest_option(self, unknown: str) -> str:
        """The option with the most similar name, as the end of a message."""
        name = unknown.partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.6)
        return f" -> did you mean {near[0]}?" if near else " -> see --help"

    def takes_several(self, option: str) -> bool | None:
        """Whether an option takes several values; None for an unknown option."""
        action = self._option_string_actions.get(option)
        return None if action is None else action.nargs == "+"

    def is_switch(self, option: str) -> bool:
        """Whether an option takes no value."""
        action = self._option_string_actions.get(option)
        return action is not None and action.nargs == 0


def whole_number(least: int) -> Callable[[str], int]:
    """A type for whole numbers of at least ``least``."""

    def parse(text: str) -> int:
        number = _convert(int, text)
        if number is None or number < least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number -> give {least} or more"
            )
        return number

    return parse


def positive_number(text: str) -> float:
    """A finite number above 0."""
    number = _convert(float, text)
    if number is None or not math.isfinite(number) or number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number -> give one above 0")
    return number


def limit(text: str) -> float:
    """A finite number of at least 0; 0 is no limit."""
    number = _convert(float, text)
    if number is None or not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number -> give one above 0, or 0")
    return number


def users_list(text: str) -> tuple[int, ...]:
    """Numbers of users, such as ``1,2,4``."""
    users = tuple(_convert(int, part) for part in text.split(",") if part)
    if not users or any(one is None or one < 1 for one in users):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of users -> give whole numbers of 1 or more, such as 1,2,4"
        )
    return tuple(one for one in users if one is not None)


def rates_list(text: str) -> tuple[float, ...] | None:
    """Rates in requests/s, rising; None for ``find``."""
    if text == FIND:
        return None
    rates = tuple(_convert(float, part) for part in text.split(",") if part)
    if not rates or any(one is None or not 0 < one < math.inf for one in rates):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of rates -> give numbers above 0, such as 0.5,1,2, or {FIND}"
        )
    return tuple(sorted(one for one in rates if one is not None))


def whole_number_mix(text: str) -> WholeNumbers:
    """A mix of whole numbers of 1 or more, such as ``480=1,640=2``."""
    mix = _parse_mix(text, int, "whole numbers", "480=1,640=2")
    if any(value < 1 for value, _ in mix):
        raise argparse.ArgumentTypeError(f"{text!r} has a value below 1 -> give 1 or more")
    return mix


def aspect_mix(text: str) -> Texts:
    """A mix of aspects, width over height, such as ``4/3=2,1/1``."""
    mix = _parse_mix(text, str, "aspects", "4/3=2,1/1=1")
    for value, _ in mix:
        aspect = _convert(Fraction, value)
        if aspect is None or aspect <= 0:
            raise argparse.ArgumentTypeError(
                f"{value!r} is not an aspect -> give width/height, such as 4/3"
            )
    return mix


def format_mix_type(text: str) -> Texts:
    """A mix of image formats, such as ``jpeg=4,png=1``."""
    mix = _parse_mix(text, str, "formats", "jpeg=4,png=1")
    for value, _ in mix:
        if value not in get_args(Format):
            raise argparse.ArgumentTypeError(
                f"{value!r} is not a format -> use {' or '.join(get_args(Format))}"
            )
    return mix


def shell_words(text: str) -> list[str]:
    """Flags as a shell splits them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error} -> close the quotation") from None


def _parse_mix(
    text: str, convert: Callable[[str], T], what: str, example: str
) -> tuple[tuple[T, float], ...]:
    try:
        mix = parse_mix(text, convert)
    except ValueError:
        mix = ()
    if not mix or any(not (math.isfinite(weight) and weight > 0) for _, weight in mix):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a mix of {what} -> write VALUE=WEIGHT,... with weights above 0, "
            f"such as {example}"
        )
    return mix


def _convert(kind: Callable[[str], T], text: str) -> T | None:
    try:
        return kind(text.strip())
    except (ValueError, ZeroDivisionError):
        return None
