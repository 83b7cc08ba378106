"""Prometheus counters of the API server: images, and their visual tokens before and after.

Knows nothing about workers. They count fallbacks and cache hits for themselves and log the first
of each kind: vLLM carries no numbers of a plugin's from a worker to ``/metrics``.

Names do not begin with "vllm:", because vLLM drops every collector that does when it sets up its
own (``unregister_vllm_metrics``).
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter

from vllm_autoprune.serving.plan import Keep

_IMAGES = Counter(
    "autoprune_images", "Images of processed prompts, by who chose their tokens.", ["keep"]
)
_TOKENS = Counter(
    "autoprune_visual_tokens", "Their visual tokens: as the model has them, and kept.", ["stage"]
)


def count(keep: Keep, images: Iterable[tuple[int, int]]) -> None:
    """Count images of one prompt, each as (N, K); a prompt that is only tokenized counts too."""
    for unpruned, kept in images:
        _IMAGES.labels(keep).inc()
        _TOKENS.labels("before").inc(unpruned)
        _TOKENS.labels("after").inc(kept)
