"""What ends an evaluation before all of its answers are there.

Knows nothing about single requests that fail: those are recorded and judged.
"""

from __future__ import annotations

from vllm_autoprune.errors import AutopruneError


class EvaluationError(AutopruneError):
    """No evaluation can begin or go on; says why and how to fix it. What was recorded is kept."""
