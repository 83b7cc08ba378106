"""Tables of cases: the rows of a test that stand in the YAML file beside its module."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml  # type: ignore[import-untyped]

Test = TypeVar("Test", bound=Callable[..., object])


@cache
def read_tables(path: Path) -> dict[str, Any]:
    """Tables of a file by the name of their test without ``test_``."""
    text = path.read_text(encoding="utf-8")
    tables: dict[str, Any] = yaml.load(text, Loader=yaml.CSafeLoader)
    return tables


def parametrize_from_file(*arguments: str) -> Callable[[Test], Test]:
    """Run a test for each row of its table, a list of the values of these arguments.

    A table is a list of rows, or maps what each row shows to it.
    """

    def parametrize(test: Test) -> Test:
        path = Path(test.__code__.co_filename).with_suffix(".yaml")
        table = read_tables(path)[test.__name__.removeprefix("test_")]
        names = [*table] if isinstance(table, dict) else None
        rows = [*table.values()] if isinstance(table, dict) else table
        params = [pytest.param(*row) for row in rows]
        return pytest.mark.parametrize(arguments, params, ids=names)(test)

    return parametrize
