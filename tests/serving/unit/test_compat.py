"""Patches of vLLM: applied once, however often they are asked for, and never one over another."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_autoprune import ConfigError
from vllm_autoprune.serving.compat import patch

pytestmark = pytest.mark.compat


class Owner:
    """A class of vLLM."""

    def method(self, value: int) -> int:
        return value

    @property
    def attribute(self) -> int:
        return 3

    @staticmethod
    def function(value: int) -> int:
        return value


@pytest.fixture
def owner() -> type[Owner]:
    return type("Owner", (), dict(vars(Owner)))


def load_plugin(owner: type, name: str) -> None:
    """Apply a patch as a plugin does at each load: by a function that is defined anew."""

    @patch(owner, name)
    def double(stock: Callable[..., int], *args: object) -> int:
        return 2 * stock(*args)


@pytest.mark.parametrize("loads", [1, 3])
def test_a_patch_is_applied_once_however_often_the_plugin_is_loaded(
    loads: int, owner: type[Owner]
) -> None:
    for name in ("method", "attribute", "function"):
        for _ in range(loads):
            load_plugin(owner, name)
    patched = owner()
    assert (patched.method(3), patched.attribute, owner.function(3)) == (6, 6, 6)


@pytest.mark.parametrize("name", ["method", "attribute", "function"])
def test_a_second_patch_of_one_name_is_refused_and_both_are_named(
    name: str, owner: type[Owner]
) -> None:
    load_plugin(owner, name)

    def halve(stock: Callable[..., int], *args: object) -> int:
        return stock(*args) // 2

    with pytest.raises(ConfigError) as caught:
        patch(owner, name)(halve)
    (problem,) = caught.value.problems
    assert problem.where == f"Owner.{name}" and problem.fix
    assert "load_plugin.<locals>.double" in problem.what
    assert problem.what.endswith("refused_and_both_are_named.<locals>.halve")
    load_plugin(owner, name)
    assert owner().method(3) == (6 if name == "method" else 3)
