"""The HTML report of a hand-written experiment: complete, self-contained, with its figures."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks.load.__main__ import main
from benchmarks.load.arms import Arm
from benchmarks.load.page import REPORT
from benchmarks.load.paired import PAIRED, Paired, Plan, RunEntry
from benchmarks.load.points import Point
from benchmarks.load.result import RECORDS
from benchmarks.load.schedule import Load, Slo
from tests.benchmarks.load.samples import WORKLOAD, point

SLO = Slo(ttft=0.5)
VOID = {"meta", "br", "path", "use", "rect"}


def experiment(folder: Path, points: list[Point], broken: str | None = None) -> Path:
    """Write an experiment's folder as ``measure`` would have."""
    entries = []
    for each in points:
        for run in each.runs:
            run.result.write(folder / run.folder)
            lines = (record.model_dump_json() + "\n" for record in run.records)
            (folder / run.folder / RECORDS).write_text("".join(lines))
            entries.append(RunEntry(arm=run.arm, number=run.number, folder=run.folder))
    names = dict.fromkeys(each.arm for each in points)
    paired = Paired(
        plan=Plan(
            arms=tuple(Arm(name=name, url="http://x", digest="d" * 64) for name in names),
            workload=WORKLOAD,
            slo=SLO,
        ),
        made=tuple(entries),
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
            point(arm, Load(users=2), [mine, mine], slo=SLO),
            point(arm, Load(rate=2.0), [mine, mine], every=0.5, slo=SLO),
            point(arm, Load(rate=4.0), [mine], every=0.25, valid=arm == "stock", slo=SLO),
        ]
    folder = experiment(tmp_path_factory.mktemp("experiment"), points)
    assert main(["report", str(folder)]) == 0
    return (folder / REPORT).read_text()


def plain(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<svg.*?</svg>", "", page, flags=re.S)))


def test_the_page_has_ratios_verdicts_and_rates(page: str) -> None:
    text = " ".join(plain(page).split())
    assert "9 of 10 runs are valid." in text
    assert "users-2 AutoPrune 0.500 (0.500–0.500) [0.500, 0.500]" in text
    assert "rate-4 AutoPrune not valid" in text
    # Three gaps of 50 ms in each of 2 x 60 answers.
    assert "users-2 stock valid p50 50.0 (50.0–50.0) p90 50.0 (50.0–50.0)" in text
    assert "INVALID: the client was the bottleneck" in text
    # Stock keeps both rates; AutoPrune's second run is not valid, so that rate is unknown.
    assert "stock at least 4 at least 4 at least 4 not reached: try higher rates" in text
    assert "AutoPrune at least 2 at least 2 at least 2" in text
    assert "runs/0-AutoPrune/rate-4/records.jsonl" in text


def test_the_page_has_settings_and_command(page: str) -> None:
    text = plain(page)
    assert "python -m benchmarks.load paired --state '<b>'" in text
    assert "d" * 16 in text and "every image is new" in text and "load average" in text


def test_the_page_is_self_contained_and_well_formed(page: str) -> None:
    assert page.count("<svg") == 4
    assert "default-src 'none'" in page and "<script" not in page
    assert not re.findall(r"""(?:src|href|action)\s*=\s*["'](?!#|data:)""", page)
    assert not re.findall(r"url\((?!#)", page)
    open_tags: list[str] = []

    class Balance(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in VOID and tag != "html":
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag not in VOID and tag != "html":
                assert open_tags.pop() == tag

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            pass

    Balance().feed(page)
    assert open_tags == []


def test_an_experiment_that_ended_early_has_a_report(tmp_path: Path) -> None:
    stock = point("stock", Load(users=2), [[0.1] * 20], slo=SLO)
    experiment(tmp_path, [stock], broken="AutoPrune: the server did not start: no <state>")
    assert main(["report", str(tmp_path)]) == 0
    text = plain((tmp_path / REPORT).read_text())
    assert "ended early: AutoPrune: the server did not start: no <state>" in text


def test_a_folder_without_an_experiment_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert str(tmp_path / PAIRED) in capsys.readouterr().err
