"""The table of both yardsticks, on a model of known answers; the published ones, recomputed."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.accuracy import __main__ as published
from benchmarks.accuracy import yardsticks
from benchmarks.yardsticks.examples import Example, draw_examples
from benchmarks.yardsticks.minillava import MiniLlava
from benchmarks.yardsticks.miniqwen import MiniQwen
from benchmarks.yardsticks.yardstick import Budget, Case, Scores, Yardstick
from vllm_autoprune.evaluation.scoring import MMBENCH
from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES


class SampleYardstick(Yardstick):
    """Has no model: digits are right but in cases ``wrong``, texts with all tokens only."""

    name, key, default, usual_tokens = "sample", "minillava", "instruction-free", 16
    budgets = (Budget("K = 2", Fraction(1, 8)),)
    available = frozenset(("cls_attention",))
    network = tokenizer = None
    model: Any = "sample 1"

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong

    def encode(self, batch: Sequence[Example]) -> Any:
        def score(case: Case) -> Scores:
            rights = {"digit": case.name != self.wrong, "text": case.name == "full"}
            right = torch.tensor([rights[example.kind] for example in batch])
            return Scores(right, torch.zeros(len(batch)), case.budget.tokens(16))

        return SimpleNamespace(score=score)


def test_a_yardstick_has_the_cases_whose_inputs_its_server_provides() -> None:
    llava, qwen = (
        {case.name: case for case in yardsticks.build_cases(model)}
        for model in (MiniLlava(), MiniQwen())
    )
    controls = {"full", "resized", "random", "oracle"}
    assert {*controls, *BASE_POLICIES, "minillava"} - llava.keys() == {"pyramiddrop"}
    assert not [name for name in llava if name.endswith("@merger_in")]
    assert {*controls, "cdpruner", "divprune", "mmtok", "autoprune@merger_in"} <= qwen.keys()
    assert not {"visionzip", "trim", "fastv", "holov@merger_in", "mmtok@merger_in"} & qwen.keys()
    # Rounded down, and at least one.
    assert [MiniQwen.budgets[2].tokens(count) for count in (36, 54, 108, 4)] == [4, 6, 13, 1]
    before = qwen["divprune@merger_in"]
    assert before.state is not None and before.state.rank_at == "merger_in"
    assert before.base == "divprune", "the paired interval is that of before against after"
    cases = yardsticks.build_cases(MiniLlava(), ("cdpruner", "ablation-quota-8"))
    assert [case.name for case in cases[:4]] == ["full", "resized", "cdpruner", "ablation-quota-8"]


def test_no_base_policy_keeps_the_tokens_of_another() -> None:
    yardstick, picks = MiniLlava(), {}
    tokens = yardstick.encode(draw_examples("test", 1)).tokens
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
    yardstick, image = SampleYardstick(wrong), torch.zeros(3, 2, 2)
    cases = yardsticks.build_cases(yardstick, ("divprune", "instruction-free"))
    examples = [
        Example(number, image, f"{kind} {number}?", "yes", kind, None, ())
        for number in range(8)
        for kind in ("digit", "text")
    ]
    rows = list(yardsticks.measure(yardstick, cases, examples))
    by_part = {(row.name, row.category): row for row in rows if row.kind is None}
    state, base = by_part["instruction-free", None], by_part["divprune", None]
    half, less_base = gain / 2, min(gain / 2, 0.0)
    assert state.less_resized == Estimate(half, half, half) and state.tokens == 2
    kind = by_part["instruction-free", "attributes"]
    assert kind.less_resized == Estimate(gain, gain, gain)
    assert state.less_base == Estimate(less_base, less_base, less_base)
    assert base.less_default == Estimate(-less_base, -less_base, -less_base)
    unpaired = (by_part["full", None].less_resized, base.less_base, state.less_default)
    assert unpaired == (None, None, None)
    page = yardsticks.as_markdown(yardstick, rows).splitlines()
    assert next(line for line in page if line.startswith("- K = 2, all")).endswith(verdict)
    assert any(line.startswith("| **instruction-free** | not read | ") for line in page)
    records = list(csv.DictReader(yardsticks.as_csv(rows).splitlines()))
    assert len(records) == len(rows) == 4 * 5, "all questions, two categories, two kinds"
    (record,) = (r for r in records if (r["name"], r["category"]) == ("instruction-free", ""))
    assert float(record["less_resized_low"]) == half and record["reads_question"] == "False"


def test_only_autoprune_on_llava_follows_the_papers_formula_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Baselines carry the mean of ratios, AutoPrune the ratio of means, in one and the same table:
    a difference of Rel. between the two is of two different things.
    """
    rows = [(table, row) for table in published.read_published() for row in table.rows]
    assert all(table.definition(row) == row.rel_follows for table, row in rows)
    alone = [
        (table.table, row.method, row.tokens)
        for table, row in rows
        if row.rel_follows == "ratio of means"
    ]
    assert alone == [
        ("main", "AutoPrune", 32),
        *(("supplement, LLaVA-1.5", "AutoPrune", tokens) for tokens in (128, 32)),
        *(("transfer across budgets", "AutoPrune", tokens) for tokens in (16, 32, 128)),
    ]
    assert published.main() == 0
    text = capsys.readouterr().out
    assert text.count("| AutoPrune | 32 | 63.2 | 63.1") == 3
    assert "| 99.71 | 99.53 |" in text and "| 94.70 | 94.30 |" in text, "by one definition or both"
    assert "Acc. reproduces in 86 of 86 rows" in text and "mean of ratios: 58" in text


def test_without_mmbench_autoprune_is_below_cdpruner_in_three_of_six_settings() -> None:
    acc = {
        (table.table, row.method, row.tokens): table.recompute(row, MMBENCH).acc
        for table in published.read_published()
        if table.table.startswith("supplement")
        for row in table.rows
    }
    places = [(table, tokens) for table, method, tokens in acc if method == "AutoPrune"]
    below = [p for p in places if acc[p[0], "AutoPrune", p[1]] < acc[p[0], "CDPruner", p[1]]]
    assert len(places) == 6
    assert below == [
        ("supplement, LLaVA-1.5", 128), ("supplement, LLaVA-NeXT", 640),
        ("supplement, LLaVA-NeXT", 320),
    ]  # fmt: skip
