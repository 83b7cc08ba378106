"""Arguments of the demo, and the one-line message of each failure."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.demo import output
from benchmarks.demo.__main__ import build_parser, main
from benchmarks.demo.failure import build_start_error, describe_failure, find_root_cause
from benchmarks.demo.interrupt import SIGNALS


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Restore the signal handlers that `main` replaces."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def test_a_folder_without_a_checkpoint_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tmp_path), "--out", str(tmp_path / "out")]) == 1

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"demo: {tmp_path} contains no checkpoint (model.safetensors)\n"
    assert not (tmp_path / "out").exists()


def test_an_invalid_state_is_refused_before_a_server_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").touch()
    arguments = [
        "--model",
        str(tmp_path),
        "--text-tower",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
    ]

    assert main([*arguments, "--state", "nosuch"]) == 1

    captured = capsys.readouterr().err
    assert captured.startswith("demo: ") and "nosuch" in captured and captured.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_start_says_dtype_and_duration_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "choose_dtype", lambda **_: "float32")
    monkeypatch.setattr("timeit.repeat", lambda *_, **__: [0.9, 0.1, 0.1])
    monkeypatch.setattr(output, "measure", lambda *_: sys.exit(3))
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path)])
    # 140 s + 1,100 x 0.1 s
    text = " ".join(capsys.readouterr().err.split())
    assert "served in float32" in text and "takes about 5 minutes here" in text


@pytest.mark.parametrize("wrong", [["--scenes", "0"], ["--scenes", "x"]])
def test_numbers_out_of_range_are_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(wrong)

    assert caught.value.code == 2
    assert "is not a whole number from" in capsys.readouterr().err


def test_the_plugin_s_refusal_is_the_root_cause(tmp_path: Path) -> None:
    log = tmp_path / "pruned.log"
    log.write_text("INFO x\n\nvllm-autoprune: cannot serve: 1 problem(s)\n  - --state: bad -> fix")

    assert describe_failure(build_start_error(log)) == (
        f"the server did not start: cannot serve: 1 problem(s) - --state: bad -> fix (log: {log})"
    )


def test_the_first_error_of_the_log_is_the_root_cause() -> None:
    log = (
        "INFO loading\n"
        "(Worker pid=7) ERROR 11-21 11:28:09 [executor.py:953] Traceback (most recent call last):\n"
        "(Worker pid=7) ERROR 11-21 11:28:09 [executor.py:953] NameError: name 'x'\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )

    assert find_root_cause(log) == "NameError: name 'x'"
    assert find_root_cause("INFO loading\nKilled\n") == "Killed"
    assert find_root_cause("") == "no output"


def test_any_other_failure_names_its_type() -> None:
    assert describe_failure(ValueError("odd")) == "ValueError: odd"
