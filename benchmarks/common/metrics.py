"""Metrics that a server reports: increase of its counters and peaks of its gauges, its version.

A metric that a server does not report is None, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import httpx
from pydantic import Field

from benchmarks.common import StrictModel
from vllm_autoprune.http_client import Metrics


def _metric(name: str, **labels: str) -> Any:
    """A field that is read from one metric, of the samples with these labels."""
    return Field(default=None, json_schema_extra={"metric": name, "labels": {**labels}})


class ServerMetrics(StrictModel):
    """Counters as differences over the run, gauges as peaks of what was polled."""

    read: bool = False
    prefix_cache_queries: float | None = _metric("vllm:prefix_cache_queries_total")
    prefix_cache_hits: float | None = _metric("vllm:prefix_cache_hits_total")
    mm_cache_queries: float | None = _metric("vllm:mm_cache_queries_total")
    mm_cache_hits: float | None = _metric("vllm:mm_cache_hits_total")
    finished: float | None = _metric("vllm:request_success_total")
    """Requests, of any client."""
    images: float | None = _metric("autoprune_images_total")
    visual_tokens_before: float | None = _metric("autoprune_visual_tokens_total", stage="before")
    visual_tokens_after: float | None = _metric("autoprune_visual_tokens_total", stage="after")
    peak_kv_use: float | None = _metric("vllm:kv_cache_usage_perc")


_METRICS: Mapping[str, Mapping[str, Any]] = {
    name: extra
    for name, field in ServerMetrics.model_fields.items()
    if isinstance(extra := field.json_schema_extra, dict)
}


def _fetch(url: str, path: str) -> str | None:
    """The body of a GET request; None where the server does not answer with status 200."""
    try:
        answer = _connect().get(url.rstrip("/") + path)
    except httpx.HTTPError:
        return None
    return answer.text if answer.status_code == 200 else None


@cache
def _connect() -> httpx.Client:
    return httpx.Client(timeout=10.0)  # once, because a client takes 60 ms to make


def server_info(url: str) -> dict[str, str]:
    """Version and pruning state, from ``/version`` and the plugin's ``/v1/autoprune``, if any."""
    pages: list[dict[str, object]] = []
    for path in ("/version", "/v1/autoprune"):
        try:
            content = json.loads(_fetch(url, path) or "{}")
        except ValueError:
            content = None
        pages.append(content if isinstance(content, dict) else {})
    served, state = pages
    budget = state.get("budget")
    info = {
        "server version": served.get("version"),
        **{f"autoprune {name}": state.get(name) for name in ("state", "digest", "version")},
        "autoprune budget": budget.get("k") if isinstance(budget, dict) else None,
    }
    return {name: str(value) for name, value in info.items() if value is not None}


class MetricsWatcher:
    """Reads one server's figures, from just before the first request to just after the last."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._readings: list[dict[str, float]] = []

    def update(self) -> None:
        """Read once more, summed over engines; nothing changes where the server does not answer."""
        # To parse all of /metrics takes 20 ms, which would delay the time stamps of a load client.
        names = tuple(extra["metric"] for extra in _METRICS.values())
        lines = (_fetch(self._url, "/metrics") or "").splitlines()
        metrics = Metrics("".join(f"{line}\n" for line in lines if line.startswith(names)))
        totals = {
            field: metrics.total(extra["metric"], **extra["labels"])
            for field, extra in _METRICS.items()
        }
        figures = {field: total for field, total in totals.items() if total is not None}
        if figures:
            self._readings.append(figures)

    def metrics(self) -> ServerMetrics:
        """Differences and peaks of what has been read so far."""
        if not self._readings:
            return ServerMetrics()
        before, after = self._readings[0], self._readings[-1]
        # A labelled counter appears with its first event, so that before it there was none.
        figures = {name: value - before.get(name, 0.0) for name, value in after.items()}
        for name in [name for name in after if name.startswith("peak_")]:
            figures[name] = max(reading.get(name, 0.0) for reading in self._readings)
        return ServerMetrics.model_validate({"read": True, **figures})
