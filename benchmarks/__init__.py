"""Benchmarks and demos that are not part of the installed package."""

from __future__ import annotations

from vllm_autoprune.errors import AutopruneError

__all__ = ["BenchmarkError"]


class BenchmarkError(AutopruneError):
    """An invalid setting, file or server; the message says how to fix it."""
