"""Registry of sub-commands, and flags that several of them share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from vllm_autoprune.connection import Connection
from vllm_autoprune.errors import BudgetError, ConfigError
from vllm_autoprune.flags import add_flags, flag_problems, read_flags
from vllm_autoprune.tpdsl.atoms.source import BudgetCall

_AddsArgument = Callable[[argparse.ArgumentParser], object]
_Run = Callable[[argparse.Namespace], int]


class _Command(NamedTuple):
    """A sub-command: its arguments, and ``run``, which returns the exit status."""

    arguments: Sequence[_AddsArgument]
    run: _Run
    epilog: str


COMMANDS: dict[str, _Command] = {}
"""The sub-commands whose modules are imported, by name."""


def argument(*flags: str, **keywords: Any) -> _AddsArgument:
    """Function that adds an argument to a parser; the parameters are those of ``add_argument``."""
    return lambda parser: parser.add_argument(*flags, **keywords)


def command(
    name: str, *arguments: _AddsArgument, epilog: str = ""
) -> Callable[[_Run], _Run]:
    """Decorator that registers a function as the sub-command ``name``."""

    def register(run: _Run) -> _Run:
        COMMANDS[name] = _Command(arguments, run, epilog)
        return run

    return register


def read_budget(text: str, *, video: bool = False) -> BudgetCall:
    """Parse the value of a flag: K, a share of N or, for a ``video``, tokens_per_frame:K."""
    try:
        return BudgetCall.parse(text, video=video)
    except BudgetError as error:
        problem = error.problems[0]
        raise argparse.ArgumentTypeError(f"{problem.what}: {problem.fix}") from None


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command that sends requests to a server: key, headers, certificates."""
    add_flags(parser.add_argument_group("connection"), Connection, {})


def read_connection(options: argparse.Namespace) -> Connection:
    """Validate the flags of :func:`add_connection_flags`; raises :class:`ConfigError`."""
    try:
        return read_flags(Connection, options)
    except ValidationError as error:
        raise ConfigError("connection", flag_problems(error, {})) from None
