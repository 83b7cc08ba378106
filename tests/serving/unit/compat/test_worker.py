from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_autoprune.serving.compat import worker as patches


@pytest.mark.compat
def test_a_model_may_leave_a_request_s_delta_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.mm.rope import RopeState

    name, deltas = "update_prefill_positions", list[int]()

    def update(self: object, req_idx: int, positions: object, delta: int) -> None:
        deltas.append(delta)

    monkeypatch.setattr(RopeState, name, update)
    patches.keep_deltas()
    requests = SimpleNamespace(prefill_delta=SimpleNamespace(np=[0, -7]))
    for delta in (patches.UNCHANGED_DELTA, 3):
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
        patches.request_positions(own)
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
        patches.clear_with_worker_caches(cleared.append)
    getattr(worker, name)(*([{}] if name == "update_weights" else []))
    assert cleared == ["the model"]


@pytest.mark.compat
def test_features_are_cleared_after_a_partial_weight_update(worker: Any) -> None:
    def fail(*_: object) -> None:
        raise OSError("the trainer is gone")

    cleared: list[object] = []
    patches.clear_with_worker_caches(cleared.append)
    worker.weight_transfer_engine.update_weights = fail
    with pytest.raises(OSError, match="trainer is gone"):
        worker.update_weights({})
    assert cleared == ["the model"]
