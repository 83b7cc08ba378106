"""Accuracy by turn and arm, and what recall wins back of what later turns lose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.common.report import Claim, Section, Table, format_estimate
from benchmarks.minillava.conversations.arms import FULL, Arm, list_arms
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
    """Accuracy of every turn in the arms of one K."""
    rows = []
    for arm in arms:
        cells = [format_estimate(estimate(comparison.mean(arm, turn))) for turn in range(TURNS)]
        gain = "-"
        if arm.recall:
            plain = comparison.mean(arm.without_recall(), _SECOND)
            gain = _signed(estimate(comparison.mean(arm, _SECOND) - plain))
        kept = str(arm.budget) if arm.state else "all"
        name = f"`{arm.state}`" if arm.state else "all tokens"
        length = [lengths.get(arm.name, "-")] if lengths else []
        rows.append([name, kept, _recall(arm), *cells, gain, *length])
    turns = [f"turn {turn + 1}, %" for turn in range(TURNS)]
    columns = ["state", "K", "K_r", *turns, "turn 2 by recall"]
    columns += ["prompt of turn 4, tokens"] if lengths else []
    return Table(f"K = {budget}.", columns, rows, "lrl" + "r" * (len(columns) - 3))


def _category_table(comparison: TurnComparison, arms: Sequence[Arm], budget: int) -> Table:
    """Accuracy of turn 2 by category: all tokens, and K without and with the most recall."""
    most = max(arm.recall for arm in arms)
    columns = [
        arm
        for arm in arms
        if arm.state is None or (arm.budget == budget and arm.recall in (0, most))
    ]
    heads = [f"`{arm.state}`, {_recall(arm)}" if arm.state else "all tokens" for arm in columns]
    kinds = [one[_SECOND].kind for one in comparison.conversations]
    rows = []
    for name, members in CATEGORIES.items():
        places = [place for place, kind in enumerate(kinds) if kind in members]
        if places:
            shares = [
                np.mean([comparison.answers[arm.name][place][_SECOND] for place in places])
                for arm in columns
            ]
            rows.append([name, str(len(places)), *(f"{100 * share:.1f}" for share in shares)])
    caption = (
        f"Turn 2 by category at K = {budget}, per cent right; the number after a state is K_r."
    )
    align = "l" + "r" * (len(heads) + 1)
    return Table(caption, ["category", "questions", *heads], rows, align)


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
    tables: Mapping[int, Sequence[Arm]],
    answers: Answers,
    setup: Sequence[str],
    lengths: Mapping[str, str] | None = None,
    data: Mapping[str, object] | None = None,
) -> Section:
    """The report, with a table for the arms of each K; ``lengths`` of prompts by arm.

    Arms without answers are left out.
    """
    comparison = TurnComparison(conversations, answers)
    shown: list[Table] = []
    claims: list[Claim] = []
    for budget, every in tables.items():
        arms = [arm for arm in every if arm.name in answers]
        shown.append(_turn_table(comparison, arms, budget, lengths or {}))
        shown.append(_category_table(comparison, arms, budget))
        claims += _claims(comparison, arms)
    measured = [arm for arm in list_arms(tables) if arm.name in answers]
    content: dict[str, object] = {
        "arms": [asdict(arm) for arm in measured],
        "images": [one[0].image_id for one in conversations],
        "kinds": [[example.kind for example in one] for one in conversations],
        "right": answers,
        "won back in turn 2, per cent": {
            arm.name: asdict(comparison.won_back(arm, _SECOND)) for arm in measured if arm.recall
        },
    }
    return Section("conversations", _TITLE, setup, claims, shown, {**content, **(data or {})})
