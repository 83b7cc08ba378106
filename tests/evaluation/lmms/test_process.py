"""Errors in the log of lmms-eval 0.7.3, with lines as it wrote them, in colour."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_autoprune.evaluation.lmms.suite import last_error

AT = "\x1b[32m2026-11-22 02:35:34\x1b[0m | \x1b[31m\x1b[1mERROR   \x1b[0m | "
WHERE = "\x1b[36mlmms_eval.__main__\x1b[0m:\x1b[36mcli_evaluate\x1b[0m:\x1b[36m614\x1b[0m - "
ERROR = (
    f"{AT}{WHERE}\x1b[31m\x1b[1mError during evaluation: No tasks specified, or no tasks found. "
    "Please verify the task names.. Please set `--verbosity=DEBUG` to get more information.\x1b[0m"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"Traceback (most recent call last):\n{ERROR}\n",
            "No tasks specified, or no tasks found. Please verify the task names.",
        ),
        ("\x1b[1mKilled\x1b[0m\n\n", "Killed"),
        ("Responding:   0%\rResponding:  50%\rout of memory\n", "out of memory"),
        ("", "its log is empty"),
    ],
)
def test_the_last_error_is_read_from_the_log(tmp_path: Path, text: str, message: str) -> None:
    log = tmp_path / "lmms-eval.log"
    log.write_text(text)
    assert last_error(log) == message
