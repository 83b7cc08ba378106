"""Tables of a comparison in Markdown: its searches, and their winners confirmed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
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
    space_of,
)
from vllm_autoprune.report import Table

# Two-sided 95 % quantiles of Student's t distribution, for 1 to 9 degrees of freedom.
_T_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


REFERENCES = ("tpe", "autoprune+@none")
"""The arms that the others are compared with, where they are among them."""


def format_tables(folder: Path, arms: Sequence[str], seeds: Sequence[int]) -> str:
    """The searches of a folder in Markdown; their winners beside each of :data:`REFERENCES`.

    Winners that were not confirmed are left out. Spaces are compared by strategy, each with the
    largest.
    """
    tables = [format_searches(folder, arms, seeds)]
    groups = {arm: list(arms) for arm in REFERENCES if arm in arms} or {arms[0]: list(arms)}
    if any(space_of(arm) != "all" for arm in arms):
        strategies: dict[str, list[str]] = {}
        for arm in arms:
            strategies.setdefault(arm.removesuffix(f"@{space_of(arm)}"), []).append(arm)
        groups = {group[0]: group for group in strategies.values()}
    if read_confirmation(folder):
        tables += [format_confirmed(folder, g, seeds, arm) for arm, g in groups.items()]
    return "\n".join(tables)


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
    for (arm, scores), (other, others) in pairwise(zip(strategies, objectives, strict=True)):
        if differences := [scores[seed] - others[seed] for seed in scores if seed in others]:
            lines.append(f"- {arm} less {other}, paired by seed: {format_mean(differences)}")
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
    linear = (z**3 + z) / 4
    square = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    cubic = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + linear / freedom + square / freedom**2 + cubic / freedom**3


def format_confirmed(
    folder: Path, arms: Sequence[str], seeds: Sequence[int], reference: str
) -> str:
    """Confirmed objective and accuracy of each arm, and paired differences to one of them.

    Differences to the base policy follow where it was measured.
    """
    confirmed = read_confirmation(folder)
    base = confirmed.get(BASE)

    def scores_of(arm: str) -> dict[int, Confirmed]:
        names = {seed: search_name(arm, seed) for seed in seeds}
        return {seed: confirmed[name] for seed, name in names.items() if name in confirmed}

    head = ["strategy", "seeds", "objective", "accuracy %", f"less {reference}, paired by seed"]
    head += [f"less {BASE}"] if base else []
    rows, others = [], scores_of(reference)
    for arm in arms:
        if not (scores := scores_of(arm)):
            continue
        pairs = [(scores[seed], others[seed]) for seed in scores if seed in others]
        rows.append([
            arm,
            str(len(scores)),
            format_mean([score.objective for score in scores.values()], 2),
            format_mean([100 * score.accuracy for score in scores.values()], 1),
            format_difference(pairs) if pairs and arm != reference else "-",
            *([format_difference([(score, base) for score in scores.values()])] if base else []),
        ])  # fmt: skip
    questions = sorted({score.questions for score in confirmed.values()})
    note = f"{', '.join(map(str, questions))} questions; \u00b1 is Student's t over seeds"
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
