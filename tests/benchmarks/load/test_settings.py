"""Options: flags and files give the same model, mistakes are answered in one line, docs parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from benchmarks.cost.__main__ import parse_arguments as parse_cost_arguments
from benchmarks.load.__main__ import COMMANDS, main, parse_arguments
from benchmarks.load.experiment import choose_arms
from benchmarks.load.settings import PairedOptions, ReportOptions
from benchmarks.server import free_port

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"


def paired(*flags: str) -> PairedOptions:
    _, options = parse_arguments(["paired", *flags])
    assert isinstance(options, PairedOptions)
    return options


OTHER: dict[str, tuple[str, object]] = {
    "requests": ("7", 7), "warm-up": ("0", 0), "output-tokens": ("3", 3), "cache": ("off", "off"),
    "pool": ("4", 4), "zipf": ("0.5", 0.5), "sides": ("640=2,1024", {640: 2, 1024: 1}),
    "aspects": ("4/3=2,1/1", {"4/3": 2, "1/1": 1}), "images": ("1=3,2=1", {1: 3, 2: 1}),
    "formats": ("png", "png"), "words": ("5", [5]), "vocabulary": ("numbered", "numbered"),
    "dialect": ("openai", "openai"), "data": ("d", "d"), "seed": ("5", 5), "model": ("m/m", "m/m"),
    "tower-layers": ("2", 2), "width": ("64", 64), "state": ("s.json", "s.json"),
    "budget": ("16", 16), "text-tower": ("t", "t"), "server-flags": ("-a 'b c'", ["-a", "b c"]),
    "kv-cache-gb": ("2", 2), "attach": ("a=http://a:1 b=http://b", {"a": "http://a:1", "b": "http://b"}),
    "served-name": ("7", 7), "users": ("1,4", [1, 4]), "rates": ("4,1.5", [1.5, 4]),
    "burstiness": ("0.5", 0.5), "passes": ("1", 1), "out": ("o", "o"), "workers": ("2", 2),
    "patience": ("20", 20), "most": ("64", 64), "slo-ttft": ("0", 0), "slo-tpot": ("50", 50),
    "slo-e2e": ("2000.5", 2000.5), "json": ("", True),
}  # fmt: skip
"""Of each option of ``paired`` a value that is not the default, as a flag and in a file."""


def test_each_option_of_a_file_is_that_of_its_flag(tmp_path: Path) -> None:
    names = {name.removeprefix("as_").replace("_", "-") for name in PairedOptions.model_fields}
    assert names == OTHER.keys()
    path = tmp_path / "load.yaml"
    for name, (flag, value) in OTHER.items():
        words = flag.split() if name == "attach" else [flag] if flag else []
        by_flag = paired(f"--{name}", *words)
        assert by_flag != paired(), name
        for key in (name, name.replace("-", "_")):
            path.write_text(yaml.safe_dump({key: value}, sort_keys=False))
            assert paired("--config", str(path)) == by_flag, name


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "load.yaml"
    path.write_text("users: [1, 4]\npasses: 4\nbudget: null\n")
    options = paired(f"--config={path}", "--passes", "1")
    assert (options.users, options.passes, options.budget) == ((1, 4), 1, None)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = "".join(capsys.readouterr().out.split())
    _, model, _ = COMMANDS[command]
    fields = [] if model is ReportOptions else model.model_fields.values()
    assert [f.description for f in fields if "".join(str(f.description).split()) not in text] == []
    assert "--config" in text


MISTAKES = {
    "--requests 0": "--requests: '0' is refused -> give a value that is greater than or equal to 1",
    "--sides 32=0": "--sides: '0' is refused -> give a value that is greater than 0",
    "--sides 0": "--sides: '0' is refused -> give a value that is greater than or equal to 1",
    "--aspects 4:3": "--aspects: '4:3' is no aspect -> give width/height, such as 4/3",
    "--formats gif": "--formats: 'gif' is refused -> give a value that is 'jpeg' or 'png'",
    "--zipf inf": "--zipf: 'inf' is refused",
    "--users a": "--users: 'a' is refused",
    "--users ,": "--users: ',' is no list -> give at least one value",
    "--passes 0 --pool 0": "--pool: '0' is refused",
    "--sidez 336": "unrecognized arguments: --sidez 336",
    "--cache none": "--cache: 'none' is refused -> give a value that is 'unique', 'repeat', ",
    '--server-flags "\'"': "--server-flags: No closing quotation -> close the quotation",
    "--model out/none/such": "--model out/none/such: no such folder -> name a checkpoint",
    "--model shape:x": "--model shape:x: 'x' is not a whole number",
    "--state nosuch": "nosuch",
    "--attach a": "--attach: 'a' is no server -> give NAME=http://HOST:PORT",
    "--attach a=http://x a=http://y": "two servers have the same name",
    "--config none.yaml": "--config none.yaml: [Errno 2]",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_answered_in_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("benchmarks.load.experiment.serve_arm", start)
    command = ["paired", "--users", "1", "--out", str(tmp_path / "o"), *shlex.split(flags)]
    try:
        status: object = main(command)
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status in (1, 2) and not (tmp_path / "o").exists()
    assert MISTAKES[flags] in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user: 1", "load.yaml:user: is no option -> did you mean 'users'?"),
        ("config: x.yaml", "load.yaml:config: is no option"),
        ("- users", "is no mapping"),
        ("users: [1", "load.yaml: while parsing"),
        ("users: none", "load.yaml:users: 'none' is refused"),
    ],
)
def test_mistakes_in_a_file_of_options_are_answered_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "load.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["paired", f"--config={path}"])
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_server_that_is_down_exits_with_1_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--requests", "3", "--warm-up", "1", "--sides", "32"]
    assert main(["prepare", "--model", "m", "--out", str(tmp_path / "w"), *small]) == 0
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["run", "--url", url, "--workload", str(tmp_path / "w"), "--users", "1"]) == 1
    error = capsys.readouterr().err
    assert "does not answer" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--url: "),
        (["--url", "http://x"], "a run has one load -> give --rate"),
        (["--url", "http://x", "--rate", "2", "--users", "1"], "a run has one load"),
    ],
)
def test_a_run_needs_a_server_and_one_load(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", *flags, "--workload", str(tmp_path)])
    assert message in capsys.readouterr().err


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


def test_the_documented_file_of_options_parses(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(# load.yaml.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "load.yaml"
    path.write_text(block)
    options = paired("--config", str(path))
    assert len(choose_arms(options)) == 2 and options.rates == (2.0, 4.0, 8.0, 16.0)
    assert len(commands("benchmarks.load")) >= 5 and len(commands("benchmarks.cost")) >= 3
