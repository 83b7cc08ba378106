"""What every benchmark shares: statistics, reports, the streaming client and its fake server."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from vllm_autoprune.errors import AutopruneError

__all__ = ["BenchmarkError", "StrictModel"]


class BenchmarkError(AutopruneError):
    """An invalid setting, file or server; the message says how to fix it."""


class StrictModel(BaseModel):
    """Immutable data that is written to a file; unknown fields are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
