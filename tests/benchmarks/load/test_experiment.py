"""The paired experiment: order of runs, choice of rates, early ends.

Runs are made up here; that a run really sends what it says is ``test_run``'s.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common import BenchmarkError
from benchmarks.load import experiment as module
from benchmarks.load.experiment import STEPS, Arm, Plan, choose_rates, measure, read_paired
from benchmarks.load.result import RECORDS, Result
from benchmarks.load.schedule import Slo
from benchmarks.load.settings import RunOptions
from benchmarks.load.workload import load_prepared
from tests.benchmarks.load.samples import WORKLOAD, record, result, write_images

SLO = Slo(ttft=0.5)


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


def plan(**changes: object) -> Plan:
    arms = tuple(Arm(name=name, url=f"http://{name}") for name in ("a", "b"))
    return Plan(arms=arms, workload=WORKLOAD, slo=SLO).model_copy(update=changes)


def test_arms_alternate_and_loads_share_no_images(seen: list[RunOptions], tmp_path: Path) -> None:
    experiment = measure(plan(users=(1, 2), rates=(1.0,)), tmp_path)
    order = [(one.url[-1], one.load.label) for one in seen]
    loads = ["users-1", "users-2", "rate-1"]
    assert order == [(arm, label) for arm in "abba" for label in loads]
    digests = {one.load.label: load_prepared(one.workload).digest for one in seen}
    assert len(set(digests.values())) == 3
    assert len({one.out for one in seen}) == 12
    assert [run.arm for run in experiment.runs(tmp_path)] == [arm for arm in "abba" for _ in loads]
    assert read_paired(tmp_path) == experiment and experiment.broken is None


def test_loads_share_no_image_of_ones_own_data(seen: list[RunOptions], tmp_path: Path) -> None:
    write_images(tmp_path / "data", 30)
    workload = WORKLOAD.model_copy(update={"data": str(tmp_path / "data")})
    measure(plan(workload=workload, users=(1, 2), rates=(1.0,)), tmp_path / "out")
    used = {}
    for one in seen:
        lines = load_prepared(one.workload).lines
        used[one.load.label] = {picture for line in lines for picture in line.ask.pictures}
    assert [len(items) for items in used.values()] == [10, 10, 10]
    assert len(set.union(*used.values())) == 30


def test_rates_are_chosen_once_and_raised_until_saturation(
    seen: list[RunOptions], tmp_path: Path
) -> None:
    experiment = measure(plan(users=(4,), find_rates=True, passes=1), tmp_path)
    capacity = experiment.runs(tmp_path)[0].result.summary.request_rate
    assert experiment.rates == choose_rates(capacity) and len(experiment.rates) == len(STEPS)
    for arm in "ab":
        rates = [one.load.rate for one in seen if one.url[-1] == arm and one.load.rate]
        # At the first rate above 2 all requests miss the objective, and no higher one is tried.
        assert rates == list(experiment.rates[: len(rates)])
        assert rates[-1] > 2.0 and all(rate <= 2.0 for rate in rates[:-1])


def test_without_a_closed_loop_the_capacity_is_measured_first(
    seen: list[RunOptions], tmp_path: Path
) -> None:
    measure(plan(find_rates=True, passes=1), tmp_path)
    assert seen[0].load.users == 16
    assert all(one.load.rate for one in seen[1:])


def test_runs_before_a_failure_are_kept(seen: list[RunOptions], tmp_path: Path) -> None:
    arms = (Arm(name="a", url="http://a"), Arm(name="b", url="http://dead"))
    experiment = measure(plan(arms=arms, users=(1,)), tmp_path)
    assert experiment.broken == "server http://dead: /v1/models is not answered"
    assert [run.arm for run in experiment.runs(tmp_path)] == ["a"]
    assert read_paired(tmp_path).broken == experiment.broken


def test_an_experiment_without_a_load_is_refused(seen: list[RunOptions], tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="nothing to measure"):
        measure(plan(), tmp_path)
    assert not seen
