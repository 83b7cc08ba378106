from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.serving.unit.samples import vllm_config
from vllm_autoprune.serving.shared import metrics_setup as under_test
from vllm_autoprune.serving.shared.metrics_setup import (
    MULTIPROCESS,
    attach_metrics_setup,
    find_metrics_setup,
)
from vllm_autoprune.serving.worker.metrics import MISSES, WorkerMetrics


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


def test_one_api_server_shows_what_its_workers_write() -> None:
    folder = opened().folder
    assert opened().folder == folder, "an engine more is no folder more"
    with closing(WorkerMetrics(folder)) as worker:
        worker.set_counter(MISSES, 5)
    assert REGISTRY.get_sample_value(f"{MISSES}_total") == 5


def test_several_api_servers_have_a_folder_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MULTIPROCESS, str(tmp_path))
    before = len(REGISTRY._collector_to_names)
    assert opened().folder == str(tmp_path)
    # vLLM exports all of that folder; exporting it here as well would count everything twice.
    assert len(REGISTRY._collector_to_names) == before


def test_bytes_of_one_token() -> None:
    assert opened().kv_bytes == 2 * 4 * 6 * 32 * 2
    config = vllm_config()
    config.cache_config.cache_dtype = "fp8"
    attach_metrics_setup(config)
    setup = find_metrics_setup(config.model_config)
    assert setup is not None and setup.kv_bytes == 2 * 4 * 6 * 32


def test_setup_survives_pickling() -> None:
    sent = opened()
    assert pickle.loads(pickle.dumps(sent)) == copy.deepcopy(sent) == sent
    assert os.path.isdir(sent.folder)


def test_no_setup_without_a_state() -> None:
    assert find_metrics_setup(vllm_config().model_config) is None
