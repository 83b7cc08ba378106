"""Options: mistakes are answered in one line before anything starts; the page's commands parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.cost.__main__ import parse_arguments as parse_cost_arguments
from benchmarks.load.__main__ import main, parse_arguments
from benchmarks.load.paired import choose_arms
from benchmarks.load.settings import PairedOptions
from vllm_autoprune import load_state

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"

VALUES = {
    "--sides 640=2,1024": ("sides", {640: 2, 1024: 1}),
    "--images 1=3,2=1": ("images", {1: 3, 2: 1}),
    "--users 1,4": ("users", (1, 4)),
    "--rates 4,1.5": ("rates", (4, 1.5)),
    "--rates find": ("rates", "find"),
    "--attach a=http://a:1 b=https://b": ("attach", ("a=http://a:1", "b=https://b")),
    "--server-flags=\"-a 'b c'\"": ("server_flags", "-a 'b c'"),
    "--json": ("as_json", True),
}


@pytest.mark.parametrize("flags", VALUES)
def test_values_of_flags(flags: str) -> None:
    _, options = parse_arguments(["paired", *shlex.split(flags)])
    name, value = VALUES[flags]
    assert getattr(options, name) == value
    assert PairedOptions.model_validate_json(options.model_dump_json()) == options


MISTAKES = {
    "--requests 0": "--requests: '0' is refused -> give a value that is greater than or equal to 1",
    "--sides 32=0": "--sides: '0' is refused -> give a value that is greater than 0",
    "--sides 0": "--sides: '0' is refused -> give a value that is greater than or equal to 1",
    "--zipf inf": "--zipf: 'inf' is refused",
    "--users a": "--users: 'a' is refused",
    "--users ,": "--users: '' is refused",
    "--passes 0 --pool 0": "--pool: '0' is refused",
    "--sidez 336": "unrecognized arguments: --sidez 336",
    "--cache none": "--cache: 'none' is refused -> give a value that is 'unique', 'repeat', ",
    '--server-flags "\'"': "--server-flags: No closing quotation -> close the quotation",
    "--model out/none/such": "--model out/none/such: no such folder -> name a checkpoint",
    "--model shape:x": "--model shape:x: 'x' is not a whole number",
    "--state nosuch": "nosuch",
    "--attach a": "--attach: 'a' is no server -> give NAME=http://HOST:PORT",
    "--attach a=http://x a=http://y": "two servers have the same name",
    "": "nothing to measure -> give --users or --rates",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_answered_in_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("benchmarks.load.paired._serve", start)
    users = [] if not flags or "--users" in flags else ["--users", "1"]
    command = ["paired", *users, "--out", str(tmp_path / "o"), *shlex.split(flags)]
    try:
        status: object = main(command)
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status in (1, 2) and not (tmp_path / "o").exists()
    assert MISTAKES[flags] in error and error.count("\n") == 1


def test_the_three_arms_differ_only_in_their_state() -> None:
    stock, base, pruned = choose_arms(PairedOptions(budget=16, cache="off"))
    assert [arm.name for arm in (stock, base, pruned)] == ["stock", "base policy", "AutoPrune"]
    assert base.flags[: len(stock.flags)] == pruned.flags[: len(stock.flags)] == stock.flags
    extra = base.flags[len(stock.flags) :]
    assert extra[:4] == ("--autoprune-state", "cdpruner", "--autoprune-budget", "16")
    assert pruned.flags[len(stock.flags) :] == ("--autoprune-state", "autoprune", *extra[2:])
    assert (stock.digest, pruned.digest) == (None, load_state("autoprune").digest)
    # Every cache of every arm is off.
    assert {"--no-enable-prefix-caching", "--mm-processor-cache-gb"} < set(stock.flags)
    assert extra[extra.index("--autoprune-feature-cache-gb") + 1] == "0"


def commands(program: str) -> list[str]:
    """Commands in the page's blocks of shell, without their continuation lines."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(f"python -m {program} ")]


@pytest.mark.parametrize("command", commands("benchmarks.load"))
def test_documented_load_commands_parse(command: str) -> None:
    name, options = parse_arguments(shlex.split(command)[3:])
    if name == "paired" and "shape:" not in command:
        assert len(choose_arms(options)) == (2 if "--attach" in command else 3)


@pytest.mark.parametrize("command", commands("benchmarks.cost"))
def test_documented_cost_commands_parse(command: str) -> None:
    parse_cost_arguments(shlex.split(command)[3:])
