"""What ``/metrics`` says about pruning: every name, and the counters of the API server.

Knows nothing about workers, which write down their own (``worker_metrics``).

Names do not begin with "vllm:", because vLLM drops every collector that does when it sets up its
own (``unregister_vllm_metrics``).
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter

from vllm_autoprune.serving.api.pruning_choice import ImageChoice

_REQUESTS = Counter(
    "autoprune_requests",
    "Requests with images that the engine was handed, by the policy they asked for: a name, "
    "'request' for a state of their own, 'off' for none.",
    ["policy"],
)
_REFUSED = Counter("autoprune_requests_refused", "Requests whose autoprune entry was refused.")
_IMAGES = Counter("autoprune_images", "Images of those requests, by who chose tokens.", ["keep"])
_TOKENS = Counter(
    "autoprune_visual_tokens", "Their visual tokens: as the model has them, and kept.", ["stage"]
)
_KV_BYTES = Counter(
    "autoprune_kv_bytes_saved",
    "Bytes of KV cache that visual tokens would have taken and did not, where nothing is shared.",
)


def count_request(policy: str, choices: Iterable[ImageChoice], kv_bytes: int) -> None:
    """Count one request and its images."""
    _REQUESTS.labels(policy).inc()
    for choice in choices:
        _IMAGES.labels(choice.keep).inc()
        _TOKENS.labels("before").inc(choice.tokens)
        _TOKENS.labels("after").inc(choice.kept)
        _KV_BYTES.inc((choice.tokens - choice.kept) * kv_bytes)


def count_refused_request() -> None:
    """Count one request that asked for what it cannot have."""
    _REFUSED.inc()
