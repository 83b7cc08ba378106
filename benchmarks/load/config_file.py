"""A YAML file of options, for calls that are too long for a command line.

    model: shape:4
    users: [1, 4, 16]
    sides: {640: 2, 1024: 1}
    attach: {stock: http://gpu-1:8000, AutoPrune: http://gpu-2:8000}

Keys are the options' names without dashes in front; what is on the command line as well wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from benchmarks.common import BenchmarkError
from benchmarks.load.option_types import OneLineParser

FLAG = "--config"


def expand_config(arguments: Sequence[str], parser: OneLineParser) -> list[str]:
    """The arguments of a command with ``--config FILE`` replaced by what the file says.

    Raises :class:`BenchmarkError` for a file that cannot be read or has another content.
    """
    rest: list[str] = []
    options: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, path = argument.partition("=")
        if flag != FLAG:
            rest.append(argument)
            continue
        path = path if equals else next(remaining, "")
        if not path:
            raise BenchmarkError(f"{FLAG}: no file is named -> {FLAG} load.yaml")
        options += _read_options(Path(path), parser)
    return [*options, *rest]


def _read_options(path: Path, parser: OneLineParser) -> list[str]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{FLAG} {path}: {error} -> name a readable YAML file") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise BenchmarkError(f"{FLAG} {path}: {reason} -> fix the YAML") from None
    if not isinstance(content, dict):
        raise BenchmarkError(f"{FLAG} {path}: is not a mapping -> write OPTION: VALUE lines")
    options: list[str] = []
    for key, value in content.items():
        option = f"--{str(key).replace('_', '-')}"
        if parser.takes_several(option) is None or option == FLAG:
            raise BenchmarkError(
                f"{FLAG} {path}: {key} is not an option{parser.suggest_option(option)}"
            )
        options += _format_option(option, value, parser)
    return options


def _format_option(option: str, value: object, parser: OneLineParser) -> list[str]:
    """The option as the command line has it."""
    if parser.is_switch(option):
        return [option] if value is True else []
    if value is None:
        return []
    several = bool(parser.takes_several(option))
    if isinstance(value, Mapping):
        parts = [f"{key}={each}" for key, each in value.items()]
    elif isinstance(value, list):
        parts = [str(each) for each in value]
    else:
        parts = [str(value)]
    return [option, *parts] if several else [f"{option}={','.join(parts)}"]
