"""Pruning against the resize control: the same questions, at the same K, overall and by kind.

A smaller image is what an operator has without a plugin, so a state has to beat it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from vllm_autoprune.evaluation.records import Case, Question, kind_of
from vllm_autoprune.evaluation.scoring import Figures
from vllm_autoprune.record_file import FrozenModel
from vllm_autoprune.statistics import Estimate, estimate

Winner = Literal["pruning", "resizing", "not decided", "too few images"]

MIN_IMAGES = 6
"""Images below which there is no verdict: even if all of them favoured one side, a sign test would
not reach 5 %, and an interval by resampling them is too narrow."""

_POLICY_ARMS = ("base", "autoprune", "found")


class Comparison(FrozenModel):
    """A case less the resize control at the same K, in points of per cent right.

    ``kind`` is one kind of question, None for all of them.
    """

    case: str
    label: str
    budget: int
    kind: str | None
    questions: int
    images: int
    difference: Estimate
    winner: Winner
    more_tokens: float = 0.0
    """Mean tokens that its prompts have more: a resized image may have a few less than K."""
    stated: bool
    """Whether the case is a state that was to be evaluated, not what it is compared with."""


def compare_with_resizing(
    cases: Sequence[Case],
    questions: Sequence[Question],
    figures: Mapping[str, Figures],
    lengths: Mapping[str, float],
) -> Iterator[Comparison]:
    """Each case that runs a policy and has a resize control, overall and then by kind.

    ``lengths`` are mean prompt tokens by case, of those where they are known.
    """
    controls = {case.budget: case for case in cases if case.arm == "resized"}
    bases = {case.base for case in cases}
    several = len({kind_of(question) for question in questions}) > 1
    for case in cases:
        control = controls.get(case.budget)
        if control is None or case.arm not in _POLICY_ARMS:
            continue
        own, other = figures[case.name].kinds, figures[control.name].kinds
        known = case.name in lengths and control.name in lengths
        more_tokens = lengths[case.name] - lengths[control.name] if known else 0.0
        stated = case.arm in ("found", "autoprune") or (
            case.arm == "base" and case.name not in bases
        )
        for kind in own:
            if kind not in other or (kind is not None and not several):
                continue
            asked = [q for q in questions if kind is None or kind_of(q) == kind]
            images = len({question.image for question in asked})
            difference = estimate(np.subtract(own[kind], other[kind])).rounded(4)
            yield Comparison(
                case=case.name,
                label=case.label,
                budget=case.budget,
                kind=kind,
                questions=len(asked),
                images=images,
                difference=difference,
                winner=find_winner(difference, images),
                more_tokens=round(more_tokens, 2),
                stated=stated,
            )


def find_winner(difference: Estimate, images: int) -> Winner:
    """Which of the two is better by an interval without 0, on enough images."""
    if images < MIN_IMAGES:
        return "too few images"
    if difference.low > 0:
        return "pruning"
    return "resizing" if difference.high < 0 else "not decided"


def format_verdicts(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """One line for each stated case: who wins overall, by how much, and for which kinds."""
    by_case: dict[str, list[Comparison]] = {}
    for one in comparisons:
        if one.stated:
            by_case.setdefault(one.case, []).append(one)
    for members in by_case.values():
        overall = next((one for one in members if one.kind is None), None)
        if overall is not None:
            kinds = [one for one in members if one.kind is not None]
            yield _format_overall(overall) + (_format_kinds(kinds) if kinds else "")


def _format_overall(one: Comparison) -> str:
    verdict = {
        "pruning": "pruning beats resizing",
        "resizing": "resizing beats pruning",
        "not decided": "not decided between pruning and resizing",
        "too few images": f"{one.images} images are too few to decide (at least {MIN_IMAGES})",
    }[one.winner]
    more = f" with {one.more_tokens:.1f} tokens more" if one.more_tokens >= 0.5 else ""
    return f"{one.label}, K = {one.budget}: {verdict}, {format_difference(one)} points right{more}."


def _format_kinds(kinds: Sequence[Comparison]) -> str:
    parts = []
    for winner in ("pruning", "resizing", "not decided", "too few images"):
        named = [f"{one.kind} {format_difference(one)}" for one in kinds if one.winner == winner]
        if named:
            wins = f"{winner} wins" if winner in ("pruning", "resizing") else winner
            parts.append(f"{wins}: {', '.join(named)}")
    return " By kind: " + "; ".join(parts) + "."


def format_difference(one: Comparison) -> str:
    """The difference with its interval, such as ``+5.1 (+2.0 to +8.1)``."""
    value, low, high = (
        f"{figure:+.1f}"
        for figure in (one.difference.value, one.difference.low, one.difference.high)
    )
    return f"{value} ({low} to {high})"
