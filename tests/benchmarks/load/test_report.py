"""The HTML report of a hand-written experiment: complete, self-contained, with its figures."""

from __future__ import annotations

import csv
import html
import json
import re
from pathlib import Path

import pytest

from benchmarks.load.__main__ import main
from benchmarks.load.compare import Point
from benchmarks.load.experiment import PAIRED, Arm, Paired, RunEntry
from benchmarks.load.report import REPORT
from benchmarks.load.result import RECORDS
from benchmarks.load.settings import Load, PairedOptions, Workload
from tests.benchmarks.load.samples import point


def experiment(folder: Path, points: list[Point], broken: str | None = None) -> Path:
    """Write an experiment's folder as ``measure`` would have."""
    runs = [run for each in points for run in each.runs]
    for run in runs:
        run.result.write(folder / run.folder)
        lines = (record.model_dump_json() + "\n" for record in run.records)
        (folder / run.folder / RECORDS).write_text("".join(lines))
    names = dict.fromkeys(each.arm for each in points)
    paired = Paired(
        options=PairedOptions(slo_ttft=500),
        arms=tuple(Arm(name=name, url="http://x", digest="d" * 64) for name in names),
        workload=Workload(model="mock"),
        runs=tuple(RunEntry(arm=run.arm, number=run.number, folder=run.folder) for run in runs),
        rates=(2.0, 4.0),
        command=("python", "-m", "benchmarks.load", "paired", "--state", "<b>"),
        broken=broken,
    )
    (folder / PAIRED).write_text(paired.model_dump_json())
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    times = [0.1 + 0.001 * n for n in range(60)]
    points = []
    for arm, share in (("stock", 1.0), ("AutoPrune", 0.5)):
        mine = [share * t for t in times]
        points += [
            point(arm, Load(users=2), [mine, mine]),
            point(arm, Load(rate=2.0), [mine, mine], every=0.5),
            point(arm, Load(rate=4.0), [mine], every=0.25, valid=arm == "stock"),
        ]
    folder = experiment(tmp_path_factory.mktemp("experiment"), points)
    assert main(["report", str(folder)]) == 0
    return (folder / REPORT).read_text()


def plain(page: str) -> str:
    body = page[page.index("<body>") :]
    without = re.sub(r"<[^>]+>", " ", re.sub(r"<svg.*?</svg>", "", body, flags=re.S))
    return " ".join(html.unescape(without).split())


def test_the_answer_comes_first(page: str) -> None:
    answer = re.search(r'<p class="answer (\w+)">(.*?)</p>', page)
    assert answer is not None
    # 60 requests in each of two passes, but only one pass at the highest rate.
    assert answer[1] == "open" and answer[2].startswith("60 requests at a load are too few for p99")
    assert "At 2 requests/s, AutoPrune needs 50 % less time to the first token" in answer[2]
    assert "at least 2 requests/s within the objective against at least 4" in answer[2]
    assert page.index(answer[2]) < page.index("<table") < page.index("Settings")


@pytest.mark.parametrize(
    "text",
    [
        "9 of 10 runs are valid",
        "2 users AutoPrune 0.500 0.500–0.500",
        "2 users AutoPrune 0.500, 0.500",
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
        "aspects 4/3 (44 %), 3/4 (22 %)",
    ],
)
def test_the_page_has_ratios_verdicts_rates_and_settings(page: str, text: str) -> None:
    assert text in plain(page)


def test_a_row_has_offered_and_achieved_rate(page: str) -> None:
    row = re.search(r"4 requests/s stock 60 .*? (\d\.\d\d) (\d\.\d\d) 100\.0", plain(page))
    assert row is not None and row[1] == "4.00"
    assert float(row[2]) == pytest.approx(60 / (59 / 4 + 0.159 + 0.15), abs=0.01)


def test_records_are_linked_from_the_table_and_from_the_charts(page: str) -> None:
    links = re.findall(r' href="([^"]+)"', page)
    assert links.count("runs/0-AutoPrune/rate-4/records.jsonl") > 1
    assert "runs/0-AutoPrune/rate-4/run.json" in links
    assert all(link.startswith("runs/") for link in links)


def test_charts_show_invalid_points_hollow_and_off_the_line(page: str) -> None:
    assert page.count('<figure class="chart">') == 3
    # AutoPrune at 4 requests/s: in latency over throughput, in p50 and p99 over rate, in goodput.
    tips = re.findall(r"<title>([^<]*)</title>", page)
    assert sum(tip.endswith("not valid") for tip in tips) == 4


def test_the_report_is_written_as_json_and_csv_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [0.1 + 0.001 * (n % 7) for n in range(200)]
    points = [
        point(arm, Load(rate=4.0), [[share * t for t in times]], every=0.25)
        for arm, share in (("stock", 1.0), ("AutoPrune", 0.5))
    ]
    experiment(tmp_path, points)
    assert main(["report", str(tmp_path), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary.keys() == {"answer", "tone", "limits", "report", "points", "comparisons"}
    assert summary["tone"] == "good" and summary["answer"].startswith("At 4 requests/s, AutoPrune")
    stock, pruned = summary["points"]
    assert (stock["load"], stock["arm"], stock["requests"]) == ("rate-4", "stock", 200)
    assert stock["offered_rate"] == pytest.approx(4.0) and stock["ttft_p50_ms"] == 103.0
    (median, *_) = summary["comparisons"]
    assert median["figure"] == "TTFT p50" and median["ratio"]["value"] == pytest.approx(0.5)
    with (tmp_path / "points.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == ["stock", "AutoPrune"]
    assert float(rows[1]["ttft_p50_ms"]) == pruned["ttft_p50_ms"]
    assert float(rows[1]["ttft_p50_ms_low"]) <= float(rows[1]["ttft_p50_ms"])


def test_an_experiment_that_ended_early_has_a_report(tmp_path: Path) -> None:
    stock = point("stock", Load(users=2), [[0.1] * 20])
    experiment(tmp_path, [stock], broken="AutoPrune: the server did not start: no <state>")
    assert main(["report", str(tmp_path)]) == 0
    text = plain((tmp_path / REPORT).read_text())
    assert "ended early: AutoPrune: the server did not start: no <state>" in text


def test_a_folder_without_an_experiment_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert str(tmp_path / PAIRED) in capsys.readouterr().err
