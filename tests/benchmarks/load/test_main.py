"""The command line of the load test: arguments, errors, exit status."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.common import BenchmarkError
from benchmarks.load import arguments, options
from benchmarks.load.__main__ import build_parser, main
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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--requests", "0"], "requests: Input should be greater than or equal to 1"),
        (["--sides", "32=0"], "sides: Value error, a mix needs"),
    ],
)
def test_an_invalid_workload_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], message: str
) -> None:
    given = ["prepare", "--model", "m", "--out", str(tmp_path / "w"), *PREPARE, *wrong]
    assert main(given) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


def test_a_mix_that_is_not_of_numbers_is_an_argument_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["prepare", "--model", "m", "--out", str(tmp_path / "w"), "--sides", "large"])
    assert "argument --sides: invalid whole_number_mix value: 'large'" in capsys.readouterr().err


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
