"""Sub-commands, and their flags from the fields of pydantic models.

A field's description is the help and its title the metavar. A boolean field is a switch, a list
may be given several times, a tuple takes several values.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from vllm_autoprune.connection import Connection
from vllm_autoprune.errors import BudgetError, ConfigError, Problem
from vllm_autoprune.tpdsl.atoms.source import BudgetCall

_M = TypeVar("_M", bound=BaseModel)

_Names = Mapping[str, str]
"""Flags that are not named like their field."""
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
    """An argument of a command, as ``add_argument`` takes it."""
    return lambda parser: parser.add_argument(*flags, **keywords)


def command(
    name: str, *arguments: _AddsArgument, epilog: str = ""
) -> Callable[[_Run], _Run]:
    """Make a function a sub-command."""

    def register(run: _Run) -> _Run:
        COMMANDS[name] = _Command(arguments, run, epilog)
        return run

    return register


def read_budget(text: str, *, clip: bool = False) -> BudgetCall:
    """K or a share of N, as the value of a flag; of a clip also tokens_per_frame:K."""
    try:
        return BudgetCall.parse(text, clip=clip)
    except BudgetError as error:
        problem = error.problems[0]
        raise argparse.ArgumentTypeError(f"{problem.what}: {problem.fix}") from None


def add_flags(
    group: argparse._ArgumentGroup,
    model: type[BaseModel],
    names: _Names,
    fields: Sequence[str] | None = None,
    readers: Mapping[str, Any] | None = None,
) -> None:
    """Add a flag for each field; those that are not given are left to the model's defaults.

    ``readers``: what argparse reads the value of a field with, not the model.
    """
    for name in fields or model.model_fields:
        field = model.model_fields[name]
        keywords: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
        text = field.description or ""
        default = field.default
        shape = get_origin(field.annotation)
        if field.annotation is bool:
            keywords["action"] = "store_true"
        else:
            titles = tuple((field.title or name.upper()).split())
            keywords["metavar"] = titles if len(titles) > 1 else titles[0]
            if default not in (None, "", (), [], PydanticUndefined):
                values = default if isinstance(default, tuple) else (default,)
                text += f" (default: {' '.join(map(str, values))})"
        if readers is not None:
            keywords["type"] = readers[name]
        if shape is tuple:
            types = get_args(field.annotation)
            keywords["nargs"] = "+" if types[-1] is Ellipsis else len(types)
        elif shape is list:
            keywords["action"] = "append"
        group.add_argument(_flag(name, names), help=text.replace("%", "%%"), **keywords)


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command that asks a server: key, headers and certificates."""
    add_flags(parser.add_argument_group("connection"), Connection, {})


def read_connection(options: argparse.Namespace) -> Connection:
    """What the flags of :func:`add_connection_flags` say; raises :class:`ConfigError`."""
    try:
        return read_flags(Connection, options)
    except ValidationError as error:
        raise ConfigError("connection", flag_problems(error, {})) from None


def read_flags(model: type[_M], options: argparse.Namespace) -> _M:
    """The model with the values of the flags that were given; raises pydantic's error."""
    return model.model_validate(
        {n: v for n, v in vars(options).items() if n in model.model_fields}
    )


def flag_problems(error: ValidationError, names: _Names) -> list[Problem]:
    """What is wrong with which flags.

    A validator names the fields to change in the context of its error, as ``fields``; its message
    is "what: fix".
    """
    details = error.errors(include_url=False)
    # A refused item of a tuple makes the tuple too short as well.
    details = [
        row for row in details if row["type"] != "too_short" or len(details) == 1
    ]
    problems = []
    for detail in details:
        fields = detail.get("ctx", {}).get("fields") or [
            str(name) for name in detail["loc"][:1]
        ]
        where = ", ".join(_flag(name, names) for name in fields)
        demand = (
            detail["msg"].partition(", unable to")[0].removeprefix("Input should be ")
        )
        if detail["type"] == "missing":
            what = "is not known"
            fix = "give it"
        elif detail["msg"].startswith("Input should be "):
            what = f"{detail['input']!r} is refused"
            fix = f"give a value that is {demand}"
        else:
            what, _, fix = demand.removeprefix("Value error, ").partition(": ")
        problems.append(Problem(where, what, fix))
    return problems


def _flag(name: str, names: _Names) -> str:
    return names.get(name, f"--{name.replace('_', '-')}")
