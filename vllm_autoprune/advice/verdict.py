"""Whether pruning helps this traffic, which kind of state pays, and what else would help."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_autoprune.advice.model import Advantage, Estimate, Traffic, Way, aligned_core

WORTHWHILE = 1.05
"""Least gain in total time that is called help; below it, estimate and measurement are too near."""

PRUNED: tuple[Way, ...] = ("question-reading", "split", "question-free")

_REMEDIES: Mapping[str, str] = {
    "front end": "have clients send smaller images, or raise --api-server-count",
    "vision tower": "make images smaller (max_pixels of the image processor), or encode them in "
    "larger batches",
    "selection": "choose a state that selects faster (docs/states.md, What a state costs)",
    "request": "serve more requests at once: a step costs this much however few tokens it has",
    "prefill of text": "shorten the text, or put what all requests have in common before the image",
    "prefill of the image": "keep fewer tokens: a smaller --budget",
    "decoding": "answer shorter, decode in larger batches, or use speculative decoding",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The advice to an operator."""

    helps: bool
    gain: float
    """Stock's total time over that of the pruned way with the least."""
    lines: tuple[str, ...]


def judge(traffic: Traffic, estimates: Mapping[Way, Estimate]) -> Verdict:
    """The verdict on the traffic, with its reasons."""
    q = traffic.questions
    stock = estimates["stock"]
    gains = {way: stock.total(q) / one.total(q) for way, one in estimates.items()}
    best = max(PRUNED, key=lambda way: gains[way])
    if traffic.budget >= traffic.tokens:
        reason = f"K = {traffic.budget} keeps every token of an image: nothing is pruned."
        return Verdict(False, 1.0, ("Pruning will not help you here.", reason))
    if gains[best] < WORTHWHILE:
        lines = ["Pruning will not help you here.", *_explain_refusal(traffic, estimates)]
    else:
        lines = [
            f"Pruning helps here: at {q:g} questions an image, a {best} state takes "
            f"{1 / gains[best]:.2f} of stock vLLM's time."
        ]
    lines += [_describe_way(way, gains[way], estimates, q) for way in PRUNED]
    if gains[best] >= WORTHWHILE:
        lines.append(_choose(gains))
        lines += _name_bottleneck(estimates[best])
    if gains["resized"] >= max(WORTHWHILE, gains[best]):
        lines.append(
            f"Resizing images to {traffic.budget} tokens, where the model allows it, takes "
            f"{1 / gains['resized']:.2f} of stock's time, because it shortens the tower too: "
            "compare its accuracy with that of pruning."
        )
    lines += _describe_core(traffic)
    return Verdict(gains[best] >= WORTHWHILE, gains[best], tuple(lines))


def mean_parts(estimate: Estimate, questions: float) -> dict[str, float]:
    """Seconds of a mean question by where they go, decoding included."""
    first, another = estimate.first.seconds(), estimate.another.seconds()
    later = questions - 1
    mean = {name: (first[name] + later * another[name]) / questions for name in first}
    return {**mean, "decoding": estimate.decoding}


def _explain_refusal(traffic: Traffic, estimates: Mapping[Way, Estimate]) -> list[str]:
    q = traffic.questions
    stock = estimates["stock"]
    parts = mean_parts(stock, q)
    whole = sum(parts.values())
    image = parts["prefill of the image"]
    first_share = stock.first.shares()["prefill of the image"]
    lines = [
        f"With stock vLLM, prefill of the image is {_percent(image, whole)} of a mean question's "
        f"time ({first_share:.0%} of the first question's TTFT)."
    ]
    if first_share >= 0.2 and image < 0.2 * whole:
        lines.append(
            f"At {q:g} questions an image, stock vLLM prefills the image once and finds it in its "
            "prefix cache for all the others; there is little left to save."
        )
    name = max(parts, key=lambda part: parts[part])
    lines.append(f"Most of the time, {_percent(parts[name], whole)}, is {name}: {_REMEDIES[name]}.")
    return lines


def _describe_way(
    way: Way, gain: float, estimates: Mapping[Way, Estimate], questions: float
) -> str:
    advantage = estimates[way].advantage(estimates["stock"])
    inside = advantage.lower <= questions < advantage.upper and not advantage.never
    text = f"{way}: {1 / gain:.2f} of stock's time; cheaper than stock "
    text += format_advantage(advantage)
    return text + ("." if inside or advantage.never else f", and you have {questions:g}.")


def format_advantage(advantage: Advantage) -> str:
    """The numbers of questions an image for which a way is cheaper than stock."""
    if advantage.never:
        return "at no number of questions"
    if math.isinf(advantage.upper):
        low = advantage.lower
        return "at any number of questions" if low <= 1 else f"from {low:.1f} questions on"
    return f"up to {advantage.upper:.1f} questions"


def _choose(gains: Mapping[Way, float]) -> str:
    free = gains["question-free"]
    if gains["question-reading"] * WORTHWHILE >= free:
        return (
            "Reading the question costs next to nothing at this number of questions: choose by "
            "accuracy at your K (`vllm-autoprune eval`)."
        )
    readers: tuple[Way, ...] = ("split", "question-reading")
    pays = [way for way in readers if gains[way] >= WORTHWHILE]
    if pays:
        return (
            "A question-free state costs least. Read the question where your K needs it "
            f"(`vllm-autoprune eval`); {pays[0]} then costs "
            f"{free / gains[pays[0]]:.2f} times as much."
        )
    return (
        "Only a question-free state pays at this number of questions; one that reads the question "
        "costs more than stock, or as much."
    )


def _name_bottleneck(estimate: Estimate) -> list[str]:
    shares = estimate.first.shares()
    name = max(shares, key=lambda part: shares[part])
    if name == "prefill of the image" or shares[name] < 0.4:
        return []
    return [
        f"With pruning, {shares[name]:.0%} of the first question's TTFT is {name}, which no budget "
        f"shortens: {_REMEDIES[name]}."
    ]


def _describe_core(traffic: Traffic) -> list[str]:
    core = aligned_core(traffic)
    if core == traffic.core:
        return []
    if not core:
        reason = "no KV block ends within them" if traffic.block else "there is no prefix cache"
        return [f"The K tokens of an image are not split, because {reason}."]
    return [
        f"The core is served with {core} tokens instead of {traffic.core}, so that it ends on the "
        "edge of a KV block."
    ]


def _percent(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0.0:.0%}"
