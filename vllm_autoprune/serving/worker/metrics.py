"""Metrics of a worker, written to files that the API servers' ``/metrics`` reads."""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from vllm_autoprune.serving.worker.features import ImageFeatures, TensorCache
from vllm_autoprune.serving.worker.selection import FallbackReporter


class Stopwatch:
    """Timer of blocks of work on one device; times of finished blocks are collected later.

    On CUDA a block is enclosed in two events, without waiting for them: unfinished blocks are
    collected next time. On a CPU the work is finished when the block ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._finished: list[float] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time a block; a block that raises is not timed."""
        if not self._cuda:
            start_time = time.perf_counter()
            yield
            self._finished.append(time.perf_counter() - start_time)
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._running.append((start, end))

    def collect(self) -> list[float]:
        """Seconds of every finished block that has not been collected yet, in order."""
        while self._running and self._running[0][1].query():
            start, end = self._running.popleft()
            self._finished.append(start.elapsed_time(end) / 1000)
        finished = self._finished
        self._finished = []
        return finished


logger = logging.getLogger("vllm.autoprune")

SELECTION = "autoprune_selection_seconds"
FALLBACKS = "autoprune_fallbacks"
_ERRORS = "autoprune_selection_errors"
HITS = "autoprune_feature_cache_hits"
MISSES = "autoprune_feature_cache_misses"
_CACHE_BYTES = "autoprune_feature_cache_bytes"

HELP: Mapping[str, str] = {
    SELECTION: "Seconds that one selection took, over the images of one step.",
    FALLBACKS: "Images whose selection failed: the fallback that chose their tokens, and why.",
    _ERRORS: "Exceptions within selection, by type.",
    HITS: "Images whose features were there already, so that the vision tower was skipped.",
    MISSES: "Images that went through the vision tower.",
    _CACHE_BYTES: "Bytes that the feature caches hold now.",
}

_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, float("inf"),
)  # fmt: skip
_EDGES = tuple("+Inf" if edge == float("inf") else repr(edge) for edge in _BUCKETS)

_Labels = tuple[tuple[str, str], ...]


class WorkerMetrics:
    """Writer of one worker's totals; totals are overwritten, so writing is idempotent.

    Of the ranks that count the same events, only one may write. If the folder cannot be written,
    that is logged once, and counting goes on.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._files: dict[str, MmapedDict] = {}
        self._writes = True
        self._seconds = [0] * len(_BUCKETS)
        self._sum = 0.0

    def publish(
        self,
        watch: Stopwatch,
        reporter: FallbackReporter,
        cache: TensorCache[ImageFeatures],
    ) -> None:
        """Write all totals so far; gauges of several workers are summed."""
        for duration in watch.collect():
            self._seconds[bisect_left(_BUCKETS, duration)] += 1
            self._sum += duration
        for edge, count in zip(_EDGES, self._seconds, strict=True):
            self._write("histogram", SELECTION, count, (("le", edge),), "_bucket")
        self._write("histogram", SELECTION, self._sum, suffix="_sum")
        for (kind, reason), count in reporter.counts().items():
            if kind != "none":
                labels = ("fallback", kind), ("reason", reason)
                self._write("counter", FALLBACKS, count, labels)
        for error, count in reporter.errors.items():
            self._write("counter", _ERRORS, count, (("error", error),))
        self._write("counter", HITS, cache.hits)
        self._write("counter", MISSES, cache.misses)
        self._write("gauge_livesum", _CACHE_BYTES, cache.used_bytes)

    def close(self) -> None:
        """Close the files; those of a worker process are closed by its exit."""
        for file in self._files.values():
            file.close()  # type: ignore[no-untyped-call]
        self._files.clear()

    def _write(
        self, kind: str, name: str, value: float, labels: _Labels = (), suffix: str = ""
    ) -> None:
        if not self._writes:
            return
        try:
            if kind not in self._files:
                # Separate from prometheus_client's own files of this process, if there are any.
                path = self._folder / f"{kind}_autoprune-{os.getpid()}.db"
                self._files[kind] = MmapedDict(str(path))  # type: ignore[no-untyped-call]
            key = _key(name, suffix or "_total" * (kind == "counter"), labels)
            self._files[kind].write_value(key, float(value), 0.0)  # type: ignore[no-untyped-call]
        except OSError as error:
            self._writes = False
            logger.warning(
                "This worker's metrics cannot be written to %s: %s.",
                self._folder,
                error,
            )


@cache
def _key(name: str, suffix: str, labels: _Labels) -> str:
    """Key in prometheus_client's file; cached, because every key is written at every step."""
    keys = [key for key, _ in labels]
    values = [text for _, text in labels]
    return mmap_key(name, name + suffix, keys, values, HELP[name])
