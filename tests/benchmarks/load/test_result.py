"""Figures of runs: percentiles, rates, every reason against a run, ratios, the page."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.load.report import REPORT, Experiment, Point
from benchmarks.load.result import Summary, _estimate_percentiles, estimate_ratio
from benchmarks.load.settings import Load, SendingOptions, Workload
from tests.benchmarks.load.samples import SLO, point, record, result
from vllm_autoprune.report import Section

OPEN = Load(rate=10.0)
CLOSED = Load(users=2)
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
        record(n, ttft=0.5 * ttft, error="cut" if n == 7 else None)
        for n, ttft in enumerate(times)
    ]
    ratio = estimate_ratio(
        [half], [base], "TTFT", 99
    )  # of the requests that both answered
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.5, 0.5, 0.5))
    assert estimate_ratio([base[:1]], [base[1:]], "TTFT", 50) is None


@pytest.mark.parametrize("passes", [1, 2])
def test_rates_are_means_over_the_whole_time_and_latencies_are_of_answers(
    passes: int,
) -> None:
    records = [record(n, scheduled=0.5 * n, ttft=0.2, gap=0.1) for n in range(10)]
    records.append(record(10, scheduled=5.0, error="cut short"))
    summary = Summary.of([records] * passes, SendingOptions())
    assert (summary.requests, summary.failed) == (11 * passes, passes)
    # From 0 to the end of the failed request at 5 + 0.2 + 3 x 0.05.
    assert summary.request_rate == pytest.approx(10 / 5.35)
    assert summary.offered_rate == pytest.approx(10 / 5.0)
    wanted = {
        "TTFT": 0.2,
        "TTFAT": 0.2,
        "ITL": 0.1,
        "TPOT": 0.1,
        "E2E": 0.5,
        "delay": 0.0,
    }
    medians = {name: figures[50].value for name, figures in summary.latencies.items()}
    assert medians == pytest.approx(wanted)


def test_only_measured_requests_count_and_a_failed_one_misses_the_objective() -> None:
    records = [record(n, ttft=0.1 * n - 0.01) for n in range(1, 5)]
    records += [record(5, ttft=0.1, error="refused"), record(6, ttft=0.1, gap=0.5)]
    records.append(record(7, ttft=9, measured=False))
    summary = Summary.of([records], SendingOptions(slo_ttft=300, slo_tpot=400))
    assert summary.requests == 6
    assert summary.goodput is not None and summary.goodput.value == pytest.approx(3 / 6)
    empty = Summary.of([[]], SendingOptions())
    assert empty.requests == empty.request_rate == 0 and empty.goodput is None


LATE = [r.model_copy(update={"started": r.scheduled + 0.011}) for r in ANSWERED]
SILENT = [r.model_copy(update={"completion_tokens": None}) for r in ANSWERED]
SHORT = [record(n, scheduled=0.1 * n, tokens=3) for n in range(200)]
FAILED = [record(n, error="status 500: gone") for n in range(3)]


def cache(state: str, **counters: float) -> dict[str, Any]:
    """A state of the caches, and what the server counted."""
    values = {"model": "m", "output_tokens": 4, "cache": state, "requests": 200}
    counted = {name.replace("_", " "): count for name, count in counters.items()}
    return {"workload": Workload.model_validate(values), "counters": counted}


UNFORCED = {
    "workload": Workload(model="m", output_tokens=4, requests=200, dialect="openai")
}
VERDICTS: dict[str, tuple[Any, Load, dict[str, Any], tuple[str, ...]]] = {
    "a good run": (ANSWERED, OPEN, {"lag": 0.011}, ()),
    "a good closed loop": (LATE, CLOSED, {}, ()),
    "a late client": (
        LATE,
        OPEN,
        {},
        ("schedule delay is 11.0 ms at p99, above 5 % of the median TTFT (10.0 ms)",),
    ),
    "a lagging client": (ANSWERED, CLOSED, {"lag": 0.011}, ("lag is 11.0 ms",)),
    "a busy client": (ANSWERED, OPEN, {"cpu": 0.97}, ("it used 97 % of a core",)),
    "failures": (
        [*ANSWERED[3:], *FAILED],
        OPEN,
        {},
        ("3 of 200 requests failed; 3 with: status 500: gone",),
    ),
    "one per cent of failures": ([*ANSWERED[2:], *FAILED[:2]], OPEN, {}, ()),
    "no usage": (SILENT, OPEN, {}, ("200 answers came without usage",)),
    "other lengths": (SHORT, OPEN, {}, ("200 answers are not of 4 tokens (one: 3)",)),
    "other lengths of a server that cannot ignore ends": (SHORT, OPEN, UNFORCED, ()),
    "hits of unique images": (
        ANSWERED,
        OPEN,
        cache("unique", image_hits=3),
        (
            "cache state is 'unique', but 3 images came from a cache; start the servers again, or",
        ),
    ),
    "hits without caches": (
        ANSWERED,
        OPEN,
        cache("off", image_hits=3, prefix_hits=32),
        (
            "cache state is 'off', but 3 images",
            "32 prompt tokens came from the prefix cache",
        ),
    ),
    "hits of repeated requests": (
        ANSWERED,
        OPEN,
        cache("repeat", image_hits=30, prefix_hits=3000, finished=202.0),
        (),
    ),
    "other clients": (
        ANSWERED,
        OPEN,
        cache("unique", finished=203.0),
        ("the server also answered 3 requests of other clients",),
    ),
    "all at once": (
        LATE[:100],
        OPEN,
        {**cache("unique"), "broken": "stopped before its end"},
        ("stopped before its end", "only 100 of 200", "schedule delay"),
    ),
}
"""Records, load, changes to a good run, and what each reason against it contains."""


@pytest.mark.parametrize("case", VERDICTS)
def test_a_run_is_valid_or_has_every_reason_against_it(case: str) -> None:
    """And what other work did to it is accepted where the user knows of that."""
    records, load, changes, wanted = VERDICTS[case]
    run = result(records, load, **changes)
    reasons = [*run.list_reasons(records)]
    assert len(reasons) == len(wanted)
    assert all(part in reason for part, reason in zip(wanted, reasons, strict=True))
    accepted = tuple(run.list_interference(records))
    assert bool(accepted) == (
        case in ("a late client", "a lagging client", "other clients", "all at once")
    )
    shared = run.model_copy(
        update={"options": run.options.model_copy(update={"shared": True})}
    )
    assert [*shared.list_reasons(records)] == [r for r in reasons if r not in accepted]
    verdict = run.model_copy(update={"accepted": accepted}).verdict
    assert verdict.startswith("valid, but " + accepted[0] if accepted else "valid")


def test_a_run_is_told_in_a_few_lines() -> None:
    records = [record(n, scheduled=0.5 * n, ttft=0.5, gap=0.0) for n in range(11)]
    busy = result(
        records, Load(rate=2.0), environment={"load average": "2.10", "cores": "2"}
    )
    verdict, warning, rates, *_ = busy.format()
    assert verdict.endswith(
        "valid, but 11 requests are too few for a verdict (20 needed)"
    )
    assert warning.startswith("  warning: load average 2.10 on 2 cores")
    assert rates.endswith("2.00 offered, 2.00 achieved requests/s")
    unread = result(ANSWERED, CLOSED, counters=None).verdict
    assert unread == "valid, but the server's /metrics could not be read"


ENOUGH = [0.1 + 0.001 * (n % 7) for n in range(200)]


def two_arms(share: float) -> list[Point]:
    pruned = [share * t for t in ENOUGH]
    return [point("stock", CLOSED, [ENOUGH]), point("AutoPrune", CLOSED, [pruned])]


MEDIAN = "At 2 users, the median time to the first token of AutoPrune is "


@pytest.mark.parametrize(
    ("points", "tone", "sentence"),
    [
        (two_arms(0.5), "good", MEDIAN + "50 (50–50) % of that of stock."),
        (two_arms(2.0), "bad", MEDIAN + "200 (200–200) % of"),
        (
            two_arms(1.0),
            "open",
            MEDIAN + "100 (100–100) % of that of stock: no difference is",
        ),
        (
            [point("stock", CLOSED, [[0.1] * 8])],
            "open",
            "8 requests at a load are too few for a verdict (20 needed). stock answered",
        ),
        ([point("stock", CLOSED, [ENOUGH], valid=False)], "bad", "No valid result"),
        # Not beyond saturation.
        (
            [
                point(arm, Load(rate=rate), [[0.1 if rate == 2.0 else 3.0] * 200])
                for rate in (2.0, 8.0)
                for arm in ("stock", "AutoPrune")
            ],
            "open",
            "At 2 requests/s",
        ),
    ],
)
def test_the_answer_is_one_sentence_at_the_highest_valid_load(
    points: list[Point], tone: str, sentence: str
) -> None:
    answer = Experiment([run for point in points for run in point.runs], SLO).answer
    assert answer[1] == tone and answer[0].startswith(sentence)


def test_disturbed_runs_limit_the_answer() -> None:
    (run,) = point("stock", CLOSED, [ENOUGH]).runs
    disturbed = run._replace(
        result=run.result.model_copy(update={"accepted": ("late",)})
    )
    (warning,) = Experiment([run, disturbed], SLO).list_limits()
    assert warning.startswith(
        "Other work disturbed 1 of 2 runs, which --shared accepts."
    )


def write_page(folder: Path, points: list[Point], broken: str = "") -> str:
    """The page of these points."""
    settings = Section("Settings", code="paired --state '<b>'")
    runs = [run for point in points for run in point.runs]
    Experiment(runs, SLO, broken).write(folder, settings)
    return (folder / REPORT).read_text()


def test_thoughts_have_columns_of_their_own(tmp_path: Path) -> None:
    """But not where no model thinks; without thoughts the first token is of the answer."""
    times = [0.1 + 0.001 * n for n in range(20)]
    for thoughts in (0, 2):
        stock = point("stock", CLOSED, [times], thoughts=thoughts)
        assert ("TTFAT p50, ms" in write_page(tmp_path, [stock])) == bool(thoughts)
        printed = "\n".join(stock.runs[0].result.format())
        assert ("  TTFAT ms: p50 209.0" in printed) == bool(thoughts)


def test_the_page_has_the_answer_ratios_verdicts_rates_and_settings(
    tmp_path: Path,
) -> None:
    times = [0.1 + 0.001 * n for n in range(60)]
    points = []
    for arm, share in (("stock", 1.0), ("AutoPrune", 0.5)):
        mine = [share * t for t in times]
        points += [
            point(arm, CLOSED, [mine, mine]),
            point(arm, Load(rate=2.0), [mine, mine], every=0.5),
            point(arm, Load(rate=4.0), [mine], every=0.25, valid=arm == "stock"),
        ]
    page = write_page(tmp_path, points, "AutoPrune: no <state>")
    answer = re.search(r'<p class="answer (\w+)">(.*?)</p>', page)
    assert answer is not None and page.index(answer[2]) < page.index("<table")
    # 60 requests in each of two passes, but only one pass at the highest rate.
    assert answer[1] == "open" and answer[2].startswith(
        "60 requests at a load are too few for p99"
    )
    body = re.sub(r"<svg.*?</svg>", "", page[page.index("<body>") :], flags=re.S)
    text = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())
    for wanted in (
        "At 2 requests/s, the median time to the first token of AutoPrune is 50 (50–50) %",
        "ended early: AutoPrune: no <state>",
        "9 of 10 runs are valid",
        "2 users AutoPrune 0.500 0.500–0.500; passes 0.500, 0.500",
        "4 requests/s AutoPrune not valid",
        "not valid: the client was the bottleneck",
        "paired --state '<b>'",
        "every image is new",
    ):
        assert wanted in text
    row = re.search(
        r"4 requests/s stock 60 600.0 .*? (\d\.\d\d) (\d\.\d\d) 100\.0", text
    )
    assert row is not None and row[1] == "4.00"
    assert float(row[2]) == pytest.approx(60 / (59 / 4 + 0.159 + 0.15), abs=0.01)
    links = re.findall(r' href="([^"]+)"', page)
    assert "runs/0-AutoPrune/rate-4/records.jsonl" in links
    assert all(link.startswith("runs/") for link in links)
    titles = re.findall(r"<title>([^<]*)</title>", page)  # of the chart's marks
    assert sum(title.endswith("not valid") for title in titles) == 1
