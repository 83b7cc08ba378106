"""What all tests share: no random order of examples, one thread, and the marker ``cpu``."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from hypothesis import settings

settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=timedelta(seconds=5),
    max_examples=25,
)
settings.load_profile("repeatable")

# Some tests compare bits with sums made by published code in one thread.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``cpu`` whatever does not ask for a device or an engine."""
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("gpu", "engine")):
            item.add_marker("cpu")
