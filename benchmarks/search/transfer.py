"""Winners of searches on all yardsticks, of which the searches saw some, with no search in between.

The *chosen* winner is the one whose gain on the questions that its search had, search and
validation split, has the highest lower bound. Only its comparisons are tests, corrected for their
number (Bonferroni); the other winners show how much depends on the seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from benchmarks.accuracy.scoring import join_rights, score_cases
from benchmarks.cost import turns
from benchmarks.search.results import BASE
from benchmarks.yardsticks.examples import draw_examples
from benchmarks.yardsticks.yardstick import Case, Yardstick
from offline_search.ledger import (
    SettingsRecord,
    WinnerRecord,
    read_ledger,
    select_records,
)
from vllm_autoprune.errors import SearchError
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import ClusterBootstrap, Estimate, Floats
from vllm_autoprune.tpdsl.loading import load_state
from vllm_autoprune.tpdsl.state import PruningState

_ERROR_RATE = 0.05
"""Probability that any of all tests says that equal states differ."""
_LEVEL = "level"


@dataclass(frozen=True)
class Winner:
    """Winner of a search of several models.

    ``gain`` is that on all questions of the search, as a share of the base policy's loss there,
    with two standard errors either way. ``seen`` are the models that were searched on.
    """

    name: str
    state: PruningState
    base_policy: str
    gain: Estimate
    seen: Sequence[str]

    @classmethod
    def read(cls, ledger: Path) -> Winner:
        """The winner that a ledger records; raises :class:`SearchError` if it records none."""
        records = read_ledger(ledger)
        winners = select_records(records, WinnerRecord)
        (opened,) = select_records(records, SettingsRecord)
        if not winners or not opened.settings.models:
            what = "has no winner of a search of several models"
            fix = "name ledgers of finished searches"
            raise SearchError.of(str(ledger), what, fix)
        (record,) = winners
        return cls(
            name=ledger.stem,
            state=load_state(record.state),
            base_policy=opened.settings.base_policy,
            gain=record.gains[record.winner],
            seen=opened.settings.models,
        )


def read_winners(ledgers: Sequence[Path]) -> list[Winner]:
    """Different winners, the chosen one first, then by the order of ``ledgers``.

    Raises :class:`SearchError` if they are not of searches upon one base policy.
    """
    winners = [Winner.read(ledger) for ledger in ledgers]
    bases = sorted({winner.base_policy for winner in winners})
    if len(bases) > 1:
        what = f"are of searches upon {' and '.join(bases)}"
        raise SearchError.of("ledgers", what, "name those upon one base policy")
    different: dict[str, Winner] = {}
    for winner in winners:
        different.setdefault(winner.state.digest, winner)
    chosen = max(different.values(), key=lambda winner: winner.gain.low)
    return [chosen, *(winner for winner in different.values() if winner is not chosen)]


@dataclass(frozen=True)
class TransferRow:
    """Per cent of right answers of the base policy and of winners, on one yardstick at one budget.

    ``gain`` is that of the chosen winner over the base policy, in points, paired by question with
    an interval over images; ``verdict`` is that of the corrected test. ``others`` are the gains of
    the other winners.
    """

    yardstick: str
    was_seen: bool
    budget: str
    questions: int
    base: float
    accuracy: float
    gain: Estimate
    verdict: str
    others: tuple[float, ...]


def judge(figure: Floats, comparisons: int) -> str:
    """Whether a difference is "ahead", "behind" or "level", as one of so many comparisons.

    ``figure``: the difference, then its values on the resamples, ``(1 + draws,)``. Their standard
    deviation is the standard error, because quantiles this far out would take too many resamples.
    """
    quantile = NormalDist().inv_cdf(1 - _ERROR_RATE / (2 * comparisons))
    width = quantile * float(figure[1:].std())
    if abs(figure[0]) <= width:
        return _LEVEL
    return "ahead" if figure[0] > 0 else "behind"


def measure_transfer(
    winners: Sequence[Winner], yardstick: Yardstick, images: int, models: int
) -> Iterator[TransferRow]:
    """A row for each budget of one yardstick, of ``models`` that are measured.

    Questions are of the first ``images`` images of the test split.
    """
    chosen = winners[0]
    examples = draw_examples("test", images, yardstick.key)
    cases = _build_cases(winners, yardstick)
    rights = join_rights(score_cases(yardstick, cases, examples))
    bootstrap = ClusterBootstrap([example.image_id for example in examples])
    for budget in yardstick.budgets:
        right_of = {
            name: right
            for (name, label), right in rights.items()
            if label == budget.label
        }
        base = right_of[BASE]
        figure = 100 * bootstrap.mean(right_of[chosen.name] - base)
        yield TransferRow(
            yardstick=yardstick.name,
            was_seen=yardstick.key in chosen.seen,
            budget=budget.label,
            questions=len(examples),
            base=100 * float(np.mean(base)),
            accuracy=100 * float(np.mean(right_of[chosen.name])),
            gain=Estimate.of(figure),
            verdict=judge(figure, models * len(yardstick.budgets)),
            others=tuple(
                100 * float(np.mean(right_of[winner.name] - base))
                for winner in winners[1:]
            ),
        )


def _build_cases(winners: Sequence[Winner], yardstick: Yardstick) -> list[Case]:
    """The base policy, with the positions of winners, and all winners, at every budget."""
    chosen = winners[0]
    update = {"positions": chosen.state.positions}
    states = {BASE: load_state(chosen.base_policy).model_copy(update=update)}
    states |= {winner.name: winner.state for winner in winners}
    return [
        Case(name, budget, state=state)
        for budget in yardstick.budgets
        for name, state in states.items()
    ]


def tabulate_transfer(winners: Sequence[Winner], rows: Sequence[TransferRow]) -> str:
    """The rows in Markdown, and which winner is the chosen one."""
    chosen = winners[0]
    head = ["", "K", f"{chosen.base_policy}, %", "winner, %", "gain, points", "test"]
    head.append("other winners")
    cells = []
    for row in rows:
        others = "-"
        if row.others:
            others = f"{min(row.others):+.1f} to {max(row.others):+.1f}"
        gain = f"{row.gain.value:+.1f} ({row.gain.low:.1f} to {row.gain.high:.1f})"
        name = row.yardstick if row.was_seen else f"{row.yardstick}, not seen"
        figures = [f"{row.base:.1f}", f"{row.accuracy:.1f}", gain, row.verdict, others]
        cells.append([name, row.budget, *figures])
    digest = chosen.state.digest[:12]
    table = Table("", head, cells, "llrrrlr").markdown()
    return f"Chosen of {len(winners)} winners: {chosen.name} ({digest}).\n\n{table}"


def write_rows(
    table: turns.Table, winners: Sequence[Winner], rows: Sequence[TransferRow]
) -> None:
    """The rows as those of ``docs/data``; the other winners in the order of their searches."""
    chosen = winners[0]
    for row in rows:
        setting = f"{row.yardstick}, {row.budget}; {chosen.base_policy}"
        table.add("right", setting, row.base, "%")
        setting = f"{row.yardstick}, {row.budget}; {chosen.name}"
        table.add("right", setting, row.accuracy, "%")
        less = f"right less {chosen.base_policy}"
        table.add(less, setting, row.gain, "points", row.verdict)
        for winner, gain in zip(winners[1:], row.others, strict=True):
            setting = f"{row.yardstick}, {row.budget}; {winner.name}"
            table.add(less, setting, gain, "points")
