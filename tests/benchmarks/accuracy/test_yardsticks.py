"""The table of both yardsticks: its cases, its journal, and its rows in every format."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.accuracy import yardsticks
from benchmarks.yardsticks.examples import Example, Split
from benchmarks.yardsticks.minillava import MiniLlava
from benchmarks.yardsticks.miniqwen import MiniQwen
from benchmarks.yardsticks.yardstick import Budget, Case, EncodedBatch, Scores, Yardstick
from vllm_autoprune.evaluation.journal import EvaluationError
from vllm_autoprune.evaluation.run import Progress
from vllm_autoprune.record_file import RecordFile
from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens

EIGHTH = Budget("K = N/8", Fraction(1, 8))


class SampleYardstick(Yardstick):
    """Has no model: of two questions about an image the first is right but in cases ``wrong``."""

    name, key, default = "sample", "minillava", "instruction-free"
    eighth, usual_tokens = "K = 4", 16
    budgets = (Budget("K = 4", Fraction(1, 4)),)
    available = frozenset(("cls_attention",))

    def __init__(self, *wrong: str, model: str = "sample 1") -> None:
        super().__init__()
        self.wrong, self.scored, self._model = wrong, list[str](), model

    @property
    def model(self) -> str:
        return self._model

    @property
    def categories(self) -> Mapping[str, Sequence[str]]:
        return {"first": ("a",), "second": ("b",)}

    def draw(self, split: Split, images: int) -> Sequence[Example]:
        image = torch.zeros(3, 2, 2, dtype=torch.uint8)
        return [
            Example(number, image, f"{kind} {number}?", "yes", kind, None, ())
            for number in range(images)
            for kind in ("a", "b")
        ]

    def encode(self, batch: Sequence[Example]) -> SampleBatch:
        return SampleBatch(self, batch)


class SampleBatch(EncodedBatch):
    """Records which cases were scored; the second question is right with all tokens only."""

    def __init__(self, yardstick: SampleYardstick, batch: Sequence[Example]) -> None:
        super().__init__(batch, VisualTokens(torch.zeros(1, 16, 2), Grid(4, 4)))
        self.yardstick = yardstick

    def score(self, case: Case) -> Scores:
        self.yardstick.scored.append(case.key)
        right = torch.tensor([case.name not in self.yardstick.wrong, case.name == "full"])
        return Scores(right, torch.zeros(2), case.budget.tokens(16))

    def score_kept(self, kept: Tensor, rows: Tensor) -> Scores:
        raise NotImplementedError

    def score_resized(self, budget: int) -> Scores:
        raise NotImplementedError


def run(
    yardstick: SampleYardstick, path: Path, images: int, *methods: str
) -> tuple[list[yardsticks.CaseResult], list[yardsticks.Row]]:
    """Results and rows of some cases."""
    cases = yardsticks.build_cases(yardstick.budgets, yardstick.available, methods)
    examples, progress = yardstick.draw("test", images), Progress(lambda line: None)
    with RecordFile(path, yardsticks.SCORES, EvaluationError) as journal:
        results = yardsticks.measure(yardstick, cases, examples, journal, progress)
    return results, list(yardsticks.build_rows(yardstick, examples, results))


def find(rows: Sequence[yardsticks.Row], name: str, category: str | None = None) -> yardsticks.Row:
    return next(row for row in rows if (row.name, row.category, row.kind) == (name, category, None))


def names_of(budgets: Sequence[Budget], yardstick: type[Yardstick], *names: str) -> dict[str, Case]:
    return {case.name: case for case in yardsticks.build_cases(budgets, yardstick.available, names)}


def test_a_yardstick_has_the_cases_whose_inputs_its_server_provides() -> None:
    controls = {"full", "resized", "random", "oracle"}
    llava = names_of(MiniLlava.budgets, MiniLlava)
    assert {*BASE_POLICIES, *controls, "minillava"} <= llava.keys()
    assert [budget.tokens(144) for budget in MiniLlava.budgets] == [72, 36, 18, 9]
    qwen = names_of(MiniQwen.budgets, MiniQwen)
    assert {*controls, "cdpruner", "divprune", "mmtok", "holov", "autoprune"} <= qwen.keys()
    assert not {"visionzip", "trim", "prumerge_plus", "fastv", "dart", "sparsevlm"} & qwen.keys()
    for yardstick in (MiniLlava, MiniQwen):
        assert yardstick.eighth in [budget.label for budget in yardstick.budgets]
    # Rounded down, and at least one.
    assert [EIGHTH.tokens(count) for count in (36, 54, 108, 4)] == [4, 6, 13, 1]


def test_states_also_rank_before_the_merger_where_there_is_one() -> None:
    cases = names_of([EIGHTH], MiniQwen)
    before = cases["divprune@merger_in"]
    assert before.state is not None and before.state.rank_at == "merger_in"
    assert before.base == "divprune", "the paired interval is that of before against after"
    assert before.key != cases["divprune"].key and "autoprune@merger_in" in cases
    same = {f"{name}@merger_in" for name in ("scope", "mmtok", "prunesid", "holov")}
    assert not same & cases.keys()
    assert not [name for name in names_of([EIGHTH], MiniLlava) if name.endswith("@merger_in")]


def test_named_cases_keep_what_they_are_compared_with() -> None:
    cases = names_of([EIGHTH], MiniLlava, "cdpruner", "ablation-quota-8")
    assert list(cases) == ["full", "resized", "cdpruner", "ablation-quota-8"]
    state = cases["ablation-quota-8"].state
    assert cases["ablation-quota-8"].base == "cdpruner" and cases["cdpruner"].reads_question
    assert state is not None and state.digest[:12] in cases["ablation-quota-8"].key
    assert cases["resized"].reads_question is None
    assert "ablation-quota-8" not in names_of([EIGHTH], MiniLlava)


def test_a_repeated_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    path, methods = tmp_path / "journal.jsonl", ("random", "divprune")
    yardstick = SampleYardstick()
    results, _ = run(yardstick, path, 3, *methods)
    assert len(yardstick.scored) == 3 * len(results)
    again = SampleYardstick()
    assert run(again, path, 3, *methods)[0] == results and again.scored == []
    more = SampleYardstick()
    results, _ = run(more, path, 5, *methods)
    assert len(more.scored) == 2 * len(results)
    assert all(len(result.right) == 10 for result in results)
    path.write_bytes(path.read_bytes()[:-10])
    killed = SampleYardstick()
    run(killed, path, 5, *methods)
    assert len(killed.scored) == 1, "a line cut off by a kill is measured again"
    other = SampleYardstick(model="sample 2")
    run(other, path, 2, *methods)
    assert len(other.scored) == 2 * len(results), "scores of other weights are not used"


def test_differences_are_paired_with_the_control_and_the_base(tmp_path: Path) -> None:
    yardstick = SampleYardstick("resized", "divprune")
    _, rows = run(yardstick, tmp_path / "j", 8, "divprune", "instruction-free")
    state = find(rows, "instruction-free")
    assert state.accuracy == Estimate(50, 50, 50) and state.tokens == 4
    assert state.less_resized == state.less_base == Estimate(50, 50, 50)
    assert find(rows, "instruction-free", "first").less_resized == Estimate(100, 100, 100)
    assert find(rows, "instruction-free", "second").less_resized == Estimate(0, 0, 0)
    assert find(rows, "divprune").less_resized == Estimate(0, 0, 0)
    assert find(rows, "divprune").less_base is None
    assert find(rows, "divprune").less_default == Estimate(-50, -50, -50)
    assert state.less_default is None, "it is the default itself"
    assert find(rows, "full").less_resized is find(rows, "resized").less_resized is None


@pytest.mark.parametrize(
    ("wrong", "verdict"),
    [
        ("resized", "`instruction-free` is better than resizing"),
        ("instruction-free", "resizing is better than `instruction-free`"),
        ("", "not decided"),
    ],
)
def test_the_page_says_who_wins(tmp_path: Path, wrong: str, verdict: str) -> None:
    _, rows = run(SampleYardstick(wrong), tmp_path / "j", 8, "divprune", "instruction-free")
    measured = yardsticks.Measured("sample", "sample 1", "instruction-free", "K = 4", rows)
    page = yardsticks.as_markdown([measured])
    line = next(line for line in page.splitlines() if line.startswith("- K = 4, all questions"))
    assert line.endswith(verdict)
    assert "| **instruction-free** | not read | " in page


def test_rows_of_every_kind_at_every_budget_are_data(tmp_path: Path) -> None:
    _, rows = run(SampleYardstick("resized"), tmp_path / "j", 8, "divprune", "instruction-free")
    measured = [yardsticks.Measured("sample", "sample 1", "", "K = 4", rows)]
    (document,) = json.loads(yardsticks.as_json(measured))
    kinds = {(row["budget"], row["kind"]) for row in document["rows"]}
    assert kinds == {(budget, kind) for budget in ("all", "K = 4") for kind in (None, "a", "b")}
    records = list(csv.DictReader(yardsticks.as_csv(measured).splitlines()))
    assert len(records) == len(rows)
    place = {"name": "instruction-free", "category": "", "kind": ""}
    (state,) = (record for record in records if record.items() >= place.items())
    assert (state["accuracy"], state["less_resized_low"]) == ("50.0", "50.0")
    assert records[0]["name"] == "full" and records[0]["less_resized"] == ""


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- yardsticks -->\nold\n<!-- /yardsticks -->\nafter\n")
    yardsticks.write_between_markers(page, "new\n")
    assert page.read_text() == (
        "before\n<!-- yardsticks -->\n\nnew\n\n<!-- /yardsticks -->\nafter\n"
    )
    page.write_text("no markers")
    with pytest.raises(ValueError, match="has no <!-- yardsticks -->"):
        yardsticks.write_between_markers(page, "new\n")
