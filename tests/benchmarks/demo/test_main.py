"""Arguments, and the one line that a failure ends with."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.demo.__main__ import main, parser
from benchmarks.demo.failure import one_line
from benchmarks.demo.stop import SIGNALS
from benchmarks.server import ServerDied


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """`main` takes the signals over, for good in a process of its own."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def test_a_folder_without_a_checkpoint_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tmp_path), "--out", str(tmp_path / "out")]) == 1

    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == f"demo: {tmp_path} holds no checkpoint (model.safetensors)\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [["--scenes", "0"], ["--scenes", "x"], ["--rounds", "1"]])
def test_numbers_out_of_range_are_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(wrong)

    assert caught.value.code == 2
    assert "is not a whole number from" in capsys.readouterr().err


def test_a_server_that_did_not_start_is_told_by_its_last_error() -> None:
    log = "INFO loading\nvllm-autoprune: cannot serve pruned: no such state\nINFO bye"

    told = one_line(ServerDied(f"vllm serve ended with 1:\n{log}"))

    assert told == (
        "the server did not start: vllm-autoprune: cannot serve pruned: no such state "
        "(its log lies under --out)"
    )


def test_any_other_failure_names_its_type() -> None:
    assert one_line(ValueError("odd")) == "ValueError: odd"
