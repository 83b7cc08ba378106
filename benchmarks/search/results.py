"""Results of a comparison of search strategies, and their tables.

A folder has a line for every search that has ended, and what was measured of its winner on new
questions. A ledger takes hundreds of kilobytes and a result two, so the repository has only the
results of published tables.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from pydantic import Field, JsonValue, TypeAdapter

from offline_search.history import History
from offline_search.ledger import read_ledger
from offline_search.report import read_report
from offline_search.settings import Settings, Space
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.report import Table
from vllm_autoprune.statistics import correlate_ranks
from vllm_autoprune.tpdsl.loading import load_state

BASE = "base policy"
"""Name under which the base policy alone is confirmed."""
_IN_POINTS = "the same, points"
"""Column of a difference of accuracy, behind the one of the same difference in nats."""
_RELEASED_STRENGTH = 0.006
"""Largest strength of blending that the authors' search could choose."""
_CURVE_SHARES = (0.1, 0.2, 0.4, 1.0)
"""Shares of the search's answers after which its best objective so far is reported."""


class _Winner(FrozenModel):
    """The winner of a search, with its scores on the test split."""

    digest: str
    objective: float
    gain: float = Field(description="objective less the base policy's")
    accuracy: float
    state: dict[str, JsonValue]

    @property
    def blends(self) -> bool:
        """Whether kept rows change by dropped ones, and by more than the released policy's."""
        reassembly = load_state(self.state).model_dump(mode="json")["reassembly"]
        return bool(reassembly.get("strength", 0.0) > _RELEASED_STRENGTH)


class _Leader(FrozenModel):
    """One of the best candidates of a search, ranked by estimated objective."""

    name: str
    digest: str
    objective: float
    state: dict[str, JsonValue]


class SearchResult(FrozenModel):
    """One search that has ended; it has no winner if it gave up before it measured a candidate."""

    name: str
    settings: Settings
    candidates: int
    invalid: int = Field(description="candidates that were invalid or unsafe")
    replies: int = Field(description="replies of the language model")
    answers: int
    curve: tuple[float | None, ...]
    winner: _Winner | None
    base_objective: float | None = Field(
        default=None,
        exclude_if=lambda value: value is None,
        description="on the search split",
    )
    leaders: tuple[_Leader, ...] = Field(
        default=(), exclude_if=lambda leaders: not leaders
    )

    @classmethod
    def read(
        cls, name: str, path: Path, history: History, leaders: int
    ) -> SearchResult:
        """The result of a search with a complete ledger, and ``leaders`` leaders if it has them."""
        report = read_report(read_ledger(path))
        answers = report.answers
        winner = None
        curve = [
            [y for x, y in report.curve() if x <= share * answers]
            for share in _CURVE_SHARES
        ]
        if (record := report.winner) is not None:
            winner = _Winner(
                digest=record.digest,
                objective=record.test.objective.value,
                gain=record.test.gain.value,
                accuracy=record.test.accuracy,
                # The provenance is left out, because it has the scores again.
                state={k: v for k, v in record.state.items() if k != "provenance"},
            )
        # The winner is one of the confirmed candidates.
        count = max(leaders, report.settings.confirmed) if leaders else 0
        best = [
            _Leader(
                name=trial.name,
                digest=trial.proposal.digest,
                objective=history.estimate(trial) or 0.0,
                state=trial.require_state().model_dump(
                    mode="json", exclude={"provenance"}
                ),
            )
            for trial in history.ranked()[:count]
        ]
        return cls(
            name=name,
            settings=report.settings,
            candidates=len(report.trials),
            invalid=report.statuses.get("invalid", 0)
            + report.statuses.get("unsafe", 0),
            replies=len(report.replies),
            answers=answers,
            curve=tuple(reached[-1] if reached else None for reached in curve),
            winner=winner,
            base_objective=history.estimate(history.base) if leaders else None,
            leaders=tuple(best),
        )


@dataclass(frozen=True)
class _Figure:
    """A mean over questions, and the means of equal blocks of the questions, if they are known."""

    mean: float
    blocks: Sequence[float]


class Confirmed(FrozenModel):
    """Mean objective and accuracy of one winner or state on new questions."""

    questions: int
    evaluator: str
    digest: str
    objective: float
    accuracy: float
    blocks: tuple[float, ...] = Field(
        default=(),
        exclude_if=lambda blocks: not blocks,
        description="mean objective of each of several equal blocks of the questions",
    )
    accuracy_blocks: tuple[float, ...] = Field(
        default=(),
        exclude_if=lambda blocks: not blocks,
        description="accuracy of each of the same blocks",
    )
    models: dict[str, tuple[float, float]] = Field(
        default={},
        exclude_if=lambda models: not models,
        description="of several models: objective and accuracy on each",
    )

    @property
    def nats(self) -> _Figure:
        """The objective."""
        return _Figure(self.objective, self.blocks)

    @property
    def points(self) -> _Figure:
        """The accuracy in per cent."""
        blocks = [100 * block for block in self.accuracy_blocks]
        return _Figure(100 * self.accuracy, blocks)


CONFIRMED = TypeAdapter(dict[str, Confirmed])


def read_results(folder: Path) -> dict[str, SearchResult]:
    """Results of the searches that have ended, by arm and seed, such as ``tpe-0``."""
    path = folder / "results.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return {
        result.name: result for result in map(SearchResult.model_validate_json, lines)
    }


def read_confirmed(folder: Path) -> dict[str, Confirmed]:
    """Confirmed results so far, by name of the search or state."""
    path = folder / "confirmation.json"
    return CONFIRMED.validate_json(path.read_bytes()) if path.exists() else {}


def read_space(arm: str) -> Space:
    """The space that an arm's name ends in, such as ``@numbers``, else the whole language."""
    return next(
        (space for space in get_args(Space) if arm.endswith(f"@{space}")), "all"
    )


# Two-sided 95 % quantiles of Student's t distribution, for 1 to 9 degrees of freedom.
_T_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_REFERENCES = ("tpe", "autoprune+@none")
"""Arms with which the other arms are compared, if the study has them."""


def format_tables(folder: Path, arms: Sequence[str], seeds: Sequence[int]) -> str:
    """Tables of a folder: its searches, their winners against each reference, and single states.

    If an arm has a smaller space, arms are instead compared within their strategy, with the one of
    it that is listed first.
    """
    tables = _tabulate_searches(read_results(folder), arms, seeds)
    groups = {arm: list(arms) for arm in _REFERENCES if arm in arms} or {
        arms[0]: list(arms)
    }
    if any(read_space(arm) != "all" for arm in arms):
        strategies: dict[str, list[str]] = {}
        for arm in arms:
            strategies.setdefault(arm.removesuffix(f"@{read_space(arm)}"), []).append(
                arm
            )
        groups = {group[0]: group for group in strategies.values()}
    confirmed = read_confirmed(folder)
    tables += _tabulate_leaders(read_results(folder), confirmed, arms, seeds)
    texts = [f"{table.markdown()}\n" for table in tables]
    if confirmed:
        texts += [
            _tabulate_winners(confirmed, group, seeds, arm)
            for arm, group in groups.items()
        ]
        if any(score.models for score in confirmed.values()):
            texts.append(_tabulate_models(confirmed))
    base = confirmed.get(BASE)
    states = [
        (
            name,
            f"{s.objective:.2f}",
            f"{100 * s.accuracy:.1f}",
            _format_difference([(s.nats, base.nats)]),
            _format_difference([(s.points, base.points)], 1),
        )
        for name, s in confirmed.items()
        if base and name.startswith("q_e = ")
    ]
    if states:
        columns = ("state", "objective", "accuracy %", f"less {BASE}", _IN_POINTS)
        texts.append(Table("", columns, states, "lrrrr").markdown() + "\n")
    return "\n".join(texts)


def _tabulate_models(confirmed: Mapping[str, Confirmed]) -> str:
    """Table of what was confirmed on several models, each beside the mean."""
    names = list(next(iter(confirmed.values())).models)
    rows = [
        [
            state,
            *(
                f"{objective:+.3f}, {100 * accuracy:.1f} %"
                for objective, accuracy in (
                    (score.objective, score.accuracy),
                    *(score.models[name] for name in names),
                )
            ),
        ]
        for state, score in confirmed.items()
    ]
    table = Table("", ["state", "mean", *names], rows, "lr" + "r" * len(names))
    note = "Objectives by model, in losses of the base policy there, and accuracy."
    return f"{table.markdown()}\n\n{note}\n"


def _tabulate_searches(
    results_by_name: Mapping[str, SearchResult],
    arms: Sequence[str],
    seeds: Sequence[int],
) -> list[Table]:
    """Tables of the test results, and of the best objective after shares of the answers."""
    rows = []
    curves = []
    for arm in arms:
        results = [
            results_by_name[name]
            for name in (f"{arm}-{seed}" for seed in seeds)
            if name in results_by_name
        ]
        candidates = sum(result.candidates for result in results)
        invalid = sum(result.invalid for result in results)
        share = f"{100 * invalid / candidates:.0f}" if candidates else ""
        ended = [
            (result, result.winner) for result in results if result.winner is not None
        ]
        if not ended:
            rows.append([arm, "0", *[""] * 5, share])
            continue
        winners = [winner for _, winner in ended]
        rows.append(
            [
                arm,
                str(len(ended)),
                _format_mean([winner.objective for winner in winners]),
                _format_mean([winner.gain for winner in winners]),
                _format_mean([100 * winner.accuracy for winner in winners], 1),
                f"{statistics.mean(result.answers for result, _ in ended):.0f}",
                f"{sum(winner.blends for winner in winners)}",
                share,
            ]
        )
        columns = zip(*(result.curve for result, _ in ended), strict=True)
        # A share is reported only if every search has a best objective by then.
        means = (
            ""
            if None in column
            else f"{statistics.mean(v for v in column if v is not None):.4f}"
            for column in columns
        )
        curves.append([arm, *means])
    head = [
        "strategy",
        "seeds",
        "test objective",
        "gain over base",
        "accuracy %",
        "answers",
        "winners that blend",
    ]
    shares = (f"{share:.0%}" for share in _CURVE_SHARES)
    return [
        Table("", [*head, "invalid %"], rows, "lrrrrrrr"),
        Table("", ["search objective after", *shares], curves, "lrrrr"),
    ]


def _tabulate_leaders(
    results_by_name: Mapping[str, SearchResult],
    confirmed: Mapping[str, Confirmed],
    arms: Sequence[str],
    seeds: Sequence[int],
) -> list[Table]:
    """Tables that compare the leaders' objectives on the search split with those on new questions.

    The gap is how much more a winner gains over the base policy on the search split than on new
    questions.
    """
    rows = []
    for arm in arms:
        gaps = list[float]()
        ranks = list[float]()
        for name in (f"{arm}-{seed}" for seed in seeds):
            result = results_by_name.get(name)
            base = confirmed.get(BASE)
            keys = (
                [f"{name} {leader.name}" for leader in result.leaders] if result else []
            )
            if (
                result is None
                or not keys
                or base is None
                or not confirmed.keys() >= set(keys)
            ):
                continue
            searched = np.array([leader.objective for leader in result.leaders])
            new = np.array([confirmed[key].objective for key in keys])
            ranks.append(float(correlate_ranks(searched, new)))
            if result.winner is not None and result.base_objective is not None:
                digests = [leader.digest for leader in result.leaders]
                rank = digests.index(result.winner.digest)
                gain = searched[rank] - result.base_objective
                gaps.append(float(gain - (new[rank] - base.objective)))
        if ranks:
            rows.append(
                [arm, str(len(ranks)), _format_mean(gaps, 2), _format_mean(ranks, 2)]
            )
    head = [
        "strategy",
        "seeds",
        "gap to new questions",
        "rank correlation of the leaders",
    ]
    return [Table("", head, rows, "lrrr")] if rows else []


def _tabulate_winners(
    confirmed: Mapping[str, Confirmed],
    arms: Sequence[str],
    seeds: Sequence[int],
    reference: str,
) -> str:
    """Confirmed objective and accuracy of each arm, minus the reference and the base policy.

    A difference is in nats, then in points of accuracy.
    """
    base = confirmed.get(BASE)
    rows = []
    for arm in arms:
        scores = {
            s: confirmed[name] for s in seeds if (name := f"{arm}-{s}") in confirmed
        }
        if not scores:
            continue
        references = {s: confirmed.get(f"{reference}-{s}") for s in scores}
        pairs = [
            (score, reference_score)
            for s, score in scores.items()
            if (reference_score := references[s]) is not None
        ]
        rows.append(
            [
                arm,
                str(len(scores)),
                _format_mean([score.objective for score in scores.values()], 2),
                _format_mean([100 * score.accuracy for score in scores.values()], 1),
                *(_format_both(pairs) if pairs and arm != reference else ("-", "-")),
                *(_format_both([(s, base) for s in scores.values()]) if base else ()),
            ]
        )
    head = [
        "strategy",
        "seeds",
        "objective",
        "accuracy %",
        f"less {reference}, paired by seed",
        _IN_POINTS,
    ]
    head += [f"less {BASE}", _IN_POINTS] if base else []
    questions = sorted({score.questions for score in confirmed.values()})
    note = (
        f"{', '.join(map(str, questions))} questions; \u00b1 is Student's t over seeds"
    )
    note += ", in differences over questions as well." if base else "."
    return (
        "\n".join([Table("", head, rows, "lrrrrrrr"[: len(head)]).markdown(), "", note])
        + "\n"
    )


def _format_mean(values: Sequence[float], digits: int = 4) -> str:
    """Mean with its 95 % confidence interval by Student's t; a single value has no interval."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    width = (
        quantile_of_t(len(values) - 1)
        * statistics.stdev(values)
        / math.sqrt(len(values))
    )
    return f"{mean:.{digits}f} ± {width:.{digits}f}"


def quantile_of_t(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t distribution.

    Beyond the table it is expanded around the normal quantile (Abramowitz and Stegun, 26.7.5),
    which is right to three decimals there.
    """
    if freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    linear = (z**3 + z) / 4
    square = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    cubic = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + linear / freedom + square / freedom**2 + cubic / freedom**3


def _format_both(pairs: Sequence[tuple[Confirmed, Confirmed]]) -> tuple[str, str]:
    """Mean difference over ``pairs``, one a seed, in nats and in points of accuracy."""
    nats = [(score.nats, other.nats) for score, other in pairs]
    points = [(score.points, other.points) for score, other in pairs]
    return _format_difference(nats), _format_difference(points, 1)


def _format_difference(
    pairs: Sequence[tuple[_Figure, _Figure]], digits: int = 2
) -> str:
    """Mean difference over ``pairs``, one a seed, with its 95 % interval over seeds and questions.

    The variance of the mean is at most the sum of the variance over seeds and the variance over
    blocks of questions (two crossed random effects, whose residual counts twice). Student's t uses
    the smaller of their degrees of freedom. An effect with a single level, such as questions
    without blocks, is left out.
    """
    by_seed = [figure.mean - other.mean for figure, other in pairs]
    blocks = [
        np.subtract(a.blocks, b.blocks) for a, b in pairs if a.blocks and b.blocks
    ]
    by_block = np.mean(blocks, axis=0).tolist() if blocks else []
    mean = statistics.mean(by_seed)
    effects = [effect for effect in (by_seed, by_block) if len(effect) > 1]
    if not effects:
        return f"{mean:.{digits}f}"
    variance = sum(statistics.variance(effect) / len(effect) for effect in effects)
    width = quantile_of_t(min(map(len, effects)) - 1) * math.sqrt(variance)
    return f"{mean:.{digits}f} ± {width:.{digits}f}"
