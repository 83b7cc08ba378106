"""What a server says about itself under ``/metrics``: counted over a run, and peaks within it.

Knows nothing about clients. A figure that a server does not give is None, never 0.
"""

from __future__ import annotations

import http.client
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from benchmarks.load.plain import Plain

COUNTERS: Mapping[str, tuple[str, str]] = {
    "prompt_tokens": ("vllm:prompt_tokens_total", ""),
    "generation_tokens": ("vllm:generation_tokens_total", ""),
    "prefix_cache_queries": ("vllm:prefix_cache_queries_total", ""),
    "prefix_cache_hits": ("vllm:prefix_cache_hits_total", ""),
    "mm_cache_queries": ("vllm:mm_cache_queries_total", ""),
    "mm_cache_hits": ("vllm:mm_cache_hits_total", ""),
    "preemptions": ("vllm:num_preemptions_total", ""),
    "images": ("autoprune_images_total", ""),
    "visual_tokens_before": ("autoprune_visual_tokens_total", 'stage="before"'),
    "visual_tokens_after": ("autoprune_visual_tokens_total", 'stage="after"'),
}
"""Field, the metric it is read from, and a label that has to be there."""

GAUGES: Mapping[str, str] = {
    "peak_kv_use": "vllm:kv_cache_usage_perc",
    "peak_running": "vllm:num_requests_running",
    "peak_waiting": "vllm:num_requests_waiting",
}

Reading = Mapping[str, float]


class ServerMetrics(Plain):
    """Counters as differences over the run, gauges as peaks of what was polled."""

    read: bool = False
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    mm_cache_queries: float | None = None
    mm_cache_hits: float | None = None
    preemptions: float | None = None
    images: float | None = None
    visual_tokens_before: float | None = None
    visual_tokens_after: float | None = None
    peak_kv_use: float | None = None
    peak_running: float | None = None
    peak_waiting: float | None = None


def reading(exposition: str) -> Reading:
    """The figures of one answer of ``/metrics``, summed over engines; absent ones are left out."""
    found: dict[str, float] = {}
    wanted = [*((field, *of) for field, of in COUNTERS.items())]
    wanted += [(field, name, "") for field, name in GAUGES.items()]
    for field_name, name, label in wanted:
        lines = re.findall(rf"^{re.escape(name)}(\{{[^}}]*\}})? (\S+)$", exposition, re.MULTILINE)
        values = [float(value) for labels, value in lines if label in labels]
        if values:
            found[field_name] = sum(values)
    return found


def fetch(url: str, path: str = "/metrics", patience: float = 10.0) -> str | None:
    """The body of a GET; None where the server does not answer with one."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    make = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = make(parts.netloc, timeout=patience)
    try:
        connection.request("GET", parts.path.rstrip("/") + path)
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
        return text if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


@dataclass
class Watch:
    """Readings of one server, from just before the first request to just after the last."""

    url: str
    first: Reading | None = None
    last: Reading | None = None
    peaks: dict[str, float] = field(default_factory=dict)

    def look(self) -> None:
        """Read once more; a server that does not answer leaves what was read before."""
        text = fetch(self.url)
        found = reading(text) if text is not None else {}
        if not found:
            return
        self.first = self.first or found
        self.last = found
        for name in GAUGES:
            if name in found:
                self.peaks[name] = max(self.peaks.get(name, 0.0), found[name])

    def metrics(self) -> ServerMetrics:
        """What has been read so far."""
        if self.first is None or self.last is None:
            return ServerMetrics()
        first, last = self.first, self.last
        # A labelled counter appears with its first event, so that before it there was none.
        counted = {name: last[name] - first.get(name, 0.0) for name in COUNTERS if name in last}
        return ServerMetrics.model_validate({"read": True, **counted, **self.peaks})
