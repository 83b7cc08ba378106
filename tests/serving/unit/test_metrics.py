"""Metrics of workers, shown by API servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from tests.serving.unit.samples import vllm_config
from vllm_autoprune.serving import served_state as under_test
from vllm_autoprune.serving.served_state import (
    MULTIPROCESS,
    attach_metrics_setup,
    find_metrics_setup,
)
from vllm_autoprune.serving.worker.metrics import SELECTION, Stopwatch, WorkerMetrics


def shown(folder: Path) -> dict[str, float]:
    """Metrics that an API server exports from a folder."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))  # type: ignore[no-untyped-call]
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_seconds_fall_into_buckets(tmp_path: Path) -> None:
    with closing(WorkerMetrics(str(tmp_path))) as worker:
        worker.add_selections([0.0005, 0.001, 0.3])
        worker.add_selections([99.0])
    metrics = shown(tmp_path)
    edges = {f'{SELECTION}_bucket{{le="{edge}"}}': n for edge, n in
             (("0.001", 2), ("0.25", 2), ("0.5", 3), ("2.5", 3), ("+Inf", 4))}  # fmt: skip
    assert {name: metrics[name] for name in edges} == edges
    assert metrics[f"{SELECTION}_sum"] == pytest.approx(99.3015)


def test_workers_add_up_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for process, hits in ((10, 3), (11, 4)):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        with closing(WorkerMetrics(str(tmp_path))) as worker:
            worker.set_counter("autoprune_feature_cache_hits", hits)
    assert shown(tmp_path)["autoprune_feature_cache_hits_total"] == 7


def test_missing_folder_is_logged_once(tmp_path: Path, logged: pytest.LogCaptureFixture) -> None:
    """The API server is on another machine."""
    worker = WorkerMetrics(str(tmp_path / "elsewhere"))
    for _ in range(3):
        worker.set_counter("autoprune_feature_cache_hits", 1)
    (record,) = logged.records
    assert "elsewhere" in record.getMessage()


# ---- the folder of metrics ----


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process without a metrics folder; restores the registry afterwards."""
    monkeypatch.delenv(MULTIPROCESS, raising=False)
    under_test._shared_folder.cache_clear()
    known = list(REGISTRY._collector_to_names)
    yield
    for collector in [c for c in REGISTRY._collector_to_names if c not in known]:
        REGISTRY.unregister(collector)
    under_test._shared_folder.cache_clear()


def opened() -> Any:
    config = vllm_config()
    attach_metrics_setup(config)
    setup = find_metrics_setup(config.model_config)
    assert setup is not None
    return setup


def test_bytes_of_one_token() -> None:
    assert opened().kv_bytes == 2 * 4 * 6 * 32 * 2
    config = vllm_config()
    config.cache_config.cache_dtype = "fp8"
    attach_metrics_setup(config)
    setup = find_metrics_setup(config.model_config)
    assert setup is not None and setup.kv_bytes == 2 * 4 * 6 * 32


# ---- times ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_collect_does_not_wait_for_the_gpu() -> None:
    watch = Stopwatch(torch.device("cuda"))
    with watch.measure():
        torch.cuda._sleep(200_000_000)
    assert watch.collect() == []
    torch.cuda.synchronize()
    (seconds,) = watch.collect()
    assert seconds > 0.01
