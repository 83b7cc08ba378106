"""Advice on a traffic as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from vllm_autoprune.advice.model import (
    ASSUMPTIONS,
    WAYS,
    Advantage,
    Estimate,
    Parts,
    Timings,
    Traffic,
    Way,
)
from vllm_autoprune.advice.verdict import Verdict, format_advantage, mean_parts
from vllm_autoprune.cli.output import format_paragraph, format_table


@dataclass(frozen=True, slots=True)
class Advice:
    """Inputs of the cost model, its estimates, the verdict on them, and notes on the inputs."""

    traffic: Traffic
    timings: Timings
    estimates: Mapping[Way, Estimate]
    verdict: Verdict
    notes: tuple[str, ...]


def format_advice(advice: Advice) -> str:
    """Verdict, costs and shares, and the notes and assumptions behind them, as text."""
    traffic, timings, estimates = advice.traffic, advice.timings, advice.estimates
    title = (
        f"{traffic.questions:g} questions an image; N = {traffic.tokens}, K = {traffic.budget}, "
        f"K_c = {traffic.core}; {traffic.template} text tokens before the image and "
        f"{traffic.prompt} behind it, {traffic.answer} of the answer; "
        + (f"KV blocks of {traffic.block}" if traffic.block else "no prefix cache")
    )
    times = (
        f"ms: image decoding {_ms(timings.decode_image)}, processor {_ms(timings.processor)}, "
        f"tower {_ms(timings.tower)}, selection {_ms(timings.selection)}, request "
        f"{_ms(timings.request)}, prefill of a token {_ms(timings.prefill)}, decoding of a token "
        f"{_ms(timings.decode)}"
    )
    stock = estimates["stock"]
    costs = [
        [
            way,
            _ms(one.first.ttft),
            _ms(one.another.ttft),
            f"{one.ratio:.2f}",
            f"{one.total(traffic.questions):.4g}",
            f"{stock.total(traffic.questions) / one.total(traffic.questions):.2f}x",
            "" if way == "stock" else format_advantage(one.advantage(stock)),
        ]
        for way, one in estimates.items()
    ]
    head = [
        "",
        "first, ms",
        "another, ms",
        "another/first",
        "total, s",
        "gain",
        "cheaper than stock",
    ]
    shares = [
        [f"{way}, {which}", *(f"{share:.0%}" for share in parts.shares().values())]
        for way, one in estimates.items()
        for which, parts in (("first", one.first), ("another", one.another))
    ]
    return "\n".join(
        [
            format_paragraph(title),
            format_paragraph(times),
            "",
            *(format_paragraph(line) for line in advice.verdict.lines),
            "",
            "Time to first token of two questions on an image, and the time of all questions:",
            "",
            format_table(head, costs, "<>>>>><"),
            "",
            "Where the time to first token goes:",
            "",
            format_table(["", *stock.first.shares()], shares, "<>>>>>>"),
            "",
            *(format_paragraph(f"- {note}") for note in (*advice.notes, *ASSUMPTIONS)),
        ]
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.4g}" if seconds < 10 else f"{1000 * seconds:.0f}"


def advice_record(advice: Advice) -> dict[str, object]:
    """The same as JSON; times in seconds."""
    estimates, verdict = advice.estimates, advice.verdict
    stock, questions = estimates["stock"], advice.traffic.questions
    return {
        "traffic": asdict(advice.traffic),
        "seconds": asdict(advice.timings),
        "ways": {
            way: {
                "first": _parts_record(estimates[way].first),
                "another": _parts_record(estimates[way].another),
                "another_of_first": estimates[way].ratio,
                "total_seconds": estimates[way].total(questions),
                "gain": stock.total(questions) / estimates[way].total(questions),
                "cheaper_than_stock": _advantage_record(estimates[way].advantage(stock)),
                "mean_question": mean_parts(estimates[way], questions),
            }
            for way in WAYS
        },
        "verdict": {"helps": verdict.helps, "gain": verdict.gain, "lines": list(verdict.lines)},
        "notes": list(advice.notes),
        "assumptions": list(ASSUMPTIONS),
    }


def _parts_record(parts: Parts) -> dict[str, object]:
    return {"ttft": parts.ttft, "seconds": parts.seconds(), "shares": parts.shares()}


def _advantage_record(advantage: Advantage) -> dict[str, float | None] | None:
    """Questions an image, from and to; null: no bound, and as a whole: never."""
    if advantage.never:
        return None
    upper = None if math.isinf(advantage.upper) else advantage.upper
    return {"from": advantage.lower, "to": upper}
