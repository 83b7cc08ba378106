"""A reading as Markdown.

Knows nothing about ledgers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from offline_search.records import Chosen, Comparison, Measured
from offline_search.report.reading import Reading, Row

_SHOWN = 10


def as_markdown(found: Reading) -> str:
    """Result, best candidates, causes, what the best share, and both costs."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Reading) -> Iterator[str]:
    settings = found.settings
    budgets = ", ".join(map(str, settings.budgets))
    yield (
        f"Strategy {settings.strategy}, base policy {settings.base_policy}, K = {budgets}, "
        f"seed {settings.seed}; {settings.evaluator}; proposer {settings.proposer or 'none'}."
    )
    yield ""
    if found.chosen is not None:
        yield f"Winner: {found.chosen.winner}, digest {found.chosen.digest[:12]}, on the test split"
        yield from _result(found.chosen.test, found.chosen.base)
    else:
        yield "No winner yet: the search has not ended."
    yield ""
    if found.chosen is not None and found.chosen.front:
        yield FRONT
        yield ""
        head, rows = front(found.chosen)
        yield from table(head, rows, "l" + "r" * (len(head) - 1))
        yield ""
    yield from table(HEAD, [cells(row) for row in found.ranked[:_SHOWN]], "lrrrrl")
    yield ""
    yield counted(found)
    yield ""
    if found.causes:
        yield from table(["cause", "times"], [[c, str(n)] for c, n in found.causes.items()], "lr")
        yield ""
    if found.shared:
        rows = [[f"`{n}`", percent(a), percent(b)] for n, (a, b) in found.shared.items()]
        yield from table(["atom", "of the best five", "of all"], rows, "lrr")
        yield ""
    yield from spending(found)


RESULT_HEAD = ["", "objective", "accuracy %", "accuracy+ %", "MME total"]


def result_rows(test: Comparison, base: Comparison) -> list[list[str]]:
    """Winner, base policy and the gain between them, as rows of :data:`RESULT_HEAD`."""
    shown = [
        [name, measured(one.objective), percent(one.accuracy), percent(one.accuracy_plus),
         f"{one.mme_total:.1f}"]
        for name, one in (("winner", test), ("base policy", base))
    ]  # fmt: skip
    gain = f"{test.mme_total - base.mme_total:+.1f}"
    return [
        *shown,
        ["gain, paired", measured(test.gain), measured(test.accuracy_gain, 100), "", gain],
    ]


FRONT = "Pareto front: no other candidate is better on every axis. Figures of the test split:"


def front(chosen: Chosen) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table of the Pareto front; latency in milliseconds, as measured."""
    names = list(next(iter(chosen.front.values())).test)
    head = ["candidate", *("selection ms" if name == "latency" else name for name in names)]
    rows = [
        [who, *(f"{-member.test[name]:.2g}" if name == "latency" else f"{member.test[name]:+.4f}"
                for name in names)]
        for who, member in chosen.front.items()
    ]  # fmt: skip
    return head, rows


HEAD = ["candidate", "objective", "accuracy %", "accuracy+ %", "answers", "origin"]


def cells(row: Row) -> list[str]:
    """One candidate as a row of :data:`HEAD`."""
    tried = row.tried
    return [
        row.name,
        "" if tried.objective is None else f"{tried.objective:+.4f}",
        percent(tried.accuracy),
        percent(tried.accuracy_plus),
        str(tried.examples),
        row.proposed.origin,
    ]


def _result(test: Comparison, base: Comparison) -> Iterator[str]:
    yield f"({test.examples} examples nobody has chosen by; 95 % intervals over images):"
    yield ""
    yield from table(RESULT_HEAD, result_rows(test, base), "lrrrr")


def counted(found: Reading) -> str:
    """How many candidates there were, and what became of them."""
    became = ", ".join(f"{number} {status}" for status, number in found.statuses.items())
    made = ", ".join(f"{origin} {led} of {tried}" for origin, (tried, led) in found.origins.items())
    return f"{len(found.rows)} candidates: {became}. Led the search when they came: {made}."


def spending(found: Reading) -> Iterator[str]:
    """Both costs."""
    spent, cost = found.spending, found.spending.proposer
    yield (
        f"Proposer: {spent.replies} replies ({spent.failed_replies} failed, {spent.repairs} "
        f"repairs), {cost.prompt_tokens} + {cost.completion_tokens} tokens, money "
        f"{cost.money:.4f}, {spent.proposer_seconds:.0f} s."
    )
    yield (
        f"Evaluator: {spent.answers} answers ({spent.failed_evaluations} failed evaluations), "
        f"{spent.evaluator_seconds:.0f} s. From first to last record: {found.span:.0f} s."
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> Iterator[str]:
    """A Markdown table; ``align`` has ``l`` or ``r`` for each column."""
    yield _row(head)
    yield _row(["--:" if side == "r" else ":--" for side in align])
    yield from (_row([cell.replace("|", "\\|") for cell in row]) for row in rows)


def _row(cells_: Sequence[str]) -> str:
    return f"| {' | '.join(cells_)} |"


def measured(value: Measured, scale: float = 1.0) -> str:
    """A figure with its interval."""
    low, high = scale * value.low, scale * value.high
    return f"{scale * value.value:+.4g} ({low:+.4g} to {high:+.4g})"


def percent(share: float | None) -> str:
    """A share in per cent."""
    return "" if share is None else f"{100 * share:.1f}"
