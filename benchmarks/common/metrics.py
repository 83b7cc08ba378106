"""Metrics that a server reports: increase of its counters and peaks of its gauges, its version.

A metric that a server does not report is None, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

import httpx

from benchmarks.common import StrictModel
from vllm_autoprune.http_client import Metrics

_COUNTERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "prefix_cache_queries": ("vllm:prefix_cache_queries_total", {}),
    "prefix_cache_hits": ("vllm:prefix_cache_hits_total", {}),
    "mm_cache_queries": ("vllm:mm_cache_queries_total", {}),
    "mm_cache_hits": ("vllm:mm_cache_hits_total", {}),
    "finished": ("vllm:request_success_total", {}),
    "images": ("autoprune_images_total", {}),
    "visual_tokens_before": ("autoprune_visual_tokens_total", {"stage": "before"}),
    "visual_tokens_after": ("autoprune_visual_tokens_total", {"stage": "after"}),
}
"""By field of :class:`ServerMetrics`: the metric, and the labels that its samples need."""
_PEAKS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "peak_kv_use": ("vllm:kv_cache_usage_perc", {}),
}


class ServerMetrics(StrictModel):
    """Counters as differences over the run, gauges as peaks of what was polled."""

    read: bool = False
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    mm_cache_queries: float | None = None
    mm_cache_hits: float | None = None
    finished: float | None = None
    """Requests, of any client."""
    images: float | None = None
    visual_tokens_before: float | None = None
    visual_tokens_after: float | None = None
    peak_kv_use: float | None = None


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
        wanted = {**_COUNTERS, **_PEAKS}
        # To parse all of /metrics takes 20 ms, which would delay the time stamps of a load client.
        names = tuple(name for name, _ in wanted.values())
        lines = (_fetch(self._url, "/metrics") or "").splitlines()
        metrics = Metrics("".join(f"{line}\n" for line in lines if line.startswith(names)))
        totals = {field: metrics.total(name, **labels) for field, (name, labels) in wanted.items()}
        figures = {field: total for field, total in totals.items() if total is not None}
        if figures:
            self._readings.append(figures)

    def metrics(self) -> ServerMetrics:
        """Differences and peaks of what has been read so far."""
        if not self._readings:
            return ServerMetrics()
        before, after = self._readings[0], self._readings[-1]
        # A labelled counter appears with its first event, so that before it there was none.
        grown = {name: after[name] - before.get(name, 0.0) for name in _COUNTERS if name in after}
        peaks = {
            name: max(values)
            for name in _PEAKS
            if (values := [figures[name] for figures in self._readings if name in figures])
        }
        return ServerMetrics.model_validate({"read": True, **grown, **peaks})
