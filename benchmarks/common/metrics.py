"""Metrics that a server reports: increase of its counters and peaks of its gauges, its version.

A metric that a server does not report is None, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import httpx

from benchmarks.common import BenchmarkError, StrictModel
from vllm_autoprune.http_client import Metrics

_COUNTERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "prompt_tokens": ("vllm:prompt_tokens_total", {}),
    "generation_tokens": ("vllm:generation_tokens_total", {}),
    "prefix_cache_queries": ("vllm:prefix_cache_queries_total", {}),
    "prefix_cache_hits": ("vllm:prefix_cache_hits_total", {}),
    "mm_cache_queries": ("vllm:mm_cache_queries_total", {}),
    "mm_cache_hits": ("vllm:mm_cache_hits_total", {}),
    "preemptions": ("vllm:num_preemptions_total", {}),
    "finished": ("vllm:request_success_total", {}),
    "images": ("autoprune_images_total", {}),
    "visual_tokens_before": ("autoprune_visual_tokens_total", {"stage": "before"}),
    "visual_tokens_after": ("autoprune_visual_tokens_total", {"stage": "after"}),
}
"""By field of :class:`ServerMetrics`: the metric, and the labels that its samples need."""
_GAUGES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "peak_kv_use": ("vllm:kv_cache_usage_perc", {}),
    "peak_running": ("vllm:num_requests_running", {}),
    "peak_waiting": ("vllm:num_requests_waiting", {}),
}

Figures = Mapping[str, float]


class ServerMetrics(StrictModel):
    """Counters as differences over the run, gauges as peaks of what was polled."""

    read: bool = False
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    mm_cache_queries: float | None = None
    mm_cache_hits: float | None = None
    preemptions: float | None = None
    finished: float | None = None
    """Requests, of any client."""
    images: float | None = None
    visual_tokens_before: float | None = None
    visual_tokens_after: float | None = None
    peak_kv_use: float | None = None
    peak_running: float | None = None
    peak_waiting: float | None = None


def read_figures(exposition: str) -> Figures:
    """The figures of one answer of ``/metrics``, summed over engines; absent ones are left out."""
    wanted = {**_COUNTERS, **_GAUGES}
    # To parse all of /metrics takes 20 ms, which would delay the time stamps of a load client.
    names = tuple(name for name, _ in wanted.values())
    lines = (line for line in exposition.splitlines() if line.startswith(names))
    metrics = Metrics("\n".join(lines) + "\n")
    values = {field: metrics.total(name, **labels) for field, (name, labels) in wanted.items()}
    return {field: value for field, value in values.items() if value is not None}


def fetch(url: str, path: str = "/metrics") -> str | None:
    """The body of a GET request; None where the server does not answer with status 200."""
    try:
        answer = _connect().get(url.rstrip("/") + path)
    except httpx.HTTPError:
        return None
    return answer.text if answer.status_code == 200 else None


@cache
def _connect() -> httpx.Client:
    return httpx.Client(timeout=10.0)  # once, because a client takes 60 ms to make


def list_models(url: str) -> list[str]:
    """Names of the models that a server has; raises :class:`BenchmarkError` where it is down."""
    text = fetch(url, "/v1/models")
    if text is None:
        raise BenchmarkError(
            f"server {url}: /v1/models does not answer -> start it, or fix the URL"
        )
    try:
        return [str(model["id"]) for model in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError):
        raise BenchmarkError(f"server {url}: /v1/models is not a list of models") from None


def server_info(url: str) -> dict[str, str]:
    """Version and pruning state, from ``/version`` and the plugin's ``/v1/autoprune``, if any."""
    info: dict[str, str] = {}
    version = _fetch_object(url, "/version").get("version")
    if isinstance(version, str):
        info["server version"] = version
    state = _fetch_object(url, "/v1/autoprune")
    for name in ("state", "digest", "version"):
        value = state.get(name)
        if isinstance(value, str):
            info[f"autoprune {name}"] = value
    budget = state.get("budget")
    if isinstance(budget, dict) and "k" in budget:
        info["autoprune budget"] = str(budget["k"])
    return info


def _fetch_object(url: str, path: str) -> Mapping[str, object]:
    try:
        content = json.loads(fetch(url, path) or "{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


@dataclass
class MetricsWatcher:
    """Reads one server's figures, from just before the first request to just after the last."""

    url: str
    first: Figures | None = None
    last: Figures | None = None
    peaks: dict[str, float] = field(default_factory=dict)

    def update(self) -> None:
        """Read once more; nothing changes where the server does not answer."""
        text = fetch(self.url)
        figures = read_figures(text) if text is not None else {}
        if not figures:
            return
        self.first = self.first or figures
        self.last = figures
        for name in _GAUGES:
            if name in figures:
                self.peaks[name] = max(self.peaks.get(name, 0.0), figures[name])

    def metrics(self) -> ServerMetrics:
        """Differences and peaks of what has been read so far."""
        if self.first is None or self.last is None:
            return ServerMetrics()
        first, last = self.first, self.last
        # A labelled counter appears with its first event, so that before it there was none.
        counted = {name: last[name] - first.get(name, 0.0) for name in _COUNTERS if name in last}
        return ServerMetrics.model_validate({"read": True, **counted, **self.peaks})
