"""Accuracy by turn and arm, and what recall wins back of what later turns lose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.common.report import Claim, Section, Table, format_estimate
from benchmarks.minillava.conversations.arms import FULL, Arm
from benchmarks.minillava.conversations.draw import TURNS, Conversation
from benchmarks.minillava.wordings import CATEGORIES
from vllm_autoprune.statistics import ClusterBootstrap, Estimate, Floats, at_most, estimate

Answers = Mapping[str, Sequence[Sequence[bool]]]
"""By name of the arm: for every conversation, whether each turn's answer is right."""

_TITLE = "Conversations"
_SECOND = 1


@dataclass(frozen=True)
class TurnComparison:
    """Accuracy by arm and turn over the same conversations, resampled together."""

    conversations: Sequence[Conversation]
    answers: Answers

    def mean(self, arm: Arm, turn: int) -> Floats:
        """Accuracy of a turn, on the sample and on every resample, in per cent."""
        bootstrap = ClusterBootstrap([one[0].image_id for one in self.conversations])
        right = np.asarray(self.answers[arm.name], dtype=np.float64)[:, turn]
        return 100 * bootstrap.mean(right)

    def lost(self, arm: Arm, turn: int) -> Floats:
        """Points below all tokens."""
        return self.mean(FULL, turn) - self.mean(arm, turn)

    def won_back(self, arm: Arm, turn: int) -> Estimate:
        """Per cent of what the arm without recall loses; not a number where that loses nothing."""
        left, lost = self.lost(arm, turn), self.lost(arm.without_recall(), turn)
        with np.errstate(invalid="ignore", divide="ignore"):
            return estimate(100 * (1 - left / lost))

    def below_half(self, arm: Arm, turn: int) -> Estimate:
        """Points that the arm lacks to half of what the arm without recall loses."""
        left, lost = self.lost(arm, turn), self.lost(arm.without_recall(), turn)
        return estimate(left - lost / 2)


def _signed(difference: Estimate) -> str:
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*asdict(difference).values())


def _recall(arm: Arm) -> str:
    by = {"question": "", "random": " at random", "evidence": " of the evidence"}
    return f"{arm.recall}{by[arm.recall_by]}" if arm.recall else "-"


def _turn_table(
    comparison: TurnComparison, arms: Sequence[Arm], budget: int, lengths: Mapping[str, str]
) -> Table:
    """Accuracy of every turn at one K; arms with more tokens from the start come last."""
    rows = []
    for arm in (FULL, *arms):
        cells = [format_estimate(estimate(comparison.mean(arm, turn))) for turn in range(TURNS)]
        gain = "-"
        if arm.recall:
            plain = comparison.mean(arm.without_recall(), _SECOND)
            gain = _signed(estimate(comparison.mean(arm, _SECOND) - plain))
        kept = str(arm.budget) if arm.state else "all"
        name = f"`{arm.state}`" if arm.state else "all tokens"
        rows.append([name, kept, _recall(arm), *cells, gain, lengths.get(arm.name, "-")])
    turns = [f"turn {turn + 1}, %" for turn in range(TURNS)]
    columns = ["state", "K", "K_r", *turns, "turn 2 by recall", "prompt of turn 4"]
    return Table(f"K = {budget}.", columns, rows, "lrl" + "r" * (TURNS + 2))


def _category_table(comparison: TurnComparison, arms: Sequence[Arm], budget: int) -> Table:
    """Accuracy of turn 2 by category."""
    seconds = [one[_SECOND].kind for one in comparison.conversations]
    rows = []
    for name, kinds in CATEGORIES.items():
        members = [place for place, kind in enumerate(seconds) if kind in kinds]
        if not members:
            continue
        shares = [
            np.mean([comparison.answers[arm.name][place][_SECOND] for place in members])
            for arm in (FULL, *arms)
        ]
        rows.append([name, str(len(members)), *(f"{100 * share:.1f}" for share in shares)])
    heads = ["all tokens"]
    for arm in arms:
        heads.append(f"`{arm.state}`" + (f", K_r = {_recall(arm)}" if arm.recall else ""))
    columns = ["category", "questions", *heads]
    caption = f"Turn 2 by category at K = {budget}, per cent right."
    return Table(caption, columns, rows, "l" + "r" * (len(heads) + 1))


def _claims(comparison: TurnComparison, arms: Sequence[Arm]) -> Iterator[Claim]:
    for arm in arms:
        if not arm.recall or arm.recall_by != "question":
            continue
        won = comparison.won_back(arm, _SECOND)
        lost = estimate(comparison.lost(arm.without_recall(), _SECOND))
        yield Claim(
            f"`{arm.state}`, K = {arm.budget}: recalling {arm.recall} tokens wins back at least "
            "half of what turn 2 loses",
            f"{format_estimate(won, digits=0)} % of {format_estimate(lost)} points",
            at_most(comparison.below_half(arm, _SECOND), 0.0),
        )


def build_section(
    conversations: Sequence[Conversation],
    arms: Sequence[Arm],
    answers: Answers,
    setup: Sequence[str],
    lengths: Mapping[str, str] | None = None,
    data: Mapping[str, object] | None = None,
) -> Section:
    """The report; ``lengths`` are the prompt lengths that a server counted, by arm."""
    comparison = TurnComparison(conversations, answers)
    budgets = sorted({arm.budget for arm in arms if arm.recall})
    tables: list[Table] = []
    claims: list[Claim] = []
    for budget in budgets:
        own = [arm for arm in arms if arm.budget == budget]
        most = max(arm.recall for arm in own)
        more = [
            arm for arm in arms
            if arm.budget in {budget + one.recall * (TURNS - 1) for one in own if one.recall}
            and not arm.recall and arm.budget not in budgets
        ]  # fmt: skip
        tables.append(_turn_table(comparison, [*own, *more], budget, lengths or {}))
        split = [arm for arm in own if arm.state == own[-1].state]
        shown = [arm for arm in split if arm.recall in (0, most)]
        tables.append(_category_table(comparison, shown, budget))
        claims += _claims(comparison, own)
    kinds = [[example.kind for example in one] for one in conversations]
    content: dict[str, object] = {
        "arms": [asdict(arm) for arm in arms],
        "images": [one[0].image_id for one in conversations],
        "kinds": kinds,
        "right": {name: [list(map(int, turns)) for turns in own] for name, own in answers.items()},
        "won back in turn 2, per cent": {
            arm.name: asdict(comparison.won_back(arm, _SECOND)) for arm in arms if arm.recall
        },
    }
    return Section("conversations", _TITLE, setup, claims, tables, {**content, **(data or {})})
