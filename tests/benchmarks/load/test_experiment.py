"""The paired experiment: order of runs, choice of rates, early ends.

Runs are made up here; that a run really sends what it says is ``test_run``'s.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common import BenchmarkError
from benchmarks.load import experiment as module
from benchmarks.load.experiment import (
    STEPS,
    Arm,
    Paired,
    choose_arms,
    choose_rates,
    measure,
    read_paired,
)
from benchmarks.load.result import RECORDS, Result
from benchmarks.load.settings import PairedOptions, RunOptions
from benchmarks.load.workload import load_prepared
from tests.benchmarks.load.samples import record, result, write_images
from vllm_autoprune import load_state


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[RunOptions]:
    """Options of all runs; servers sustain 2 requests/s, and those named dead do not answer."""
    requested: list[RunOptions] = []

    def run(options: RunOptions) -> Result:
        requested.append(options)
        if "dead" in options.url:
            raise BenchmarkError(f"server {options.url}: /v1/models is not answered")
        rate = options.load.rate or 2.0
        late = 0.1 if rate <= 2.0 else 0.9
        records = [record(n, scheduled=n / rate, ttft=late) for n in range(20)]
        run_result = result(records, options.load, slo=options.slo)
        run_result.write(options.out)
        lines = (each.model_dump_json() + "\n" for each in records)
        (options.out / RECORDS).write_text("".join(lines))
        return run_result

    monkeypatch.setattr(module, "run", run)
    return requested


def measured(out: Path, *arms: str, **options: object) -> Paired:
    """The experiment on small requests; an arm's name is its server's."""
    small = {"requests": 8, "warm_up": 2, "output_tokens": 4, "sides": "64", "slo_ttft": 500}
    served = [Arm(name=name, url=f"http://{name}") for name in arms or "ab"]
    return measure(PairedOptions.model_validate({**small, "out": out, **options}), served)


def test_arms_alternate_and_loads_share_no_images(seen: list[RunOptions], tmp_path: Path) -> None:
    experiment = measured(tmp_path, users="1,2", rates="1")
    order = [(options.url[-1], options.load.label) for options in seen]
    loads = ["users-1", "users-2", "rate-1"]
    assert order == [(arm, label) for arm in "abba" for label in loads]
    digests = {options.load.label: load_prepared(options.workload).digest for options in seen}
    assert len(set(digests.values())) == 3
    assert len({options.out for options in seen}) == 12
    assert [run.arm for run in experiment.runs] == [arm for arm in "abba" for _ in loads]
    assert read_paired(tmp_path) == experiment and experiment.broken is None


def test_loads_share_no_image_of_ones_own_data(seen: list[RunOptions], tmp_path: Path) -> None:
    write_images(tmp_path / "data", 30)
    measured(tmp_path / "out", users="1,2", rates="1", data=str(tmp_path / "data"))
    bodies = {options.load.label: load_prepared(options.workload).bodies for options in seen}
    urls = {body.partition(b'"url": "')[2][:200] for load in bodies.values() for body in load}
    assert [len(load) for load in bodies.values()] == [10, 10, 10]
    assert len(urls) == 30


def test_rates_are_chosen_once_and_raised_until_saturation(
    seen: list[RunOptions], tmp_path: Path
) -> None:
    experiment = measured(tmp_path, users="4", rates="find", passes=1)
    capacity = experiment.runs[0].read(tmp_path).result.summary.request_rate
    assert experiment.rates == choose_rates(capacity) and len(experiment.rates) == len(STEPS)
    for arm in "ab":
        rates = [opts.load.rate for opts in seen if opts.url[-1] == arm and opts.load.rate]
        # At the first rate above 2 all requests miss the objective, and no higher one is tried.
        assert rates == list(experiment.rates[: len(rates)])
        assert rates[-1] > 2.0 and all(rate <= 2.0 for rate in rates[:-1])


def test_without_a_closed_loop_the_capacity_is_measured_first(
    seen: list[RunOptions], tmp_path: Path
) -> None:
    measured(tmp_path, rates="find", passes=1)
    assert seen[0].load.users == 16
    assert all(options.load.rate for options in seen[1:])


def test_runs_before_a_failure_are_kept(seen: list[RunOptions], tmp_path: Path) -> None:
    experiment = measured(tmp_path, "a", "dead", users="1")
    assert experiment.broken == "server http://dead: /v1/models is not answered"
    assert [run.arm for run in experiment.runs] == ["a"]
    assert read_paired(tmp_path).broken == experiment.broken


def test_an_experiment_without_a_load_is_refused(seen: list[RunOptions], tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="nothing to measure"):
        measured(tmp_path)
    assert not seen


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
