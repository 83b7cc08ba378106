"""The answer of a paired experiment in one sentence, and what limits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.common.report import format_estimate
from benchmarks.load.compare import compare_arms
from benchmarks.load.plots import choose_common_load
from benchmarks.load.points import Point
from benchmarks.load.result import ENOUGH
from benchmarks.load.schedule import Load, Slo
from benchmarks.load.sweep import build_sweep
from vllm_autoprune.pages.document import Tone
from vllm_autoprune.statistics import Estimate


@dataclass(frozen=True)
class Answer:
    """One sentence on the whole experiment; ``limits`` say how far it can be trusted."""

    sentence: str
    tone: Tone
    limits: tuple[str, ...] = ()


def answer_question(points: Sequence[Point], slo: Slo, broken: str | None) -> Answer:
    """The last arm against the first, at the highest load that is valid for both."""
    limits = tuple(_limits(points, broken))
    load = choose_common_load(points)
    if load is None or not any(point.valid for point in points):
        return Answer("No valid result: nothing can be compared.", "bad", limits)
    few = _too_few(points)
    compared = [one for one in compare_arms(points) if one.load == load]
    arms = list(dict.fromkeys(point.arm for point in points))
    medians = [one for one in compared if one.figure == "TTFT p50" and one.arm == arms[-1]]
    if not medians:
        return Answer(f"{few}{_describe_alone(points, load, slo)}", "open", limits)
    ratio = medians[0].ratio
    if ratio is None:
        return Answer("No valid result at a load that all arms have in common.", "bad", limits)
    comparison = _describe_ratio(arms[-1], medians[0].against, ratio, load)
    sentence = f"{few}{comparison}{_describe_rates(points, arms, slo)}."
    tone: Tone = "good" if ratio.high < 1 else "bad" if ratio.low > 1 else "open"
    return Answer(sentence, "open" if few else tone, limits)


def _describe_ratio(arm: str, against: str, ratio: Estimate, load: Load) -> str:
    if ratio.low <= 1 <= ratio.high:
        return (
            f"At {load.title}, no difference is shown between the median times to first token of "
            f"{arm} and {against} (ratio {format_estimate(ratio, 1, 2)})"
        )
    word = "less" if ratio.high < 1 else "more"
    low, high = sorted(100 * abs(end - 1) for end in (ratio.low, ratio.high))
    return (
        f"At {load.title}, {arm} needs {100 * abs(ratio.value - 1):.0f} % {word} time to the first "
        f"token than {against} (median, 95 %: {low:.0f} to {high:.0f} %)"
    )


def _describe_rates(points: Sequence[Point], arms: Sequence[str], slo: Slo) -> str:
    """The highest rates within the objective of the last arm and the first, where known."""
    rates = []
    for arm in (arms[-1], arms[0]):
        mine = [p for p in points if p.arm == arm and p.load.rate is not None]
        if not mine:
            return ""
        rates.append(build_sweep(mine, slo).highest)
    return f", and it serves {rates[0]} requests/s within the objective against {rates[1]}"


def _describe_alone(points: Sequence[Point], load: Load, slo: Slo) -> str:
    point = next(point for point in points if point.load == load)
    goodput = point.goodput
    share = f"{format_estimate(goodput, 100)} %" if goodput else "none"
    return (
        f"{point.arm} answered {point.completed:.2f} requests/s ({load.describe()}); {share} of "
        f"the requests met the objective ({slo.describe()})."
    )


def _too_few(points: Sequence[Point]) -> str:
    """A warning that opens the sentence, where a load has too few requests for its percentiles."""
    least = min((point.requests for point in points if point.valid), default=0)
    if least < ENOUGH[50]:
        return f"Too few requests for a verdict ({least} at a load, {ENOUGH[50]} needed): "
    if least < ENOUGH[99]:
        return f"Too few requests for p99 ({least} at a load, {ENOUGH[99]} needed): "
    return ""


def _limits(points: Sequence[Point], broken: str | None) -> Iterator[str]:
    if broken:
        yield f"The experiment ended early: {broken}"
    runs = [run for point in points for run in point.runs]
    invalid = [run for run in runs if not run.result.verdict.valid]
    if invalid:
        yield (
            f"{len(invalid)} of {len(runs)} runs are not valid. They are hollow in the charts, and "
            "used for no ratio and no rate. The first reason: "
            f"{invalid[0].result.verdict.reasons[0]}."
        )
