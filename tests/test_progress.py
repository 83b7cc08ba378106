from __future__ import annotations

import pytest

from tests.progress import time_left

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("elapsed", "done", "total", "left"),
    [(10.0, 5.0, 20.0, 30.0), (10.0, 0.0, 20.0, None), (10.0, 25.0, 20.0, 0.0)],
)
def test_time_left_scales_with_the_pace_so_far(
    elapsed: float, done: float, total: float, left: float | None
) -> None:
    assert time_left(elapsed, done, total) == left


def test_progress_lines_are_printed(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import tests.progress as progress\n"
        "progress.INTERVAL = 0.0\n"
        "pytest_plugins = ['tests.progress']\n"
    )
    pytester.makepyfile("def test_one(): pass\ndef test_two(): pass")
    lines = pytester.runpytest_subprocess("-q", "-p", "no:locust").stdout
    lines.fnmatch_lines(["50 % after 0:00, about 0:00 left; *", "99 % after *"])
