"""Settings of all tests: repeatable examples, one thread, the quick and the exhaustive run."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,  # a busy machine takes several times as long
    max_examples=25,
)
settings.load_profile("repeatable")

# Text wraps at the width that a pipe has, with and without xdist, whose workers say 80.
os.environ["COLUMNS"] = "100"
# Some tests compare bits with sums made by published code in one thread.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="also run the sweeps that `make test` leaves to `make test-all`",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark tests without a device or an engine ``cpu``; deselect the exhaustive ones.

    On a busy machine the start of one server took over 300 s, so tests of engines get 40 minutes.
    """
    for item in items:
        if item.get_closest_marker("engine") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(2400))
        if not any(item.get_closest_marker(name) for name in ("gpu", "engine")):
            item.add_marker("cpu")
    if config.getoption("exhaustive"):
        return
    exhaustive = [item for item in items if item.get_closest_marker("exhaustive")]
    if exhaustive:
        config.hook.pytest_deselected(items=exhaustive)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
