"""Prometheus counters of the API server; those of workers are in ``worker.metrics``.

Names do not begin with "vllm:", because vLLM drops every collector that does when it sets up its
own (``unregister_vllm_metrics``).
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter

from vllm_autoprune.serving.api.pruning_choice import ImageChoice

_REQUESTS = Counter(
    "autoprune_requests",
    "Requests with images that the engine was handed, by the state that they ran: a name, "
    "'request' for a state of their own, 'off' for none.",
    ["state"],
)
_REFUSED = Counter("autoprune_requests_refused", "Requests whose autoprune entry was refused.")
_IMAGES = Counter(
    "autoprune_images", "Images of those requests, by what chose their tokens.", ["chooser"]
)
_TOKENS = Counter(
    "autoprune_visual_tokens", "Their visual tokens: as the model has them, and kept.", ["stage"]
)
_CORE_TOKENS = Counter(
    "autoprune_core_tokens",
    "Kept visual tokens served as the core of their image, which questions about it share.",
)
_RECALLED_TOKENS = Counter(
    "autoprune_recalled_tokens",
    "Kept visual tokens that later turns of a conversation recalled, beside those of its images.",
)
_KV_BYTES = Counter(
    "autoprune_kv_bytes_saved",
    "Bytes of KV cache that visual tokens would have taken and did not, where nothing is shared.",
)


def count_request(state: str, choices: Iterable[ImageChoice], kv_bytes: int) -> None:
    """Count one request and its images; ``kv_bytes`` is the KV cache of one token."""
    _REQUESTS.labels(state).inc()
    for choice in choices:
        _IMAGES.labels(choice.keep).inc()
        _TOKENS.labels("before").inc(choice.tokens)
        after = choice.kept + choice.recalled
        _TOKENS.labels("after").inc(after)
        _CORE_TOKENS.inc(choice.core)
        _RECALLED_TOKENS.inc(choice.recalled)
        _KV_BYTES.inc((choice.tokens - after) * kv_bytes)


def count_refused_request() -> None:
    """Count one request that is refused."""
    _REFUSED.inc()
