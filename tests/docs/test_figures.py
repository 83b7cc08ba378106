"""Pages with figures of the code: choosing a state, what is supported, the search study."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.search.study import read_confirmed, read_results
from benchmarks.search.tables import format_mean
from scripts.docs_commands import read_commands
from tests.test_costs import last_question, recorded
from vllm_autoprune.advise import WAYS
from vllm_autoprune.cli.main import main
from vllm_autoprune.serving.models import BACKBONES, check_clip_inputs

ROOT = Path(__file__).resolve().parents[2]
CHOOSING, SUPPORT, STUDY = (
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("choosing.md", "support.md", "studies/search.md")
)


def test_the_output_on_the_page_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = {command.text for command in read_commands() if "--layer-ms" in command.text}
    call = shlex.split(text)[1:]
    assert main(call) == 0
    (block,) = re.findall(r"```text\n(Pruning .*?)```", CHOOSING, flags=re.DOTALL)
    assert block in capsys.readouterr().out


def test_every_way_is_named() -> None:
    assert [way for way in WAYS if f"\n| {way} | " not in CHOOSING] == []


def test_predictions_on_the_page_are_the_models() -> None:
    ways = recorded(256)
    reading, split = ways["question-reading"], ways["split"]
    assert f"first, question-reading | {reading.another_of_first:.2f} |" in CHOOSING
    assert f"questions an image | {last_question(reading):.1f} |" in CHOOSING
    assert f"first, split, K_c = 256 | {split.another_of_first:.2f} |" in CHOOSING
    assert f"split, K_c = 256 | {last_question(split):.0f} |" in CHOOSING


def test_the_page_has_a_row_for_every_backbone() -> None:
    lines = [
        line.strip("| ").split(" | ") for line in SUPPORT.splitlines() if line.startswith("| ")
    ]
    rows, backbones = [row for row in lines if len(row) == 8][1:], BACKBONES.values()
    assert len(rows) == len(backbones)
    reads_tower = [backbone.input_problems is check_clip_inputs for backbone in backbones]
    assert [row[4] for row in rows].count("yes") == sum(reads_tower)
    positions = [row[5] for row in rows]
    assert positions.count("M-RoPE") == sum(b.mrope for b in backbones)


def test_every_feature_names_tests_that_exist() -> None:
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    rows = re.findall(r"^\| (.+) \| (yes|refused|no|untested) \| .* \| ?(.*) \|$", SUPPORT, re.M)
    assert len(rows) > 30 and len({feature for feature, _, _ in rows}) == len(rows)
    for feature, status, named in rows:
        assert named or status == "untested", feature
        assert set(re.findall(r"`(.+?)`", named)) <= files, feature


RECORDED = ROOT / "benchmarks/search/recorded/study"
CELLS = sorted(folder.name for folder in RECORDED.iterdir())
SEARCHES = [
    (cell, strategy)
    for cell in CELLS
    for strategy in ("random", "tpe", "autoprune+@none")
    if f"{strategy}-0" in read_results(RECORDED / cell)
]


@pytest.mark.parametrize("cell", CELLS)
def test_recorded_winners_are_those_that_were_confirmed(cell: str) -> None:
    results, confirmed = read_results(RECORDED / cell), read_confirmed(RECORDED / cell)
    winners = {name: result.winner for name, result in results.items() if result.winner}
    assert set(winners) == set(confirmed)
    for name, winner in winners.items():
        assert winner.load().digest == winner.digest == confirmed[name].digest
        assert confirmed[name].questions == 600


@pytest.mark.parametrize(("cell", "strategy"), SEARCHES)
def test_every_search_has_its_row(cell: str, strategy: str) -> None:
    confirmed = read_confirmed(RECORDED / cell)
    scores, others = ([confirmed[f"{name}-{seed}"] for seed in range(8)]
                      for name in (strategy, "tpe"))  # fmt: skip
    objective = format_mean([score.objective for score in scores], 2)
    accuracy = format_mean([100 * score.accuracy for score in scores], 1)
    gaps = [score.objective - other.objective for score, other in zip(scores, others, strict=True)]
    gap = "-" if strategy == "tpe" else f"{'+' if sum(gaps) > 0 else ''}{format_mean(gaps, 2)}"
    name = strategy.removesuffix("@none")
    assert f"| `{name}` | {objective} | {accuracy} | {gap} |" in STUDY


def test_every_row_has_its_search() -> None:
    rows = re.findall(r"\| `[a-z+]+` \| -[\d.]+ ± [\d.]+ \|", STUDY)
    assert len(rows) == len(SEARCHES)
