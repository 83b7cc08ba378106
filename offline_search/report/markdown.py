"""Markdown report, and the tables and sentences that the HTML report has in common with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from offline_search.evaluation.history import FAILURES_TO_GIVE_UP, gave_up
from offline_search.ledger.records import Comparison, WinnerRecord
from offline_search.report.search_report import CandidateRow, SearchReport
from vllm_autoprune.statistics import Estimate, count_decimals

_MAX_ROWS = 10

RESULT_HEAD = ["", "objective", "accuracy %", "accuracy+ %", "MME total"]
CANDIDATE_HEAD = ["candidate", "objective", "accuracy %", "accuracy+ %", "answers", "origin"]


def as_markdown(report: SearchReport) -> str:
    """Result, best candidates, causes of failures, common atoms, and costs."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: SearchReport) -> Iterator[str]:
    settings, winner = report.settings, report.winner
    budgets = ", ".join(map(str, settings.budgets))
    yield (
        f"Strategy {settings.strategy}, base policy {settings.base_policy}, K = {budgets}, "
        f"seed {settings.seed}; {settings.evaluator}; proposer {settings.proposer or 'none'}."
    )
    yield ""
    if winner is None:
        yield "No winner yet: the search has not ended."
    else:
        yield f"Winner: {winner.winner}, digest {winner.digest[:12]}, on the test split"
        yield f"({winner.test.examples} held-out examples; 95 % intervals over images):"
        yield ""
        yield from table(RESULT_HEAD, result_rows(winner.test, winner.base), "lrrrr")
    yield ""
    candidates = [_candidate_cells(row) for row in report.ranked[:_MAX_ROWS]]
    yield from table(CANDIDATE_HEAD, candidates, "lrrrrl")
    yield ""
    yield count_candidates(report)
    yield ""
    if report.causes:
        yield from table(["cause", "times"], cause_rows(report), "lr")
        yield ""
    if report.common_atoms:
        rows = [[f"`{name}`", *shares] for name, *shares in common_atom_rows(report)]
        yield from table(["atom", "of the best five", "of all"], rows, "lrr")
        yield ""
    yield from describe_cost(report)


def result_rows(test: Comparison, base: Comparison) -> list[list[str]]:
    """Rows for :data:`RESULT_HEAD`: the winner, the base policy, and the difference."""
    rows = [
        [name, format_interval(one.objective), format_percent(one.accuracy),
         format_percent(one.accuracy_plus), f"{one.mme_total:.1f}"]
        for name, one in (("winner", test), ("base policy", base))
    ]  # fmt: skip
    gain, accuracy_gain = format_interval(test.gain), format_interval(test.accuracy_gain, 100)
    return [
        *rows,
        ["gain, paired", gain, accuracy_gain, "", f"{test.mme_total - base.mme_total:+.1f}"],
    ]


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


def cause_rows(report: SearchReport) -> list[list[str]]:
    """Reasons for which candidates were not evaluated, with the number of candidates each."""
    return [[cause, str(count)] for cause, count in report.causes.items()]


def common_atom_rows(report: SearchReport) -> list[list[str]]:
    """Atoms that the best candidates have in common, with their shares in per cent."""
    return [
        [name, format_percent(best), format_percent(every)]
        for name, (best, every) in report.common_atoms.items()
    ]


def _candidate_cells(row: CandidateRow) -> list[str]:
    result = row.result
    return [
        row.name,
        "" if result.objective is None else f"{result.objective:+.4f}",
        format_percent(result.accuracy),
        format_percent(result.accuracy_plus),
        str(result.examples),
        row.origin,
    ]


def count_candidates(report: SearchReport) -> str:
    """Sentence on the number of candidates, their statuses, and the success of each origin."""
    if not report.rows:
        return "No candidate has been proposed yet."
    statuses = ", ".join(f"{count} {status}" for status, count in report.statuses.items())
    origins = "; ".join(
        f"{origin} {improvements} of {count}"
        for origin, (count, improvements) in report.origins.items()
    )
    end = ""
    if gave_up([row.result for row in report.rows]):
        end = f" The search gave up: the last {FAILURES_TO_GIVE_UP} were invalid or unsafe."
    return (
        f"{len(report.rows)} candidates: {statuses}. Best when measured, by origin: {origins}.{end}"
    )


def describe_cost(report: SearchReport) -> Iterator[str]:
    """Sentences on the cost of the proposer and of the evaluator."""
    cost, proposer = report.cost, report.cost.proposer
    price = f", at a price of {proposer.money:.4f}" if proposer.money else ""
    yield (
        f"Proposer: {cost.replies:,} replies in {cost.proposer_seconds:,.0f} s "
        f"({cost.failed_replies} failed, {cost.repairs} to repair others), "
        f"{proposer.prompt_tokens:,} prompt and {proposer.completion_tokens:,} completion "
        f"tokens{price}."
    )
    yield (
        f"Evaluator: {cost.answers:,} answers in {cost.evaluator_seconds:,.0f} s "
        f"({cost.failed_evaluations} evaluations failed). The whole search: "
        f"{report.duration:,.0f} s."
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> Iterator[str]:
    """Lines of a Markdown table; ``align`` has ``l`` or ``r`` for each column."""
    yield _format_row(head)
    yield _format_row(["--:" if side == "r" else ":--" for side in align])
    yield from (_format_row([cell.replace("|", "\\|") for cell in row]) for row in rows)


def _format_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def format_interval(estimate: Estimate, scale: float = 1.0) -> str:
    """A mean with its 95 % interval."""
    value, low, high = (scale * x for x in (estimate.value, estimate.low, estimate.high))
    digits = count_decimals(low, high)
    return f"{value:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def format_percent(share: float | None) -> str:
    """A share in per cent, or an empty string."""
    return "" if share is None else f"{100 * share:.1f}"
