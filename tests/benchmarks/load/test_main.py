"""The command line of the load test: arguments, errors, exit status."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest

from benchmarks.common import BenchmarkError
from benchmarks.load import arguments, options
from benchmarks.load.__main__ import build_parser, main, parse_arguments
from benchmarks.load.prepared_requests import load_prepared
from benchmarks.load.schedule import Load, Slo
from benchmarks.server import free_port
from vllm_autoprune import load_state

PREPARE = ["--requests", "3", "--warm-up", "1", "--sides", "32", "--words", "3=1,5=2"]


def test_prepare_writes_the_described_workload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", "--model", "m", "--out", str(tmp_path / "w"), *PREPARE]) == 0
    made = load_prepared(tmp_path / "w")
    assert (len(made.measured), made.workload.words) == (3, ((3, 1.0), (5, 2.0)))
    assert made.digest in capsys.readouterr().out


MISTAKES = {
    "--requests 0": "--requests: '0' is not a whole number -> give 1 or more",
    "--sides 336x": "--sides: '336x' is not a mix of whole numbers -> write VALUE=WEIGHT",
    "--sides 32=0": "--sides: '32=0' is not a mix of whole numbers",
    "--sides 0": "--sides: '0' has a value below 1",
    "--aspects 4:3": "--aspects: '4:3' is not an aspect -> give width/height",
    "--formats gif": "--formats: 'gif' is not a format -> use jpeg or png",
    "--zipf -1": "--zipf: '-1' is not a number -> give one above 0",
    "--users a": "--users: 'a' is not a list of users -> give whole numbers",
    "--users 0": "--users: '0' is not a list of users",
    "--rates 1,fast": "--rates: '1,fast' is not a list of rates -> give numbers above 0",
    "--rates 0": "--rates: '0' is not a list of rates",
    "--passes 0": "--passes: '0' is not a whole number",
    "--slo-ttft soon": "--slo-ttft: 'soon' is not a number",
    "--sidez 336": "--sidez is not an option -> did you mean --sides?",
    "--cache none": "--cache: invalid choice: 'none'",
    '--server-flags "\'"': "No closing quotation",
    "--model out/none/such": "--model out/none/such: no such folder -> name a checkpoint",
    "--model shape:x": "--model shape:x: 'x' is not a whole number",
    "--state nosuch": "nosuch",
    "--attach a": "--attach a: expected NAME=http://HOST:PORT",
    "--config none.yaml": "--config none.yaml: [Errno 2]",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_a_mistake_is_answered_in_one_line_before_anything_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    given: str,
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("benchmarks.load.paired.serve_arm", start)
    command = ["paired", "--users", "1", "--out", str(tmp_path / "o"), *shlex.split(given)]
    try:
        status: object = main(command)
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert status in (1, 2) and not (tmp_path / "o").exists()
    assert error.startswith("load: ") and error.count("\n") == 1
    assert MISTAKES[given] in error


def test_a_file_of_options_is_read_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "load.yaml"
    path.write_text(
        "users: [1, 4]\nsides: {640: 2, 1024: 1}\nwarm_up: 3\njson: true\npasses: 4\nbudget: null\n"
        "attach: {stock: http://a:1, AutoPrune: http://b:2}\nformats: png\n"
    )
    parsed = parse_arguments(["paired", "--config", str(path), "--passes", "1"])
    plan = arguments.parse_plan(parsed)
    assert plan.users == (1, 4) and plan.passes == 1 and parsed.json and parsed.budget is None
    assert plan.workload.sides == ((640, 2.0), (1024, 1.0)) and plan.workload.warm_up == 3
    assert plan.workload.formats == (("png", 1.0),)
    assert [(arm.name, arm.url) for arm in plan.arms] == [
        ("stock", "http://a:1"), ("AutoPrune", "http://b:2"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user: 1", "user is not an option -> did you mean --users?"),
        ("config: x.yaml", "config is not an option"),
        ("- users", "is not a mapping"),
        ("users: [1", "fix the YAML"),
        ("users: none", "--users: 'none' is not a list of users"),
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
    given = ["run", "--url", url, "--workload", str(tmp_path / "w"), "--users", "1"]
    assert main([*given, "--out", str(tmp_path / "run")]) == 1
    assert f"load: server {url}: /v1/models does not answer" in capsys.readouterr().err


def test_a_load_needs_a_rate_or_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--url", "http://x", "--workload", str(tmp_path)]) == 2
    assert "give a rate (open loop) or a number of users" in capsys.readouterr().err


def test_the_three_arms_differ_only_in_their_state() -> None:
    plan = arguments.parse_plan(
        build_parser().parse_args(["paired", "--users", "1,4", "--budget", "16"])
    )
    stock, base, pruned = plan.arms
    assert [arm.name for arm in plan.arms] == ["stock", "base policy", "AutoPrune"]
    assert plan.users == (1, 4) and plan.workload.model == "served"
    assert base.flags[: len(stock.flags)] == pruned.flags[: len(stock.flags)] == stock.flags
    extra = base.flags[len(stock.flags) :]
    assert extra[:2] == ("--autoprune-state", "cdpruner")
    assert pruned.flags[len(stock.flags) :] == ("--autoprune-state", "autoprune", *extra[2:])
    assert extra[2:4] == ("--autoprune-budget", "16")
    assert (stock.digest, pruned.digest) == (None, load_state("autoprune").digest)


def test_cache_off_disables_every_cache_of_every_arm() -> None:
    plan = arguments.parse_plan(
        build_parser().parse_args(["paired", "--users", "1", "--cache", "off"])
    )
    stock, _, pruned = plan.arms
    assert "--no-enable-prefix-caching" in stock.flags and "--mm-processor-cache-gb" in stock.flags
    at = pruned.flags.index("--autoprune-feature-cache-gb")
    assert pruned.flags[at + 1] == "0"


def test_rates_are_given_or_chosen_by_capacity() -> None:
    given = arguments.parse_plan(build_parser().parse_args(["paired", "--rates", "4,1.5"]))
    assert given.rates == (1.5, 4.0) and not given.find_rates
    assert arguments.parse_plan(build_parser().parse_args(["paired", "--rates", "find"])).find_rates


@pytest.mark.parametrize("pair", ["http://x", "a=ftp://x", "=http://x"])
def test_servers_are_attached_by_name_and_address(pair: str) -> None:
    with pytest.raises(BenchmarkError, match="expected NAME=http"):
        arguments.parse_plan(
            build_parser().parse_args(["paired", "--users", "1", "--attach", pair])
        )


def test_options_survive_the_command_line_round_trip() -> None:
    made = argparse.ArgumentParser()
    made.add_argument("--host")
    made.add_argument("--users", dest="num_users", type=int)
    options.add_options(made)
    wanted = options.Options(
        url="http://x",
        workload=Path("w"),
        out=Path("o"),
        label="l",
        load=Load(rate=2.5, burstiness=0.5, seed=3),
        slo=Slo(ttft=0.25, e2e=2.0),
        patience=20,
        most=64,
        first=7,
    )
    assert options.parse_options(made.parse_args(list(options.to_arguments(wanted)))) == wanted
    closed = wanted.model_copy(update={"load": Load(users=3)})
    assert options.parse_options(made.parse_args(list(options.to_arguments(closed)))).load == Load(
        users=3
    )
    with pytest.raises(BenchmarkError, match=r"--host is missing.*; --workload is missing"):
        options.parse_options(made.parse_args([]))


def test_users_are_at_least_as_many_as_workers() -> None:
    wanted = Load(users=2)
    assert options.count_users(wanted, 2) == 2 and options.count_users(Load(rate=1.0), 3) == 3
    with pytest.raises(BenchmarkError, match="3 workers cannot share 2 users"):
        options.count_users(wanted, 3)
