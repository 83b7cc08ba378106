"""What stops a load test before it has begun.

Knows nothing about failures of single requests: those are recorded and judged.
"""

from __future__ import annotations

from vllm_autoprune.errors import AutopruneError


class LoadError(AutopruneError):
    """A setting, a folder or a server with which no load test can begin; says how to fix it."""
