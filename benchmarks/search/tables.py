"""Tables of a comparison in Markdown: its searches, their winners confirmed, their candidates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.search.results import (
    BASE,
    CURVE_SHARES,
    Confirmed,
    read_confirmation,
    read_results,
    results_of,
    search_name,
)
from offline_search.ledger import read_ledger
from offline_search.report import SearchReport, read_report
from vllm_autoprune.report import Table

# Two-sided 95 % quantiles of Student's t distribution, for 1 to 9 degrees of freedom.
_T_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def format_searches(folder: Path, strategies: Sequence[str], seeds: Sequence[int]) -> str:
    """Tables of test results and learning curves, and paired differences between neighbours."""
    known = read_results(folder)
    rows, curves, objectives = [], [], list[dict[int, float]]()
    for strategy in strategies:
        results = results_of(known, strategy, seeds)
        ended = {seed: r for seed, r in results.items() if r.winner is not None}
        winners = {seed: r.winner for seed, r in ended.items() if r.winner is not None}
        objectives.append({seed: winner.objective for seed, winner in winners.items()})
        candidates = sum(result.candidates for result in results.values())
        invalid = sum(result.invalid for result in results.values())
        share = f"{100 * invalid / candidates:.0f}" if candidates else ""
        if not winners:
            rows.append([strategy, "0", *[""] * 4, share])
            continue
        rows.append([
            strategy,
            str(len(winners)),
            format_mean([winner.objective for winner in winners.values()]),
            format_mean([winner.gain for winner in winners.values()]),
            format_mean([100 * winner.accuracy for winner in winners.values()], 1),
            f"{statistics.mean(result.answers for result in ended.values()):.0f}",
            share,
        ])  # fmt: skip
        # Best objective after shares of the evaluations, where every search has one by then.
        columns = zip(*(result.curve for result in ended.values()), strict=True)
        best = [[value for value in column if value is not None] for column in columns]
        means = (f"{statistics.mean(c):.4f}" if len(c) == len(ended) else "" for c in best)
        curves.append([strategy, *means])
    head = ["strategy", "seeds", "test objective", "gain over base", "accuracy %", "answers"]
    lines = [Table("", [*head, "invalid %"], rows, "lrrrrrr").markdown(), ""]
    shares = (f"{share:.0%}" for share in CURVE_SHARES)
    lines += [Table("", ["search objective after", *shares], curves, "lrrrr").markdown(), ""]
    for (one, mine), (other, theirs) in pairwise(zip(strategies, objectives, strict=True)):
        if differences := [mine[seed] - theirs[seed] for seed in mine if seed in theirs]:
            lines.append(f"- {one} less {other}, paired by seed: {format_mean(differences)}")
    return "\n".join(lines) + "\n"


def format_mean(values: Sequence[float], digits: int = 4) -> str:
    """Mean with its 95 % confidence interval by Student's t; only the mean of a single value."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    width = _t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.{digits}f} ± {width:.{digits}f}"


def _t_quantile(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t distribution.

    Above the table by the expansion around the normal quantile (Abramowitz and Stegun, 26.7.5),
    which is right to three decimals there.
    """
    if freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def format_confirmed(
    folder: Path, strategies: Sequence[str], seeds: Sequence[int], reference: str = ""
) -> str:
    """Confirmed objective and accuracy of each strategy, and paired differences to one of them.

    The reference is the last strategy by default. Differences to the base policy follow where it
    was measured.
    """
    confirmed = read_confirmation(folder)
    objectives = {
        strategy: {
            seed: confirmed[name]
            for seed in seeds
            if (name := search_name(strategy, seed)) in confirmed
        }
        for strategy in strategies
    }
    reference = reference or strategies[-1]
    head = ["strategy", "seeds", "objective", "accuracy %", f"less {reference}, paired by seed"]
    base = confirmed.get(BASE)
    head += [f"less {BASE}"] if base else []
    rows = []
    for strategy, own in objectives.items():
        if not own:
            continue
        others = objectives[reference]
        pairs = [(own[seed], others[seed]) for seed in own if seed in others]
        rows.append([
            strategy,
            str(len(own)),
            format_mean([one.objective for one in own.values()], 2),
            format_mean([100 * one.accuracy for one in own.values()], 1),
            format_difference(pairs) if pairs and strategy != reference else "-",
            *([format_difference([(one, base) for one in own.values()])] if base else []),
        ])  # fmt: skip
    questions = {one.questions for one in confirmed.values()}
    note = f"{', '.join(map(str, sorted(questions)))} questions; \u00b1 is Student's t over seeds"
    note += ", in differences over questions as well." if base else "."
    return "\n".join([Table("", head, rows, "lrrrrr"[: len(head)]).markdown(), "", note]) + "\n"


def format_states(folder: Path, names: Iterable[str]) -> str:
    """Confirmed objective and accuracy of single states, and differences to the base policy."""
    confirmed = read_confirmation(folder)
    rows = [
        [
            name,
            f"{row.objective:.2f}",
            f"{100 * row.accuracy:.1f}",
            format_difference([(row, base)]),
        ]
        for name in names
        if (row := confirmed.get(name)) and (base := confirmed.get(BASE))
    ]
    head = ["state", "objective", "accuracy %", f"less {BASE}"]
    return Table("", head, rows, "lrrr").markdown() + "\n"


def format_difference(pairs: Sequence[tuple[Confirmed, Confirmed]]) -> str:
    """Mean difference over pairs, one a seed, with its 95 % interval over seeds and questions.

    The variance of the mean is bounded by the sum of those over seeds and over blocks of questions
    (two crossed random effects, whose residual counts twice), and Student's t has the fewer degrees
    of freedom of the two. An effect with a single level is left out, as questions without blocks.
    """
    by_seed = [winner.objective - other.objective for winner, other in pairs]
    blocks = [np.subtract(a.blocks, b.blocks) for a, b in pairs if a.blocks and b.blocks]
    by_block = np.mean(blocks, axis=0).tolist() if blocks else []
    mean = statistics.mean(by_seed)
    effects = [effect for effect in (by_seed, by_block) if len(effect) > 1]
    if not effects:
        return f"{mean:.2f}"
    variance = sum(statistics.variance(effect) / len(effect) for effect in effects)
    width = _t_quantile(min(map(len, effects)) - 1) * math.sqrt(variance)
    return f"{mean:.2f} ± {width:.2f}"


_HEAD = ("candidates", "valid", "evaluated", "best", "mean", "worst", "std")


def format_candidates(ledgers: Sequence[Path]) -> str:
    """The paper's tables of proposers and of seeds: a row for each search and each proposer.

    Valid are candidates that loaded and passed the safety check; best, mean, worst and standard
    deviation are over the objectives of those that were evaluated to the end.
    """
    reports = {path: read_report(read_ledger(path)) for path in ledgers}
    searches = [
        [path.stem, _proposer(report), str(report.settings.seed), *_figures([report])]
        for path, report in reports.items()
    ]
    proposers: dict[str, list[SearchReport]] = {}
    for report in reports.values():
        proposers.setdefault(_proposer(report), []).append(report)
    by_proposer = [[name, str(len(own)), *_figures(own)] for name, own in proposers.items()]
    return "\n".join([
        Table("", ["search", "proposer", "seed", *_HEAD], searches, "llrrrrrrrr").markdown(), "",
        Table("", ["proposer", "searches", *_HEAD], by_proposer, "lrrrrrrrr").markdown(),
    ]) + "\n"  # fmt: skip


def _proposer(report: SearchReport) -> str:
    return report.settings.proposer or "none"


def _figures(reports: Sequence[SearchReport]) -> Iterator[str]:
    rows = [row for report in reports for row in report.rows]
    objectives = [row.objective for row in rows if row.objective is not None]
    yield str(len(rows))
    yield str(sum(row.result.status not in ("invalid", "unsafe") for row in rows))
    yield str(len(objectives))
    if not objectives:
        yield from ("-",) * 4
        return
    for value in (max(objectives), statistics.mean(objectives), min(objectives)):
        yield f"{value:.3f}"
    yield f"{statistics.stdev(objectives):.3f}" if len(objectives) > 1 else "-"
