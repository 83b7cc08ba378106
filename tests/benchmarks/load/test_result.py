"""Figures of runs: percentiles, rates, every reason against a run, ratios, knee, the report."""

from __future__ import annotations

import csv
import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.load.__main__ import main
from benchmarks.load.compare import (
    Point,
    Run,
    answer_question,
    compare_arms,
    find_limits,
    group_runs,
    list_limits,
)
from benchmarks.load.paired import Arm, Paired, write_paired
from benchmarks.load.report import REPORT
from benchmarks.load.result import (
    ClientFacts,
    _estimate_percentiles,
    estimate_ratio,
    format_result,
    list_interference,
    list_reasons,
    summarize,
    write_result,
)
from benchmarks.load.settings import Load, PairedOptions, SendingOptions, Workload
from tests.benchmarks.load.samples import SLO, point, record, result

OPEN, CLOSED = Load(rate=10.0), Load(users=2)
ANSWERED = [record(n, scheduled=0.1 * n) for n in range(200)]


def single(values: list[float]) -> list[list[float]]:
    return [[value] for value in values]


def test_percentiles_are_nearest_rank() -> None:
    sample = _estimate_percentiles(single([float(n) for n in range(1, 101)]))
    assert [figure.value for figure in sample.values()] == [50, 90, 95, 99]
    assert _estimate_percentiles([]) == _estimate_percentiles([[], []]) == {}


def test_correlated_values_widen_the_interval() -> None:
    """The same values in waves and shuffled: blocks of neighbours are resampled."""

    def width(by_request: list[list[float]]) -> float:
        median = _estimate_percentiles(by_request)[50]
        return median.high - median.low

    waves = list(np.sin(np.arange(400) / 40) + 2)
    shuffled = list(np.random.default_rng(0).permutation(waves))
    assert width(single(waves)) > 2 * width(single(shuffled))
    # Gaps of a request are resampled together: of two kinds of requests, the interval has both.
    assert width([[1.0] * 50 if n % 2 else [2.0] * 50 for n in range(8)]) == 1.0


def test_paired_ratios_recover_a_common_factor_exactly() -> None:
    times = list(np.random.default_rng(1).exponential(1.0, 60))
    base = [record(n, ttft=ttft) for n, ttft in enumerate(times)]
    half = [
        record(n, ttft=0.5 * ttft, error="cut" if n == 7 else None) for n, ttft in enumerate(times)
    ]
    ratio = estimate_ratio([half], [base], "TTFT", 99)  # of the requests that both answered
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.5, 0.5, 0.5))
    assert estimate_ratio([base[:1]], [base[1:]], "TTFT", 50) is None


def test_rates_are_over_the_whole_time_and_latencies_over_answers() -> None:
    records = [record(n, scheduled=0.5 * n, ttft=0.2, gap=0.1) for n in range(10)]
    records.append(record(10, scheduled=5.0, error="cut short"))
    for passes in (1, 2):  # of several passes, rates are means
        summary = summarize([records] * passes, SendingOptions())
        # From 0 to the end of the failed request at 5 + 0.2 + 3 x 0.05.
        assert summary.seconds == pytest.approx(5.35)
        assert (summary.requests, summary.failed) == (11 * passes, passes)
        assert summary.request_rate == pytest.approx(10 / 5.35)
        assert summary.offered_rate == pytest.approx(10 / 5.0)
        wanted = {"TTFT": 0.2, "TTFAT": 0.2, "ITL": 0.1, "TPOT": 0.1, "E2E": 0.5, "delay": 0.0}
        medians = {name: figures[50].value for name, figures in summary.latencies.items()}
        assert medians == pytest.approx(wanted)
        assert summary.prompt_tokens == 600


def test_only_measured_requests_count_and_a_failed_one_misses_the_objective() -> None:
    records = [record(n, ttft=0.1 * n - 0.01) for n in range(1, 5)]
    records += [record(5, ttft=0.1, error="refused"), record(6, ttft=0.1, gap=0.5)]
    records.append(record(7, ttft=9, measured=False))
    summary = summarize([records], SendingOptions(slo_ttft=300, slo_tpot=400))
    assert summary.requests == 6
    assert summary.goodput is not None and summary.goodput.value == pytest.approx(3 / 6)
    empty = summarize([[]], SendingOptions())
    assert empty.requests == empty.request_rate == 0
    assert empty.goodput is None and empty.offered_rate is None


LATE = [record(n, scheduled=0.1 * n, delay=0.011) for n in range(200)]
SILENT = [r.model_copy(update={"completion_tokens": None}) for r in ANSWERED]
SHORT = [record(n, scheduled=0.1 * n, tokens=3) for n in range(200)]
FAILED = [record(n, error="status 500: gone") for n in range(3)]
LAGGING = (ClientFacts(cpu=0.2, lag=0.011),)


def cache(state: str, **counters: float) -> dict[str, Any]:
    """A state of the caches, and what the server counted."""
    values = {"model": "m", "output_tokens": 4, "cache": state, "requests": 200}
    counted = {name.replace("_", " "): count for name, count in counters.items()}
    return {"workload": Workload.model_validate(values), "counters": counted}


VERDICTS: dict[str, tuple[Any, Load, dict[str, Any], tuple[str, ...]]] = {
    "a good run": (ANSWERED, OPEN, {}, ()),
    "a good closed loop": (ANSWERED, CLOSED, {}, ()),
    "a late client": (LATE, OPEN, {},
        ("schedule delay is 11.0 ms at p99, above 5 % of the median TTFT (10.0 ms)",)),
    "a closed loop has no schedule": (LATE, CLOSED, {}, ()),
    "a lagging client": (ANSWERED, CLOSED, {"clients": LAGGING}, ("lag is 11.0 ms",)),
    "an open loop has delays": (ANSWERED, OPEN, {"clients": LAGGING}, ()),
    "a busy client": (ANSWERED, OPEN, {"clients": (ClientFacts(cpu=0.97, lag=0),)},
        ("client 0 used 97 % of a core",)),
    "failures": ([*ANSWERED[3:], *FAILED], OPEN, {},
        ("3 of 200 requests failed; 3 with: status 500: gone",)),
    "one per cent of failures": ([*ANSWERED[2:], *FAILED[:2]], OPEN, {}, ()),
    "no usage": (SILENT, OPEN, {}, ("200 answers came without usage",)),
    "other lengths": (SHORT, OPEN, {}, ("200 answers are not of 4 tokens (one: 3)",)),
    "missing records": (ANSWERED[:190], OPEN, cache("unique"), ("only 190 of 200 requests were",)),
    "a lost worker": (ANSWERED, OPEN, {"broken": "a worker was lost"}, ("a worker was lost",)),
    "hits of unique images": (ANSWERED, OPEN, cache("unique", image_hits=3),
        ("cache state is 'unique', but 3 images came from a cache",)),
    "image hits without caches": (ANSWERED, OPEN, cache("off", image_hits=3),
        ("cache state is 'off', but 3 images",)),
    "prefix hits without caches": (ANSWERED, OPEN, cache("off", prefix_hits=32),
        ("32 prompt tokens came from the prefix cache",)),
    "hits of repeated requests": (ANSWERED, OPEN,
        cache("repeat", image_hits=30, prefix_hits=3000), ()),
    "other clients": (ANSWERED, OPEN, cache("unique", finished=203.0),
        ("the server also answered 3 requests of other clients",)),
    "hardly another client": (ANSWERED, OPEN, cache("unique", finished=202.0), ()),
    "all at once": (LATE[:100], OPEN, {**cache("unique"), "broken": "stopped before its end"},
        ("stopped before its end", "only 100 of 200", "schedule delay")),
}  # fmt: skip
"""Records, load, changes to a good run, and what each reason against it contains."""


@pytest.mark.parametrize("case", VERDICTS)
def test_a_run_is_valid_or_has_every_reason_against_it(case: str) -> None:
    records, load, changes, wanted = VERDICTS[case]
    reasons = [*list_reasons(result(records, load, **changes), records)]
    assert len(reasons) == len(wanted)
    assert all(part in reason for part, reason in zip(wanted, reasons, strict=True))


def test_other_work_is_accepted_where_the_user_knows_of_it() -> None:
    known = {"a late client", "a lagging client", "other clients"}
    for case, (records, load, changes, wanted) in VERDICTS.items():
        run = result(records, load, **changes)
        accepted = tuple(list_interference(run, records))
        options = run.options.model_copy(update={"shared": True})
        run = run.model_copy(update={"options": options, "accepted": accepted})
        reasons = [*list_reasons(run, records)]
        assert len(reasons) == len(wanted) - len(accepted)
        if case in known:
            assert run.verdict.startswith("valid, but ") and wanted[0] in run.verdict
            (warning,) = list_limits(
                [Point("stock", load, (Run("stock", 0, "", run, records),))], ""
            )
            assert warning.startswith("Other work disturbed 1 of 1 runs, which --shared accepts.")
            assert wanted[0] in warning
    late, load, _, _ = VERDICTS["a late client"]
    (reason,) = list_reasons(result(late, load), late)
    assert reason.endswith("; use an idle one, or accept it with --shared")


def test_a_run_is_printed_with_its_verdict_and_a_warning_of_a_busy_machine() -> None:
    records = [record(n, scheduled=0.5 * n, ttft=0.5, gap=0.0) for n in range(11)]
    busy = result(records, Load(rate=2.0), environment={"load average": "2.10", "cores": "2"})
    verdict, warning, rates, *_ = format_result(busy)
    assert verdict.endswith("valid, but 11 requests are too few for a verdict (20 needed)")
    assert warning.startswith("  warning: load average 2.10 on 2 cores")
    assert rates.endswith("2.00 offered, 2.00 achieved requests/s")
    closed = "\n".join(format_result(result(ANSWERED, CLOSED, counters=None)))
    assert "offered" not in closed and "warning" not in closed
    assert "valid, but the server's /metrics could not be read" in closed


TIMES = [float(t) for t in np.random.default_rng(0).exponential(0.2, 40)]
HALF = [t / 2 for t in TIMES]


def test_every_arm_is_compared_with_the_first_and_invalid_runs_have_no_ratio() -> None:
    stock = point("stock", CLOSED, [TIMES, TIMES])
    pruned = point("AutoPrune", CLOSED, [HALF, [0.9 * t for t in HALF]])
    elsewhere = point("AutoPrune", Load(rate=9.0), [HALF])  # a load that only one arm has
    runs = [stock.runs[0], pruned.runs[0], pruned.runs[1], stock.runs[1], elsewhere.runs[0]]
    assert group_runs(runs) == [stock, pruned, elsewhere]
    compared = compare_arms([stock, pruned, elsewhere])
    assert {(row.arm, row.against, row.load) for row in compared} == {
        ("AutoPrune", "stock", CLOSED)
    }
    by_figure = {row.figure: row for row in compared}
    median, tpot = by_figure["TTFT p50"], by_figure["TPOT p50"].ratio
    assert median.by_pass == pytest.approx((0.5, 0.45))
    assert median.ratio is not None and 0.44 < median.ratio.low <= median.ratio.high < 0.51
    assert tpot is not None and tpot.value == pytest.approx(1.0)
    invalid = point("AutoPrune", CLOSED, [HALF], valid=False)
    assert all(row.ratio is None and not row.by_pass for row in compare_arms([stock, invalid]))
    assert compare_arms([]) == []


def at(rate: float, ttft: float, *, valid: bool = True) -> Point:
    """200 requests at this rate."""
    return point("stock", Load(rate=rate), [[ttft] * 200], every=1 / rate, valid=valid)


UNKNOWN = at(2, 0.1, valid=False)
BURST = point("stock", Load(rate=200), [[0.1 + 0.0025 * n for n in range(100)]], every=1 / 200)
BRIEF = point("stock", Load(rate=10), [[0.4] * 10], every=0.1)


@pytest.mark.parametrize(
    ("points", "knee", "highest", "saturated"),
    [
        # The knee may lie below the highest good rate.
        ([at(1, 0.1), at(2, 0.15), at(4, 0.45), at(8, 3.0)], "2", "4", True),
        # A rate counts only if all lower ones hold.
        ([at(1, 0.1), at(2, 0.6), at(4, 0.1)], "1", "1", False),
        ([at(1, 0.9)], "at least 1", "below 1", False),
        ([at(1, 0.1), at(2, 0.1)], "at least 2", "at least 2", False),
        # Invalid runs count as unknown, and the knee is relative to the lowest valid rate.
        ([at(1, 0.1), UNKNOWN, at(4, 0.1), at(8, 0.9)], "4", "4", False),
        ([at(1, 0.1), UNKNOWN, at(4, 0.9)], "1 to 4", "1 to 4", False),
        ([at(1, 0.1), UNKNOWN], "at least 1", "at least 1", False),
        ([UNKNOWN, at(4, 0.9)], "at least 4", "below 4", False),
        ([UNKNOWN], "not known", "not known", False),
        # 200 requests due in a second meet the objective in a short run, but are not answered at
        # that rate: the queue would grow without bound.
        ([at(1, 0.1), BURST], "1", "1", True),
        # Ten requests within a second, each answered after 0.4 s: the last is no backlog.
        ([BRIEF], "at least 10", "at least 10", False),
    ],
)
def test_knee_and_highest_rate(
    points: list[Point], knee: str, highest: str, saturated: bool
) -> None:
    assert find_limits(points, SLO) == (knee, highest, saturated)


ENOUGH = [0.1 + 0.001 * (n % 7) for n in range(200)]


def two_arms(share: float) -> list[Point]:
    pruned = [share * t for t in ENOUGH]
    return [point("stock", CLOSED, [ENOUGH]), point("AutoPrune", CLOSED, [pruned])]


@pytest.mark.parametrize(
    ("points", "tone", "sentence"),
    [
        (two_arms(0.5), "good", "At 2 users, AutoPrune needs 50 % less time to the first"),
        (two_arms(2.0), "bad", "At 2 users, AutoPrune needs 100 % more time to the first"),
        (two_arms(1.0), "open", "At 2 users, no difference is shown between the median"),
        ([point("stock", CLOSED, [[0.1] * 8])], "open",
         "8 requests at a load are too few for a verdict (20 needed). stock answered"),
        ([point("stock", CLOSED, [ENOUGH], valid=False)], "bad", "No valid result"),
        ([], "bad", "No valid result"),
        # Not beyond saturation.
        ([point(arm, Load(rate=rate), [[0.1 if rate == 2.0 else 3.0] * 200])
          for rate in (2.0, 8.0) for arm in ("stock", "AutoPrune")], "open", "At 2 requests/s"),
    ],
)  # fmt: skip
def test_the_answer_is_one_sentence_at_the_highest_valid_load(
    points: list[Point], tone: str, sentence: str
) -> None:
    answer = answer_question(points, SLO)
    assert answer[1] == tone and answer[0].startswith(sentence)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as ``measure`` would have written it; AutoPrune's last run is not valid."""
    folder = tmp_path_factory.mktemp("experiment")
    times = [0.1 + 0.001 * n for n in range(60)]
    points = []
    for arm, share in (("stock", 1.0), ("AutoPrune", 0.5)):
        mine = [share * t for t in times]
        points += [
            point(arm, CLOSED, [mine, mine]),
            point(arm, Load(rate=2.0), [mine, mine], every=0.5),
            point(arm, Load(rate=4.0), [mine], every=0.25, valid=arm == "stock"),
        ]
    write_experiment(folder, points, broken="AutoPrune: no <state>")
    return folder


def write_experiment(folder: Path, points: list[Point], broken: str | None = None) -> None:
    """Runs, and the index that ``measure`` writes."""
    runs = [run for point in points for run in point.runs]
    for run in runs:
        write_result(folder / run.folder, run.result, run.records)
    arms = (Arm(name=name, url="http://x", digest="d" * 64) for name in ("stock", "AutoPrune"))
    paired = Paired(
        options=PairedOptions(slo_ttft=500),
        arms=tuple(arms),
        runs=tuple((run.arm, run.number, run.folder) for run in runs),
        command=("python", "-m", "benchmarks.load", "paired", "--state", "<b>"),
        broken=broken,
    )
    write_paired(folder, paired)


def test_thoughts_have_columns_of_their_own(experiment: Path, tmp_path: Path) -> None:
    """But not where no model thinks; without thoughts the first token is of the answer."""
    times = [0.1 + 0.001 * n for n in range(20)]
    arms = {"stock": 2, "AutoPrune": 0, "endless": 4}
    points = [point(arm, CLOSED, [times], thoughts=count) for arm, count in arms.items()]
    write_experiment(tmp_path, points)
    for folder in (experiment, tmp_path):
        main(["report", str(folder)])
    assert "TTFAT p50, ms" in (tmp_path / REPORT).read_text()
    assert "TTFAT p50, ms" not in (experiment / REPORT).read_text()
    assert "ttfat" not in (experiment / "points.csv").read_text()
    with (tmp_path / "points.csv").open() as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    answers = {arm: row["ttfat_p50_ms"] for arm, row in rows.items()}
    assert answers == {"stock": "209.0", "AutoPrune": "109.0", "endless": ""}
    assert {row["ttft_p50_ms"] for row in rows.values()} == {"109.0"}
    printed = "\n".join(format_result(points[0].runs[0].result))
    assert "  TTFAT        ms: p50 209.0" in printed
    assert "TTFAT" not in "\n".join(format_result(points[1].runs[0].result))


def test_the_page_has_the_answer_ratios_verdicts_rates_and_settings(experiment: Path) -> None:
    assert main(["report", str(experiment)]) == 1  # a run is not valid
    page = (experiment / REPORT).read_text()
    answer = re.search(r'<p class="answer (\w+)">(.*?)</p>', page)
    assert answer is not None and page.index(answer[2]) < page.index("<table")
    # 60 requests in each of two passes, but only one pass at the highest rate.
    assert answer[1] == "open" and answer[2].startswith("60 requests at a load are too few for p99")
    body = re.sub(r"<svg.*?</svg>", "", page[page.index("<body>") :], flags=re.S)
    text = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())
    for wanted in (
        "At 2 requests/s, AutoPrune needs 50 % less time to the first token",
        "at least 2 requests/s within the objective against at least 4",
        "ended early: AutoPrune: no <state>",
        "9 of 10 runs are valid",
        "2 users AutoPrune 0.500 0.500–0.500; passes 0.500, 0.500",
        "4 requests/s AutoPrune not valid",
        # Three gaps of 50 ms in each of 2 x 60 answers.
        "2 users stock 50.0 50.0–50.0 50.0",
        "not valid: the client was the bottleneck",
        # Stock keeps both rates; AutoPrune's second run is not valid, so that rate is unknown.
        "stock at least 4 at least 4 not reached: try higher rates",
        "AutoPrune at least 2 at least 2",
        "python -m benchmarks.load paired --state '<b>'",
        "d" * 16,
        "every image is new",
        "load average",
        "sides {480: 1.0, 640: 2.0, 1024: 1.0}",
    ):
        assert wanted in text
    row = re.search(r"4 requests/s stock 60 600.0 .*? (\d\.\d\d) (\d\.\d\d) 100\.0", text)
    assert row is not None and row[1] == "4.00"
    assert float(row[2]) == pytest.approx(60 / (59 / 4 + 0.159 + 0.15), abs=0.01)
    # Records are linked from the table and the chart, where the invalid point is hollow.
    links = re.findall(r' href="([^"]+)"', page)
    assert links.count("runs/0-AutoPrune/rate-4/records.jsonl") > 1
    assert "runs/0-AutoPrune/rate-4/run.json" in links
    assert all(link.startswith("runs/") for link in links)
    assert (
        sum(tip.endswith("not valid") for tip in re.findall(r"<title>([^<]*)</title>", page)) == 1
    )


def test_points_are_written_as_csv_and_another_folder_is_refused(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(experiment / "runs")]) == 1
    assert str(experiment / "runs" / "paired.json") in capsys.readouterr().err
    assert main(["report", str(experiment)]) == 1
    assert capsys.readouterr().out.endswith("report.html: 1 runs are not valid\n")
    with (experiment / "points.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == ["stock", "AutoPrune"] * 3
    stock, pruned = rows[:2]
    assert (stock["load"], stock["requests"], stock["ttft_p50_ms"]) == ("users-2", "120", "129.0")
    assert 64.5 == float(pruned["ttft_p50_ms"]) >= float(pruned["ttft_p50_ms_low"])
