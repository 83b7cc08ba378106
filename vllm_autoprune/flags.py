"""Command-line flags from the fields of pydantic models.

A field's description is the help and its title the metavar. A boolean field is a switch, a list
may be given several times, a tuple takes several values.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticUndefined

from vllm_autoprune.errors import Problem

_M = TypeVar("_M", bound=BaseModel)

Names = Mapping[str, str]
"""Flags whose name differs from that of their field."""


def name_flag(name: str, names: Names) -> str:
    """The flag of a field."""
    return names.get(name, f"--{name.replace('_', '-')}")


def add_flags(
    group: argparse._ArgumentGroup,
    model: type[BaseModel],
    names: Names,
    fields: Sequence[str] | None = None,
    readers: Mapping[str, Any] | None = None,
    prefix: str = "",
    action: type[argparse.Action] | None = None,
) -> None:
    """Add a flag for each field; those that are not given are left to the model's defaults.

    ``readers``: what argparse reads the value of a field with, not the model. ``prefix`` stands
    before the names of all. ``action`` takes the values of a model whose texts name its defaults.
    """
    for name in fields or model.model_fields:
        field = model.model_fields[name]
        keywords: dict[str, Any] = {"dest": prefix + name, "default": argparse.SUPPRESS}
        text = field.description or ""
        if action is None:
            text += _describe_default(field)
        shape = get_origin(field.annotation)
        if field.annotation is bool:
            keywords["action"] = "store_true"
        else:
            titles = tuple((field.title or name.upper()).split())
            keywords["metavar"] = titles if len(titles) > 1 else titles[0]
        if readers is not None:
            keywords["type"] = readers[name]
        if shape is tuple:
            types = get_args(field.annotation)
            keywords["nargs"] = "+" if types[-1] is Ellipsis else len(types)
        elif shape is list:
            keywords["action"] = "append"
        if action is not None:
            keywords["action"] = action
        keywords["help"] = text.replace("%", "%%")
        group.add_argument(name_flag(prefix + name, names), **keywords)


def _describe_default(field: FieldInfo) -> str:
    default = field.default
    is_empty = default in (None, "", (), [], PydanticUndefined)
    if is_empty or field.annotation is bool:
        return ""
    values = default if isinstance(default, tuple) else (default,)
    return f" (default: {' '.join(map(str, values))})"


def read_flags(model: type[_M], options: argparse.Namespace) -> _M:
    """The model with the values of the flags that were given; raises pydantic's error."""
    return model.model_validate(
        {n: v for n, v in vars(options).items() if n in model.model_fields}
    )


def refuse_value(what: str, fix: str, *fields: str) -> PydanticCustomError:
    """The error that a validator raises, which :func:`flag_problems` reads.

    ``fields``: those to change, where it is not that of the validator.
    """
    context = {"what": what, "fix": fix, "fields": fields}
    return PydanticCustomError("refused", "{what}: {fix}", context)


def flag_problems(error: ValidationError, names: Names) -> list[Problem]:
    """What is wrong with which flags, as :func:`refuse_value` or pydantic says."""
    details = error.errors(include_url=False)
    # A refused item of a tuple makes the tuple too short as well.
    if len(details) > 1:
        details = [detail for detail in details if detail["type"] != "too_short"]
    problems = []
    for detail in details:
        context = detail.get("ctx", {})
        fields = context.get("fields") or map(str, detail["loc"][:1])
        where = ", ".join(name_flag(name, names) for name in fields)
        demand = detail["msg"].partition(", unable to")[0]
        if detail["type"] == "missing":
            what = "is not known"
            fix = "give it"
        elif demand.startswith("Input should be "):
            what = f"{detail['input']!r} is refused"
            fix = f"give a value that is {demand.removeprefix('Input should be ')}"
        elif detail["type"] == "refused":
            what = context["what"]
            fix = context["fix"]
        else:
            what = f"{detail['input']!r} is refused"
            fix = demand.removeprefix("Value error, ")
        problems.append(Problem(where, what, fix))
    return problems
