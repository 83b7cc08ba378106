"""The table of both yardsticks, on a model of known answers; the published ones, recomputed."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from benchmarks.accuracy import yardsticks
from benchmarks.accuracy.__main__ import main as print_published
from benchmarks.accuracy.__main__ import read_published
from benchmarks.yardsticks.examples import Example
from benchmarks.yardsticks.minillava import MiniLlava
from benchmarks.yardsticks.miniqwen import MiniQwen
from benchmarks.yardsticks.yardstick import Budget, Case, Scores, Yardstick
from vllm_autoprune.evaluation.scoring import MMBENCH
from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES


class SampleYardstick(Yardstick):
    """Has no model: of two questions about an image the first is right but in cases ``wrong``."""

    name, key, default = "sample", "minillava", "instruction-free"
    eighth, usual_tokens = "K = 4", 16
    budgets = (Budget("K = 4", Fraction(1, 4)),)
    available = frozenset(("cls_attention",))
    network = tokenizer = None
    model: Any = "sample 1"
    categories: ClassVar[Any] = {"first": ("a",), "second": ("b",)}

    def __init__(self, *wrong: str) -> None:
        super().__init__()
        self.wrong = wrong

    def encode(self, batch: Sequence[Example]) -> Any:
        """The second question is right with all tokens only."""

        def score(case: Case) -> Scores:
            rights = {"a": case.name not in self.wrong, "b": case.name == "full"}
            right = [rights[example.kind] for example in batch]
            return Scores(torch.tensor(right), torch.zeros(len(batch)), case.budget.tokens(16))

        return SimpleNamespace(score=score)


def names_of(yardstick: Yardstick, *names: str) -> dict[str, Case]:
    return {case.name: case for case in yardsticks.build_cases(yardstick, names)}


def test_a_yardstick_has_the_cases_whose_inputs_its_server_provides() -> None:
    controls, llava, qwen = ("full", "resized", "random", "oracle"), MiniLlava(), MiniQwen()
    cases = names_of(llava)
    assert {*controls, *BASE_POLICIES, "minillava"} - cases.keys() == {"pyramiddrop"}
    assert [budget.tokens(144) for budget in llava.budgets] == [72, 36, 18, 9]
    assert not [name for name in cases if name.endswith("@merger_in")]
    assert "ablation-quota-8" not in cases
    cases = names_of(qwen)
    assert {*controls, "cdpruner", "divprune", "mmtok", "holov", "autoprune"} <= cases.keys()
    assert not {"visionzip", "trim", "prumerge_plus", "fastv", "dart", "sparsevlm"} & cases.keys()
    # Rounded down, and at least one.
    assert [qwen.budgets[2].tokens(count) for count in (36, 54, 108, 4)] == [4, 6, 13, 1]
    before = cases["divprune@merger_in"]
    assert before.state is not None and before.state.rank_at == "merger_in"
    assert before.base == "divprune", "the paired interval is that of before against after"
    assert "autoprune@merger_in" in cases
    indifferent = {f"{name}@merger_in" for name in ("scope", "mmtok", "prunesid", "holov")}
    assert not indifferent & cases.keys()
    cases = names_of(llava, "cdpruner", "ablation-quota-8")
    assert list(cases) == ["full", "resized", "cdpruner", "ablation-quota-8"]
    assert cases["ablation-quota-8"].base == "cdpruner"


def test_no_base_policy_keeps_the_tokens_of_another() -> None:
    yardstick, picks = MiniLlava(), {}
    tokens = yardstick.encode(yardstick.draw("test", 1)).tokens
    for name in BASE_POLICIES.keys() - set(yardstick.equal_policies):
        policy = BASE_POLICIES[name]
        picks[name] = policy.select(policy.default_params, tokens, 18).picks.sort(1).values.tolist()
    assert len(picks) > 10
    assert [pair for pair in combinations(picks, 2) if picks[pair[0]] == picks[pair[1]]] == []


@pytest.mark.parametrize(
    ("wrong", "gain", "verdict"),
    [
        ("resized", 100, "`instruction-free` is better than resizing"),
        ("instruction-free", -100, "resizing is better than `instruction-free`"),
        ("", 0, "not decided"),
    ],
)
def test_differences_are_paired_and_the_page_says_who_wins(
    wrong: str, gain: int, verdict: str
) -> None:
    yardstick = SampleYardstick(wrong)
    cases = yardsticks.build_cases(yardstick, ("divprune", "instruction-free"))
    examples = [
        Example(number, torch.zeros(3, 2, 2), f"{kind} {number}?", "yes", kind, None, ())
        for number in range(8)
        for kind in ("a", "b")
    ]
    rows = list(yardsticks.measure(yardstick, cases, examples))
    state, kind, base, full, resized = (
        next(row for row in rows if (row.name, row.category) == place)
        for place in (
            ("instruction-free", None), ("instruction-free", "first"), ("divprune", None),
            ("full", None), ("resized", None),
        )
    )  # fmt: skip
    half = gain / 2
    assert state.less_resized == Estimate(half, half, half) and state.tokens == 4
    assert kind.less_resized == Estimate(gain, gain, gain)
    assert base.less_base is state.less_default is full.less_resized is resized.less_resized is None
    less_base = min(half, 0.0)
    assert state.less_base == Estimate(less_base, less_base, less_base)
    assert base.less_default == Estimate(-less_base, -less_base, -less_base)
    page = yardsticks.as_markdown(yardstick, rows).splitlines()
    assert next(line for line in page if line.startswith("- K = 4, all")).endswith(verdict)
    assert any(line.startswith("| **instruction-free** | not read | ") for line in page)
    assert "| method | question | K = 4 |" in page
    records = list(csv.DictReader(yardsticks.as_csv(rows).splitlines()))
    assert len(records) == len(rows) == 4 * 5, "all questions, two categories, two kinds"
    assert (records[0]["name"], records[0]["less_resized"]) == ("full", "")
    (record,) = (r for r in records if (r["name"], r["category"]) == ("instruction-free", ""))
    assert float(record["less_resized_low"]) == half and record["reads_question"] == "False"


TABLES = read_published()


def test_only_autoprune_on_llava_follows_the_papers_formula_alone() -> None:
    """Baselines carry the mean of ratios, AutoPrune the ratio of means, in one and the same table:
    a difference of Rel. between the two is of two different things.
    """
    rows = [(table, row) for table in TABLES for row in table.rows]
    assert len(rows) == 86 and all(table.acc_reproduces(row) for table, row in rows)
    assert all(table.definition(row) == row.rel_follows for table, row in rows)
    assert {
        (table.table, table.backbone, row.method, row.tokens)
        for table, row in rows
        if table.definition(row) == "ratio of means"
    } == {
        (table, "llava-1.5-7b", "AutoPrune", tokens)
        for table, budgets in (
            ("main", (32,)),
            ("supplement, LLaVA-1.5", (128, 32)),
            ("transfer across budgets", (16, 32, 128)),
        )
        for tokens in budgets
    }


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("LLaVA-1.5", {128: (63.32, 63.24), 64: (62.44, 62.54), 32: (61.34, 61.90)}),
        ("LLaVA-NeXT", {640: (65.92, 65.29), 320: (64.84, 64.51), 160: (63.73, 63.82)}),
    ],
)
def test_without_mmbench_autoprune_is_below_cdpruner_in_three_of_six_settings(
    label: str, expected: dict[int, tuple[float, float]]
) -> None:
    (table,) = [table for table in TABLES if table.table == f"supplement, {label}"]
    acc = {(row.method, row.tokens): table.recompute(row, MMBENCH).acc for row in table.rows}
    for tokens, pair in expected.items():
        measured = [round(acc[method, tokens] + 1e-9, 2) for method in ("CDPruner", "AutoPrune")]
        assert tuple(measured) == pair


def test_the_command_prints_every_published_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_published([]) == 0
    text = capsys.readouterr().out
    assert text.count("| AutoPrune | 32 | 63.2 | 63.1") == 3
    assert "| 99.71 | 99.53 |" in text and "| 94.70 | 94.30 |" in text, (
        "by one definition, or by both"
    )
    assert "Acc. reproduces in 86 of 86 rows" in text and "mean of ratios: 58" in text
