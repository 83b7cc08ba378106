"""Options: flags and files give the same model, mistakes are answered in one line, docs parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from benchmarks.cost.__main__ import build_parser as build_cost_parser
from benchmarks.load.__main__ import COMMANDS, main, parse_arguments
from benchmarks.load.experiment import Plan, make_plan
from benchmarks.load.settings import PairedOptions, list_options
from benchmarks.load.workload import load_prepared
from benchmarks.server import free_port
from vllm_autoprune import load_state

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"
PREPARE = ["--requests", "3", "--warm-up", "1", "--sides", "32", "--words", "3=1,5=2"]


def plan(*flags: str) -> Plan:
    return make_plan(parse_arguments(["paired", *flags])[1])


def test_prepare_writes_the_described_workload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", "--model", "m", "--out", str(tmp_path / "w"), *PREPARE]) == 0
    made = load_prepared(tmp_path / "w")
    assert (len(made.measured), made.workload.words) == (3, ((3, 1.0), (5, 2.0)))
    assert made.digest in capsys.readouterr().out


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
    assert {key.replace("_", "-") for key in list_options(PairedOptions)} == OTHER.keys()
    path = tmp_path / "load.yaml"
    default = parse_arguments(["paired"])[1]
    for name, (flag, value) in OTHER.items():
        words = flag.split() if name == "attach" else [flag] if flag else []
        by_flag = parse_arguments(["paired", f"--{name}", *words])[1]
        assert by_flag != default, name
        for key in (name, name.replace("-", "_")):
            path.write_text(yaml.safe_dump({key: value}, sort_keys=False))
            assert parse_arguments(["paired", "--config", str(path)])[1] == by_flag, name


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "load.yaml"
    path.write_text("users: [1, 4]\npasses: 4\nbudget: null\n")
    _, options = parse_arguments(["paired", f"--config={path}", "--passes", "1"])
    assert (options.users, options.passes, options.budget) == ((1, 4), 1, None)


def test_help_has_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert all(str(f.description) in text for f in list_options(COMMANDS[command][1]).values())
    with pytest.raises(SystemExit, match="0"):
        main(["paired", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: 480=1,640=2,1024=1)" in text and "{unique,repeat,same-image,off}" in text


MISTAKES = {
    "--requests 0": "--requests: '0': Input should be greater than or equal to 1; measured",
    "--sides 336x": "--sides: '336x': Input should be a valid integer",
    "--sides 32=0": "--sides: '32=0': Input should be greater than 0",
    "--sides 0": "--sides: '0': Input should be greater than or equal to 1",
    "--aspects 4:3": "--aspects: '4:3': '4:3' is not width/height, such as 4/3",
    "--formats gif": "--formats: 'gif': Input should be 'jpeg' or 'png'",
    "--zipf -1": "--zipf: '-1': Input should be greater than 0",
    "--zipf inf": "--zipf: 'inf': Input should be a finite number",
    "--users a": "--users: 'a': Input should be a valid integer",
    "--users 0": "--users: '0': Input should be greater than or equal to 1; closed loops, such as",
    "--users ,": "--users: ',': Tuple should have at least 1 item",
    "--rates ,": "--rates: ',': Tuple should have at least 1 item",
    "--rates 1,fast": "--rates: '1,fast': Input should be a valid number",
    "--rates 0": "--rates: '0': Input should be greater than 0",
    "--passes 0 --pool 0": "--pool: '0': Input should be greater than or equal to 1",
    "--slo-ttft soon": "--slo-ttft: 'soon': Input should be a valid number",
    "--sidez 336": "--sidez is not an option; did you mean --sides?",
    "--cache none": "--cache: 'none': Input should be 'unique', 'repeat', 'same-image' or 'off'",
    '--server-flags "\'"': '--server-flags: "\'": No closing quotation',
    "--model out/none/such": "--model out/none/such: no such folder -> name a checkpoint",
    "--model shape:x": "--model shape:x: 'x' is not a whole number",
    "--state nosuch": "nosuch",
    "--attach a": "--attach: ['a']: expected NAME=http://HOST:PORT",
    "--attach a=ftp://x": "expected NAME=http://HOST:PORT",
    "--attach =http://x": "expected NAME=http://HOST:PORT",
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
    assert error.startswith("load: ") and error.count("\n") == 1
    assert MISTAKES[flags] in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user: 1", "load.yaml:user: is not an option; did you mean --users?"),
        ("config: x.yaml", "load.yaml:config: is not an option; see --help"),
        ("- users", "is not a mapping"),
        ("users: [1", "name a readable YAML file"),
        ("users: none", "load.yaml:users: 'none': Input should be a valid integer"),
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
    main(["prepare", "--model", "m", "--out", str(tmp_path / "w"), *PREPARE])
    url = f"http://127.0.0.1:{free_port()}"
    flags = ["run", "--url", url, "--workload", str(tmp_path / "w"), "--users", "1"]
    assert main([*flags, "--out", str(tmp_path / "run")]) == 1
    assert f"load: server {url}: /v1/models does not answer" in capsys.readouterr().err


def test_a_run_needs_a_server_and_either_a_rate_or_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (["--url", "http://x"], "load: give a --rate (open loop) or --users (closed loop)\n"),
        (
            ["--url", "http://x", "--rate", "1", "--users", "2"],
            "load: give a --rate (open loop) or --users",
        ),
        (["--users", "1"], "--url: Field required; server, such as http://127.0.0.1:8000"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["run", *flags, "--workload", str(tmp_path)])
        assert message in capsys.readouterr().err


def test_the_three_arms_differ_only_in_their_state() -> None:
    experiment = plan("--users", "1,4", "--budget", "16")
    stock, base, pruned = experiment.arms
    assert [arm.name for arm in experiment.arms] == ["stock", "base policy", "AutoPrune"]
    assert experiment.users == (1, 4) and experiment.workload.model == "served"
    assert base.flags[: len(stock.flags)] == pruned.flags[: len(stock.flags)] == stock.flags
    extra = base.flags[len(stock.flags) :]
    assert extra[:2] == ("--autoprune-state", "cdpruner")
    assert pruned.flags[len(stock.flags) :] == ("--autoprune-state", "autoprune", *extra[2:])
    assert extra[2:4] == ("--autoprune-budget", "16")
    assert (stock.digest, pruned.digest) == (None, load_state("autoprune").digest)


def test_cache_off_disables_every_cache_of_every_arm() -> None:
    stock, _, pruned = plan("--users", "1", "--cache", "off").arms
    assert "--no-enable-prefix-caching" in stock.flags and "--mm-processor-cache-gb" in stock.flags
    at = pruned.flags.index("--autoprune-feature-cache-gb")
    assert pruned.flags[at + 1] == "0"


def test_rates_are_given_or_chosen_by_capacity() -> None:
    by_hand, found = plan("--rates", "4,1.5"), plan("--rates", "find")
    assert by_hand.rates == (1.5, 4.0) and not by_hand.find_rates
    assert found.rates == () and found.find_rates


def commands(program: str) -> list[str]:
    """Commands in the page's blocks of shell, without their continuation lines."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(f"python -m {program} ")]


@pytest.mark.parametrize("command", commands("benchmarks.load"))
def test_documented_load_commands_parse(command: str) -> None:
    name, options = parse_arguments(shlex.split(command)[3:])
    if name == "paired" and "shape:" not in command:
        assert len(make_plan(options).arms) == (2 if "--attach" in command else 3)


@pytest.mark.parametrize("command", commands("benchmarks.cost"))
def test_documented_cost_commands_parse(command: str) -> None:
    arguments = shlex.split(command)[3:]
    build_cost_parser(arguments[0]).parse_args(arguments)


def test_the_documented_file_of_options_parses(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(# load.yaml.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "load.yaml"
    path.write_text(block)
    experiment = plan("--config", str(path))
    assert len(experiment.arms) == 2 and experiment.rates == (2.0, 4.0, 8.0, 16.0)
    assert len(commands("benchmarks.load")) >= 5 and len(commands("benchmarks.cost")) >= 3
