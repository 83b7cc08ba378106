"""Time to first token, told: claims with their intervals, and where the extra time goes.

Knows nothing about servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median

from benchmarks.overhead.report import Claim, Section, Table, milliseconds, percent, quartiles
from benchmarks.overhead.setting import STATE
from benchmarks.overhead.statistics import (
    Spread,
    at_most,
    difference_of_medians,
    ratio_of_medians,
    spread,
)
from benchmarks.overhead.ttft import BUDGET, KINDS, QUESTION, Arm, Run

BOUND = 1.05


def section(layers: int, runs: Sequence[Run], offline: Mapping[str, Spread]) -> Section:
    """The section of all servers measured."""
    lengths = sorted({run.prompt_tokens for run in runs})
    return Section(
        name="ttft",
        title="Time to first token",
        setup=[
            f"LLaVA-1.5-7B's true widths, dummy weights, bfloat16, eager; vision tower at its full "
            f"depth (CLIP-L/14-336, 24 layers), language model {layers} of 32 layers deep",
            f"state `{STATE}`, K = {BUDGET} of 576; PNG of 640 x 480; questions of {QUESTION} "
            f"words; prompts of {', '.join(map(str, lengths))} tokens, text prompts of as many",
            "one server at a time, both kinds in alternating order; no request found a token in "
            "the prefix cache; medians, and 95 % intervals by bootstrap over rounds",
        ],
        claims=[claim for run in runs for claim in claims(run)],
        tables=[*(_times(run) for run in runs), *map(_where, runs), _offline(offline)],
        data={
            "layers": layers,
            "runs": {
                run.name: {
                    str(c): {kind: arm.plain() for kind, arm in kinds.items()}
                    for c, kinds in run.arms.items()
                }
                for run in runs
            },
            "parts": {name: asdict(of) for name, of in offline.items()},
        },
    )


def claims(run: Run) -> list[Claim]:
    """At most 5 % more than a text prompt, at each concurrency."""
    made = []
    for concurrency, kinds in run.arms.items():
        seen, text = kinds["seen"].ttft, kinds["text"].ttft
        ratio = ratio_of_medians(seen, text)
        promise = (
            f"{run.name}, concurrency {concurrency}: TTFT beyond the vision tower at most "
            "5 % over a text prompt of as many tokens"
        )
        extra = milliseconds(difference_of_medians(seen, text))
        made.append(Claim(promise, f"{percent(ratio)}; {extra}", at_most(ratio, BOUND)))
    return made


def _times(run: Run) -> Table:
    rows = [
        (str(concurrency), KINDS[kind], quartiles(spread(_flat(arm))), str(len(_flat(arm))))
        for concurrency, kinds in run.arms.items()
        for kind, arm in kinds.items()
    ]
    columns = ("concurrency", "request", "TTFT, ms: median (quartiles)", "requests")
    return Table(f"Relevance {run.name}.", columns, rows)


def _where(run: Run) -> Table:
    """One request at a time: in the engine, and before it (HTTP, image, transfer)."""
    rows = []
    for kind, arm in run.arms[1].items():
        whole = median(_flat(arm))
        queue, prefill = (median(row[s] for row in arm.engine) for s in ("queue", "prefill"))
        figures = (whole - queue - prefill, queue, prefill)
        rows.append((KINDS[kind], *(f"{1000 * figure:.1f}" for figure in figures)))
    columns = ("request", "outside the engine, ms", "queue, ms", "selection and prefill, ms")
    return Table(f"Where the time goes, {run.name}, one request at a time.", columns, rows)


def _offline(parts: Mapping[str, Spread]) -> Table:
    rows = [(name, quartiles(of)) for name, of in parts.items()]
    caption = "The same work outside a server, one image, in as many threads."
    return Table(caption, ("part", "ms: median (quartiles)"), rows)


def _flat(arm: Arm) -> list[float]:
    return [value for row in arm.ttft for value in row]
