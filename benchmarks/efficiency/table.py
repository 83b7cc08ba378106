"""The efficiency table: computed columns beside measured ones, each by a named formula.

Knows nothing about servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median

from benchmarks.efficiency.measure import Pass, Refused
from benchmarks.efficiency.models import Model
from benchmarks.overhead.resident import MIB
from benchmarks.overhead.statistics import spread
from vllm_autoprune.cost import ASSUMPTIONS, Cost, estimate_cost

FULL = "full"
Passes = Mapping[str, Sequence[Pass | Refused]]
"""By arm, in the order of the table; the full model first."""

COLUMNS = (
    "method", "K", "TFLOPs", "prefill, ms", "TTFT, ms: median (quartiles)",
    "another question, ms", "decode, ms/token", "KV, MiB", "memory, MiB", "score",
)  # fmt: skip


def markdown(model: Model, budget: int, passes: Passes) -> Iterator[str]:
    """The table and what stands behind its columns."""
    first = [one for one in passes.get(FULL, ()) if isinstance(one, Pass)]
    depth = "" if model.depth == model.geometry.layers else f" of {model.depth}"
    asked = sum(len(one.ttft) for one in first)
    yield (
        f"{model.name}, {model.geometry.layers}{depth} language layers served, K = {budget}; "
        f"{asked} timed requests a row, in {len(first)} passes\n"
    )
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|" + " --- |" * len(COLUMNS)
    for arm, found in passes.items():
        measured = [one for one in found if isinstance(one, Pass)]
        if not measured:
            refused = next((one.reason for one in found if isinstance(one, Refused)), "no pass")
            yield f"| {arm} | not served: {refused} |" + " |" * (len(COLUMNS) - 2)
            continue
        yield f"| {' | '.join(_cells(model, arm, budget, measured, first))} |"
    yield ""
    yield from (f"- {line}" for line in notes(model))


def notes(model: Model) -> Iterator[str]:
    """What each column is."""
    yield from ASSUMPTIONS
    if model.depth != model.geometry.layers:
        yield (
            f"TFLOPs and KV: computed for all {model.depth} layers. Times: measured on "
            f"{model.geometry.layers}; they hold the whole vision tower, so ratios of times are "
            "smaller than they would be at full depth."
        )
    yield "Tokens of the full model are counted as published: without a newline for each row."
    yield (
        "Prefill: mean of vLLM's request_prefill_time_seconds, which holds vision tower and "
        "selection. TTFT and decode: at the client, one request at a time, other images each time."
    )
    yield (
        "Another question: TTFT, median, of a second question on each image, asked next, and its "
        "share of the first one's. Without a plugin vLLM finds the image's KV in its prefix cache; "
        "so it does for a policy that reads no question. One that reads it finds the vision "
        "tower's output."
    )
    yield (
        "Memory: the most resident memory of all the server's processes. vLLM reserves its KV "
        "cache whatever is pruned, so this column says little; KV MiB is what a prompt needs of it."
    )
    if model.scored:
        yield "Score: accuracy + accuracy+ on held-out questions, at most 200."


def costs(model: Model, arm: str, budget: int, measured: Sequence[Pass]) -> Cost:
    """By formula, of the tokens that the plugin says it kept; at the published depth."""
    kept = [one.visual_tokens for one in measured if one.visual_tokens is not None]
    tokens = model.geometry.tokens if arm == FULL else round(mean(kept)) if kept else budget
    return estimate_cost(model.whole, tokens)


def _cells(
    model: Model, arm: str, budget: int, measured: Sequence[Pass], first: Sequence[Pass]
) -> Iterator[str]:
    computed = costs(model, arm, budget, measured)
    prefill = mean(one.prefill for one in measured)
    reference = mean(one.prefill for one in first) if first else prefill
    waited = spread([1000 * value for one in measured for value in one.ttft])
    again = [1000 * value for one in measured for value in one.again]
    decode = spread([1000 * value for one in measured for value in one.decode])
    scored = [one.score for one in measured if one.score is not None]
    yield arm
    yield f"{computed.tokens:g}"
    yield f"{computed.teraflops:.4g} ({model_ratio(model, computed):.1f}x fewer)"
    yield f"{1000 * prefill:.1f} ({reference / prefill:.2f}x faster)"
    yield f"{waited.median:.1f} ({waited.low:.1f}–{waited.high:.1f})"
    yield f"{median(again):.1f} ({median(again) / waited.median:.2f}x)" if again else "not asked"
    yield f"{decode.median:.2f}"
    yield f"{computed.kv_mib:.4g}"
    yield f"{max(one.resident for one in measured) / MIB:.0f}"
    yield f"{mean(a + b for a, b in scored):.1f}" if scored else "none: dummy weights"


def model_ratio(model: Model, computed: Cost) -> float:
    """How many times fewer FLOPs than all tokens would take."""
    return estimate_cost(model.whole, model.geometry.tokens).flops / computed.flops
