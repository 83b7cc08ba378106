"""The efficiency table: computed and measured columns, each with its formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median

from benchmarks.common.report import MIB, Table, format_spread
from benchmarks.cost.efficiency.measure import Pass, Refusal
from benchmarks.cost.efficiency.models import Model
from vllm_autoprune.cost import ASSUMPTIONS, Cost, estimate_cost
from vllm_autoprune.statistics import spread
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES

FULL = "full"
Passes = Mapping[str, Sequence[Pass | Refusal]]
"""By arm, in the order of rows; the full model first."""

COLUMNS = (
    "method", "K", "TFLOPs", "prefill, ms", "TTFT, ms: median (quartiles)",
    "second question, ms", "decode, ms/token", "KV, MiB", "GPU memory, MiB", "score",
)  # fmt: skip


def markdown(model: Model, budget: int, passes: Passes) -> Iterator[str]:
    """The table, and notes on its columns."""
    first = [one for one in passes.get(FULL, ()) if isinstance(one, Pass)]
    depth = "" if model.depth == model.geometry.layers else f" of {model.depth}"
    requests = sum(len(one.ttft) for one in first)
    yield (
        f"{model.name}, {model.geometry.layers}{depth} language layers served, K = {budget}; "
        f"{requests} timed requests a row, in {len(first)} passes\n"
    )
    rows: list[Sequence[str]] = []
    for arm, own in passes.items():
        measured = [one for one in own if isinstance(one, Pass)]
        if measured:
            rows.append(list(_cells(model, arm, budget, measured, first)))
        else:
            reason = next((one.reason for one in own if isinstance(one, Refusal)), "no pass")
            rows.append([arm, f"not served: {reason}", *[""] * (len(COLUMNS) - 2)])
    yield Table("", COLUMNS, rows).markdown()
    yield ""
    yield from (f"- {line}" for line in notes(model))


def notes(model: Model) -> Iterator[str]:
    """Notes on the columns."""
    yield from ASSUMPTIONS
    if model.depth != model.geometry.layers:
        yield (
            f"TFLOPs and KV: computed for all {model.depth} layers. Times: measured on "
            f"{model.geometry.layers}; they include the whole vision tower, so ratios of times are "
            "smaller than at full depth."
        )
    yield "Tokens of the full model are counted as published: without a newline for each row."
    yield (
        "Prefill: mean of vLLM's request_prefill_time_seconds, which includes vision tower "
        "and selection. TTFT and decode: at the client, one request at a time, always a new image."
    )
    yield (
        "Second question: median TTFT of a second question on each image, right after the first, "
        "and its ratio to the first. Without the plugin, and with policies that ignore questions, "
        "vLLM finds the image's KV in its prefix cache; policies that read the question reuse the "
        "output of the vision tower."
    )
    yield (
        "GPU memory: the most that the workers had allocated during the requests. vLLM reserves "
        "its KV cache whatever is pruned, so this changes little; KV MiB is what one prompt needs "
        "of it."
    )
    if model.scored:
        yield "Score: accuracy + accuracy+ on held-out questions, at most 200."


def compute_cost(model: Model, arm: str, budget: int, measured: Sequence[Pass]) -> Cost:
    """By formula, from the kept tokens that the plugin reports, at the published depth.

    A base policy that ranks tokens by layers of the language model pays for these over all tokens.
    """
    kept = [one.visual_tokens for one in measured if one.visual_tokens is not None]
    tokens = model.geometry.tokens if arm == FULL else round(mean(kept)) if kept else budget
    policy = BASE_POLICIES.get(arm)
    layers = policy.layers_read(policy.default_params, model.depth) if policy else 0
    return estimate_cost(model.at_full_depth, tokens, ranking_layers=layers)


def _cells(
    model: Model, arm: str, budget: int, measured: Sequence[Pass], first: Sequence[Pass]
) -> Iterator[str]:
    computed = compute_cost(model, arm, budget, measured)
    prefill = mean(one.prefill for one in measured)
    reference = mean(one.prefill for one in first) if first else prefill
    waits = spread([value for one in measured for value in one.ttft])
    again = [1000 * value for one in measured for value in one.again]
    decode = spread([1000 * value for one in measured for value in one.decode])
    scored = [one.score for one in measured if one.score is not None]
    yield arm
    yield f"{computed.tokens:g}"
    yield f"{computed.teraflops:.4g} ({flops_ratio(model, computed):.1f}x fewer)"
    yield f"{1000 * prefill:.1f} ({reference / prefill:.2f}x faster)"
    yield format_spread(waits)
    yield (
        f"{median(again):.1f} ({median(again) / (1000 * waits.median):.2f}x)"
        if again
        else "not measured"
    )
    yield f"{decode.median:.2f}"
    yield f"{computed.kv_mib:.4g}"
    memory = [one.device_memory for one in measured if one.device_memory is not None]
    yield f"{max(memory) / MIB:.0f}" if memory else "not measured"
    yield f"{mean(a + b for a, b in scored):.1f}" if scored else "none: dummy weights"


def flops_ratio(model: Model, computed: Cost) -> float:
    """FLOPs of all tokens over those of the kept ones."""
    return estimate_cost(model.at_full_depth, model.geometry.tokens).flops / computed.flops
