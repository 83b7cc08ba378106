"""The JSON Schema's verdict on a value, independent of the loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from tests.fuzz.grammar import Json

Accepts = Callable[[Any], bool]


def plain(schema: Json) -> Accepts:
    """The verdict of ``jsonschema`` on the full schema."""
    accepts: Accepts = jsonschema.Draft202012Validator(schema).is_valid
    return accepts


def quick(schema: Json) -> Accepts:
    """The same verdict, evaluating only the branch of a ``oneOf`` that the instance's tag selects.

    The other branches cannot match, because each requires another constant, and with a hundred
    atoms they would take most of the time. A test compares the result with :func:`plain`.
    """
    plainly = jsonschema.Draft202012Validator.VALIDATORS["oneOf"]

    def one_of(validator: Any, branches: Any, instance: Any, where: Json) -> Iterator[Any]:
        field = where.get("discriminator", {}).get("propertyName")
        if field is None or not isinstance(instance, dict):
            yield from plainly(validator, branches, instance, where)
            return
        for branch in branches:
            described = schema["$defs"][branch["$ref"].rpartition("/")[2]]
            if described["properties"][field]["const"] == instance.get(field):
                yield from validator.descend(instance, branch)
                return
        yield jsonschema.ValidationError(f"no branch for {instance.get(field)!r}")

    extended = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"oneOf": one_of})
    accepts: Accepts = extended(schema).is_valid
    return accepts
