"""The columns of memory and score: no GPU, wrong answers and failed requests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.common import BenchmarkError
from benchmarks.common.client import EMPTY, Client
from benchmarks.common.request_record import Record
from benchmarks.cost.efficiency.measure import (
    DeviceMemory,
    Pass,
    measure_score,
    read_device_memory,
)
from benchmarks.cost.efficiency.table import COLUMNS, markdown
from benchmarks.server import Server
from tests.benchmarks.cost.efficiency.test_table import MODEL
from tests.benchmarks.load.samples import record


class FakeClient(Client):
    """Gives every question the same answer; with ``failure``, every third request fails."""

    def __init__(self, text: str, failure: str | None = None) -> None:
        super().__init__("http://127.0.0.1:1")
        self.text, self.failure, self.asked = text, failure, itertools.count()

    def send(self, body: bytes, **_: object) -> Record:
        failed = self.failure is not None and next(self.asked) % 3 == 0
        return record(0, error=self.failure if failed else None, text="" if failed else self.text)


def test_an_answer_without_text_is_wrong() -> None:
    whole, _ = measure_score(FakeClient("yes"), 1)
    silent, _ = measure_score(FakeClient("yes", EMPTY), 1)
    assert 0 < silent < whole


def test_a_failed_request_raises() -> None:
    with pytest.raises(BenchmarkError, match="status 500"):
        measure_score(FakeClient("yes", "status 500: out of memory"), 1)


class Worker(DeviceMemory):
    """A worker on a device that need not exist."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


class OneWorker(Server):
    """A server whose endpoint calls one worker, as vLLM's /collective_rpc."""

    worker: DeviceMemory

    def post(
        self, path: str, body: Mapping[str, object], headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, object]]:
        peak = getattr(self.worker, str(body["method"]))()
        return 200, {"results": [peak if peak is None else str(peak)]}


def memory_cell(device: str) -> str:
    server = OneWorker("http://h", "m", None, Path())  # type: ignore[arg-type]
    object.__setattr__(server, "worker", Worker(device))
    row = Pass(ttft=(0.1,), prefill=0.1, decode=(0.01,), prompt_tokens=9, visual_tokens=None,
               device_memory=read_device_memory(server))  # fmt: skip
    lines = [line for line in markdown(MODEL, 320, {"full": [row]}) if "| full |" in line]
    cells = lines[0].partition("| full |")[2].split("\n")[0].split("|")
    return cells[COLUMNS.index("GPU memory, MiB") - 1].strip()


def test_memory_is_that_of_the_workers_gpu_or_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = {"cuda:1": 3 << 20}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[str(device)])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks[str(device)])
    assert memory_cell("cuda:1") == "3" and memory_cell("cpu") == "not measured"
    Worker("cuda:1").reset_device_memory()
    Worker("cpu").reset_device_memory()
