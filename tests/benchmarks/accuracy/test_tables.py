"""The table of the yardsticks, on a model of known answers; the published ones, recomputed."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.accuracy import tables, yardsticks
from benchmarks.accuracy.rows import Row, merge_rows, read_rows, write_rows
from benchmarks.yardsticks.examples import Example
from benchmarks.yardsticks.minillava import MiniLlava
from benchmarks.yardsticks.miniqwen import MiniQwen
from benchmarks.yardsticks.yardstick import Budget, Case, Scores, Yardstick
from tests.benchmarks.accuracy.published import PUBLISHED
from vllm_autoprune.errors import ConfigError, StateError
from vllm_autoprune.evaluation.scoring import Aggregates
from vllm_autoprune.statistics import Estimate
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES
from vllm_autoprune.tpdsl.loading import load_state

Json = dict[str, Any]
DOCS = Path(__file__).resolve().parents[3] / "docs"


class SampleYardstick(Yardstick):
    """Has no model: digits are right but in cases ``wrong``, texts with all tokens only."""

    name = "sample"
    key = "minillava"
    search_result = "instruction-free"
    usual_tokens = 16
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
        {case.name: case for case in yardsticks._build_cases(model)}
        for model in (MiniLlava(), MiniQwen())
    )
    controls = {"full", "resized", "random", "oracle"}
    left_out = {
        "pyramiddrop",
        "echoprune",
        "evs",
        "vcast",
        "vidcom2",
    }  # FastV here; for videos
    assert {*controls, *BASE_POLICIES, "minillava"} - llava.keys() == left_out
    assert not [name for name in llava if name.endswith("@merger_in")]
    assert llava.keys() >= {"divprune@packed", "autoprune@true"}
    assert not [name for name in qwen if name.endswith(("@packed", "@true"))], "M-RoPE"
    assert {
        *controls,
        "cdpruner",
        "divprune",
        "mmtok",
        "autoprune@merger_in",
    } <= qwen.keys()
    assert (
        not {"visionzip", "trim", "fastv", "holov@merger_in", "mmtok@merger_in"}
        & qwen.keys()
    )
    unmerged = qwen["divprune@merger_in"]
    assert unmerged.state is not None and unmerged.state.rank_at == "merger_in"
    assert unmerged.base == "divprune", "what its paired interval is against"


def test_a_budget_is_rounded_down_and_at_least_one() -> None:
    budget = MiniQwen.budgets[2]
    assert [budget.tokens(count) for count in (36, 54, 108, 4)] == [4, 6, 13, 1]


def test_named_cases_stand_beside_all_tokens_and_the_resize_control() -> None:
    cases = yardsticks._build_cases(MiniLlava(), ("cdpruner", "ablation-quota-8"))
    assert [case.name for case in cases[:4]] == [
        "full",
        "resized",
        "cdpruner",
        "ablation-quota-8",
    ]
    with pytest.raises(StateError, match="did you mean 'divprune'"):
        yardsticks._build_cases(MiniLlava(), ("divprun",))


@pytest.mark.parametrize(
    ("wrong", "gain"), [("resized", 100), ("instruction-free", -100), ("", 0)]
)
def test_differences_are_paired_by_question(wrong: str, gain: int) -> None:
    yardstick = SampleYardstick(wrong)
    image = torch.zeros(3, 2, 2)
    cases = yardsticks._build_cases(yardstick, ("divprune", "instruction-free"))
    examples = [
        Example(number, image, f"{kind} {number}?", "yes", kind, None, ())
        for number in range(8)
        for kind in ("digit", "text")
    ]
    rows = list(yardsticks._measure(yardstick, cases, examples))
    by_part = {(row.name, row.category): row for row in rows if row.kind is None}
    state = by_part["instruction-free", None]
    base = by_part["divprune", None]
    half = gain / 2
    less_base = min(gain / 2, 0.0)
    assert state.less_resized == Estimate(half, half, half) and state.tokens == 2
    kind = by_part["instruction-free", "attributes"]
    assert kind.less_resized == Estimate(gain, gain, gain)
    assert state.less_base == Estimate(less_base, less_base, less_base)
    assert base.less_search_result == Estimate(-less_base, -less_base, -less_base)
    unpaired = (
        by_part["full", None].less_resized,
        base.less_base,
        state.less_search_result,
    )
    assert unpaired == (None, None, None)
    page = tables.tabulate_accuracy(yardstick, rows).splitlines()
    accuracy = state.accuracy.value
    assert f"| **instruction-free** | {accuracy:.1f} | {half:+.1f}±0.0 |" in page
    records = list(csv.DictReader(write_rows(rows).splitlines()))
    assert len(records) == len(rows) == 4 * 5, (
        "all questions, two categories, two kinds"
    )
    (record,) = (
        r for r in records if (r["name"], r["category"]) == ("instruction-free", "")
    )
    assert (
        float(record["less_resized_low"]) == half
        and record["reads_question"] == "False"
    )
    assert read_rows(write_rows(rows)) == rows


def test_another_training_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yardsticks, "open_yardstick", pytest.fail)
    with pytest.raises(SystemExit):
        yardsticks.main(["--write-docs", "--checkpoint", "norm"])
    options = yardsticks._build_parser().parse_args(["--write-docs", "--exchange"])
    assert options.write_docs and options.exchange


def test_new_rows_replace_those_about_the_same() -> None:
    yardstick = SampleYardstick("divprune")
    example = Example(0, torch.zeros(3, 2, 2), "1?", "yes", "digit", None, ())

    def measure(*names: str) -> list[Row]:
        cases = yardsticks._build_cases(yardstick, names)
        return list(yardsticks._measure(yardstick, cases, [example]))

    old = measure("divprune", "norm")
    other = [replace(row, yardstick="another") for row in old]
    yardstick.wrong = "norm"
    merged = merge_rows([*old, *other], measure("norm"), ["another", "sample"])
    assert [row.key for row in merged] == [row.key for row in (*other, *old)]
    by_name = {row.name: row.accuracy.value for row in merged if not row.category}
    assert by_name == {"full": 100, "resized": 100, "divprune": 0, "norm": 0}


def test_differences_are_written_by_the_names_of_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a second run a row about the same takes the place of the old one, others stay."""
    yardstick = SampleYardstick("divprune")
    example = Example(0, torch.zeros(3, 2, 2), "1?", "yes", "digit", None, ())
    monkeypatch.setattr(yardsticks, "_DATA", tmp_path)
    monkeypatch.setattr(yardsticks, "open_yardstick", lambda *_: yardstick)
    monkeypatch.setattr(yardsticks, "draw_examples", lambda *_: [example])
    for wrong, expected in (("divprune", 100.0), ("norm", -100.0)):
        yardstick.wrong = wrong
        for rival in ("divprune", "cen_divprune"):
            options = ["--yardsticks", "minillava", "--methods", "norm"]
            yardsticks.main([*options, "--against", rival, "--write-docs"])
        rows = read_rows((tmp_path / "duels.csv").read_text(encoding="utf-8"))
        gains = {row.name: row.less_base for row in rows if row.category is None}
        assert gains["norm less divprune"] == Estimate(expected, expected, expected)
        assert {*gains} == {
            f"{name} less {rival}"
            for name in ("norm", "resized")
            for rival in ("divprune", "cen_divprune")
        }


def test_the_page_has_the_tables_of_its_data() -> None:
    rows = read_rows((DOCS / "data/accuracy.csv").read_text(encoding="utf-8"))
    page = (DOCS / "accuracy.md").read_text(encoding="utf-8")
    for name, part in yardsticks.build_parts(rows).items():
        assert f"<!-- {name} -->\n\n{part}\n<!-- /{name} -->" in page, name


def test_positions_are_compared_by_kind_of_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "_BY_KIND", (0, ("divprune",)))
    monkeypatch.setattr(SampleYardstick, "has_one_axis", True)
    yardstick = SampleYardstick("divprune@packed")
    image = torch.zeros(3, 2, 2)
    cases = yardsticks._build_cases(yardstick, ("divprune", "divprune@packed"))
    kinds = ("digit", "digit", "digit", "text")
    examples = [
        Example(n, image, f"{n}?", "yes", kind, None, ())
        for n, kind in enumerate(kinds)
    ]
    rows = list(yardsticks._measure(yardstick, cases, examples))
    table = tables.tabulate_positions(yardstick, rows).splitlines()[2:]
    assert table == [
        "| all | 0.0→75.0 |",
        "| digit | 0.0→100.0 |",
    ], "text does not change"
    assert "@packed" not in tables.tabulate_accuracy(yardstick, rows)


def test_the_exchange_is_compared_with_the_base_policy_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = {case.name: case for case in yardsticks._build_exchange(MiniLlava())}
    upon = cases["autoprune upon trim"]
    alone = cases[upon.base].state
    released = load_state("autoprune")
    assert upon.state is not None and alone is not None
    assert upon.state.base_policy == alone.base_policy != released.base_policy
    assert upon.state.scoring == released.scoring
    assert upon.state.positions == alone.positions == released.positions == "packed"

    monkeypatch.setattr(yardsticks, "_EXCHANGE_BUDGETS", ("K = 2",))
    yardstick = SampleYardstick("divprune")
    image = torch.zeros(3, 2, 2)
    examples = [
        Example(n, image, f"{kind} {n}?", "yes", kind, None, ())
        for n in range(4)
        for kind in ("digit", "text")
    ]
    exchange = yardsticks._build_exchange(yardstick)
    rows = list(yardsticks._measure(yardstick, exchange, examples))
    table = tables.tabulate_gains(rows, "upon").splitlines()
    assert table[0] == "| upon | sample, K = 2 |"
    zero = "| `norm` | 0.0 (0.0 to 0.0) |"
    assert {"| `divprune` | 50.0 (50.0 to 50.0) |", zero} <= {*table}


def test_a_method_is_compared_with_any_other_by_question() -> None:
    yardstick = SampleYardstick("divprune")
    duel = yardsticks._build_duel(yardstick, ["divprune"], "norm")
    image = torch.zeros(3, 2, 2)
    kinds = ("digit", "text")
    examples = [Example(0, image, kind, "yes", kind, None, ()) for kind in kinds]
    rows = list(yardsticks._measure(yardstick, duel, examples))
    head, _, *body = tables.tabulate_gains(rows, "less norm").splitlines()
    assert head.startswith("| less norm | sample, K = ")
    assert any(line.startswith("| `divprune` |") for line in body)
    assert not any(line.startswith(("| `norm` |", "| `full` |")) for line in body)

    with pytest.raises(ConfigError, match="no inputs of cdpruner"):
        yardsticks._build_duel(yardstick, [], "cdpruner")


def recompute(table: Json, row: Json, without: Collection[str] = ()) -> Aggregates:
    """The figures of a row, by its printed scores and those of the full model, the first row."""
    scores, full = (
        {
            name: score
            for name, score in zip(table["benchmarks"], printed["scores"], strict=True)
            if name not in without
        }
        for printed in (row, table["rows"][0])
    )
    return Aggregates.of(scores, full, table["mme_divisor"], digits=9)


def test_published_figures_follow_their_formulas() -> None:
    """Baselines carry the mean of ratios, AutoPrune the ratio of means, in one and the same table:
    a difference of Rel. between the two is of two different things.
    """

    def rounds_to(value: float | None, printed: float, decimals: int) -> bool:
        """Whether a value is within half a unit of the last printed digit, ties included."""
        return value is not None and abs(value - printed) <= 0.5 * 10**-decimals + 1e-9

    def definition(table: Json, row: Json) -> str:
        """The definition of Rel. that gives the printed value.

        The ratio of means is tried with unrounded figures, with printed ones, and with an
        unrounded one over the printed one of the full model, as a table may have been computed
        in any of these ways.
        """
        figures = recompute(table, row)
        full = table["rows"][0]["acc"]
        ratios = (
            figures.ratio_of_means,
            100 * row["acc"] / full,
            100 * figures.acc / full,
        )
        tried = {"ratio of means": ratios, "mean of ratios": (figures.mean_of_ratios,)}
        fitting = [
            name
            for name, values in tried.items()
            if any(rounds_to(value, row["rel"], 1) for value in values)
        ]
        return "both" if len(fitting) == 2 else fitting[0]

    rows = [(table, row) for table in PUBLISHED for row in table["rows"]]
    assert len(rows) == 86
    for table, row in rows:
        assert rounds_to(recompute(table, row).acc, row["acc"], table["decimals"])
        assert definition(table, row) == row["rel_follows"]
    follows = Counter(row["rel_follows"] for _, row in rows)
    assert follows == {"mean of ratios": 58, "both": 22, "ratio of means": 6}
    alone = {row["method"] for _, row in rows if row["rel_follows"] == "ratio of means"}
    assert alone == {"AutoPrune"}
    # By one definition, or by both.
    main = {row["method"]: recompute(PUBLISHED[0], row) for row in PUBLISHED[0]["rows"]}
    for name, pair in (("AutoPrune", (99.71, 99.53)), ("CDPruner", (94.7, 94.3))):
        ratios = (main[name].ratio_of_means, main[name].mean_of_ratios)
        assert ratios == pytest.approx(pair, abs=5e-3)


def test_without_mmbench_autoprune_is_below_cdpruner_in_three_of_six_settings() -> None:
    mmbench = ("MMB-EN", "MMB-CN")
    acc = {
        (table["table"], row["method"], row["tokens"]): recompute(
            table, row, mmbench
        ).acc
        for table in PUBLISHED
        if table["table"].startswith("supplement")
        for row in table["rows"]
    }
    places = [(table, tokens) for table, method, tokens in acc if method == "AutoPrune"]
    below = [
        p for p in places if acc[p[0], "AutoPrune", p[1]] < acc[p[0], "CDPruner", p[1]]
    ]
    assert (len(places), len(below)) == (6, 3)
