"""Tables of a comparison in Markdown: its searches, and their winners confirmed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.search.study import (
    BASE,
    CURVE_SHARES,
    Confirmed,
    read_confirmed,
    read_results,
    read_space,
)
from vllm_autoprune.report import Table

# Two-sided 95 % quantiles of Student's t distribution, for 1 to 9 degrees of freedom.
_T_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_REFERENCES = ("tpe", "autoprune+@none")
"""The arms that the others are compared with, where they are among them."""


def format_tables(folder: Path, arms: Sequence[str], seeds: Sequence[int]) -> str:
    """The searches of a folder; their winners beside each reference; single states.

    Winners that were not confirmed are left out. Spaces are compared by strategy, each with the
    largest.
    """
    tables = [_format_searches(folder, arms, seeds)]
    groups = {arm: list(arms) for arm in _REFERENCES if arm in arms} or {arms[0]: list(arms)}
    if any(read_space(arm) != "all" for arm in arms):
        strategies: dict[str, list[str]] = {}
        for arm in arms:
            strategies.setdefault(arm.removesuffix(f"@{read_space(arm)}"), []).append(arm)
        groups = {group[0]: group for group in strategies.values()}
    confirmed = read_confirmed(folder)
    if confirmed:
        tables += [_format_winners(confirmed, g, seeds, arm) for arm, g in groups.items()]
    base = confirmed.get(BASE)
    states = [
        (name, f"{s.objective:.2f}", f"{100 * s.accuracy:.1f}", _format_difference([(s, base)]))
        for name, s in confirmed.items()
        if base and name.startswith("q_e = ")
    ]
    if states:
        columns = ("state", "objective", "accuracy %", f"less {BASE}")
        tables.append(Table("", columns, states, "lrrr").markdown() + "\n")
    return "\n".join(tables)


def _format_searches(folder: Path, arms: Sequence[str], seeds: Sequence[int]) -> str:
    """Test results, and the best objective after shares of the answers."""
    known = read_results(folder)
    rows, curves = [], []
    for arm in arms:
        results = [known[name] for name in (f"{arm}-{seed}" for seed in seeds) if name in known]
        candidates = sum(result.candidates for result in results)
        invalid = sum(result.invalid for result in results)
        share = f"{100 * invalid / candidates:.0f}" if candidates else ""
        ended = [(result, result.winner) for result in results if result.winner is not None]
        if not ended:
            rows.append([arm, "0", *[""] * 4, share])
            continue
        rows.append([
            arm,
            str(len(ended)),
            format_mean([winner.objective for _, winner in ended]),
            format_mean([winner.gain for _, winner in ended]),
            format_mean([100 * winner.accuracy for _, winner in ended], 1),
            f"{statistics.mean(result.answers for result, _ in ended):.0f}",
            share,
        ])  # fmt: skip
        # Where every search has a best objective by then.
        columns = zip(*(result.curve for result, _ in ended), strict=True)
        best = [[value for value in column if value is not None] for column in columns]
        means = (f"{statistics.mean(c):.4f}" if len(c) == len(ended) else "" for c in best)
        curves.append([arm, *means])
    head = ["strategy", "seeds", "test objective", "gain over base", "accuracy %", "answers"]
    shares = (f"{share:.0%}" for share in CURVE_SHARES)
    tables = (
        Table("", [*head, "invalid %"], rows, "lrrrrrr"),
        Table("", ["search objective after", *shares], curves, "lrrrr"),
    )
    return "\n".join(f"{table.markdown()}\n" for table in tables)


def _format_winners(
    confirmed: dict[str, Confirmed], arms: Sequence[str], seeds: Sequence[int], reference: str
) -> str:
    """Confirmed objective and accuracy of each arm, less a reference and less the base policy."""
    scores = {
        arm: {seed: confirmed[name] for seed in seeds if (name := f"{arm}-{seed}") in confirmed}
        for arm in arms
    }
    base, references = confirmed.get(BASE), scores[reference]
    head = ["strategy", "seeds", "objective", "accuracy %", f"less {reference}, paired by seed"]
    head += [f"less {BASE}"] if base else []
    rows = []
    for arm, by_seed in scores.items():
        if not by_seed:
            continue
        pairs = [(score, references[seed]) for seed, score in by_seed.items() if seed in references]
        rows.append([
            arm,
            str(len(by_seed)),
            format_mean([score.objective for score in by_seed.values()], 2),
            format_mean([100 * score.accuracy for score in by_seed.values()], 1),
            _format_difference(pairs) if pairs and arm != reference else "-",
            *([_format_difference([(score, base) for score in by_seed.values()])] if base else []),
        ])  # fmt: skip
    questions = sorted({score.questions for score in confirmed.values()})
    note = f"{', '.join(map(str, questions))} questions; \u00b1 is Student's t over seeds"
    note += ", in differences over questions as well." if base else "."
    return "\n".join([Table("", head, rows, "lrrrrr"[: len(head)]).markdown(), "", note]) + "\n"


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


def _format_difference(pairs: Sequence[tuple[Confirmed, Confirmed]]) -> str:
    """Mean difference over pairs, one a seed, with its 95 % interval over seeds and questions.

    The variance of the mean is bounded by the sum of those over seeds and over blocks of questions
    (two crossed random effects, whose residual counts twice), and Student's t has the fewer degrees
    of freedom of the two. An effect with a single level is left out, as questions without blocks.
    """
    by_seed = [score.objective - other.objective for score, other in pairs]
    blocks = [np.subtract(a.blocks, b.blocks) for a, b in pairs if a.blocks and b.blocks]
    by_block = np.mean(blocks, axis=0).tolist() if blocks else []
    mean = statistics.mean(by_seed)
    effects = [effect for effect in (by_seed, by_block) if len(effect) > 1]
    if not effects:
        return f"{mean:.2f}"
    variance = sum(statistics.variance(effect) / len(effect) for effect in effects)
    width = _t_quantile(min(map(len, effects)) - 1) * math.sqrt(variance)
    return f"{mean:.2f} ± {width:.2f}"
