"""Why a candidate won, in sentences: its rivals, and what held-out examples changed."""

from __future__ import annotations

from collections.abc import Iterator

from offline_search.ledger.records import WinnerRecord
from offline_search.report.search_report import SearchReport


def explain_winner(report: SearchReport, winner: WinnerRecord) -> Iterator[str]:
    """The rule, the margin to the next candidate, and the leader of the search split if another."""
    ranked = sorted(winner.estimates, key=lambda name: -winner.estimates[name])
    yield (
        f"The {len(winner.confirmed)} best candidates of the search split were measured on the "
        "validation split. The winner has the highest objective on the examples of both together: "
        "the search split alone favours candidates that were lucky on it."
    )
    rivals = [name for name in ranked if name != winner.winner]
    if rivals and winner.winner in winner.estimates:
        margin = winner.estimates[winner.winner] - winner.estimates[rivals[0]]
        own_estimate = report.format_objective(winner.estimates[winner.winner])
        yield (
            f"On both together {winner.winner} has {own_estimate}, "
            f"{report.format_objective(margin).lstrip('+')} more than {rivals[0]}, the next."
        )
    yield describe_leader(winner, report.ranked[0].name if report.ranked else None)
    own = winner.confirmed[winner.winner].objective
    score = next((row.objective for row in report.rows if row.name == winner.winner), None)
    if score is not None:
        search, validation, test = map(
            report.format_objective, (score, own.value, winner.test.objective.value)
        )
        yield (
            f"Its objective is {search} on the search split, {validation} on the validation split "
            f"and {test} on the test split."
        )


def describe_leader(winner: WinnerRecord, leader: str | None) -> str:
    """Whether the winner also led on the search split, as the progress of the search shows it."""
    if leader is None or leader == winner.winner:
        return f"{winner.winner} was also the best on the search split."
    return (
        f"On the search split alone {leader} was better; with the validation split "
        f"{winner.winner} is."
    )
