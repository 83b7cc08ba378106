"""The base of every record that is written to a file: frozen, and strict about unknown fields.

Knows nothing about what is recorded.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Plain(BaseModel):
    """Data without behaviour; a field that is not known is an error, not a surprise."""

    model_config = ConfigDict(frozen=True, extra="forbid")
