"""What a server's ``/metrics`` says about its traffic and times, since its start.

``request_prefill_time`` contains the vision tower, the selection and the prefill, so one of tower
and prefill has to come from elsewhere:

    prefill time of a mean request = tower x images that went through it / requests
                                     + selection x selections / requests
                                     + p x computed tokens of a mean request
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_autoprune.advice.observation import Observation

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^\s]+)(?: \d+)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Exposition:
    """One answer of ``/metrics``."""

    text: str

    def total(self, name: str, label: str = "") -> float | None:
        """One metric, summed over the samples with that label; None where there is none."""
        values = [
            float(value)
            for sample, labels, value in _SAMPLE.findall(self.text)
            if sample == name and label in labels
        ]
        return sum(values) if values else None

    def mean(self, name: str) -> float | None:
        """Mean of a histogram; None where it has no value yet."""
        return divide(self.total(f"{name}_sum"), self.total(f"{name}_count"))

    def label(self, name: str, label: str) -> str | None:
        """A label's value in the first sample of a metric."""
        match = re.search(rf'^{re.escape(name)}\{{.*?\b{label}="([^"]*)"', self.text, re.MULTILINE)
        return match.group(1) if match else None

    def block_size(self) -> int | None:
        """Tokens of a KV block, 0 without a prefix cache."""
        name = "vllm:cache_config_info"
        if self.label(name, "enable_prefix_caching") == "False":
            return 0
        size = self.label(name, "block_size")
        return int(size) if size is not None and size.isdigit() else None


def divide(total: float | None, count: float | None) -> float | None:
    """The quotient; None where a part is missing or the count is 0."""
    return total / count if total is not None and count else None


def read_traffic(metrics: Exposition) -> Observation:
    """Sizes, and the times that a histogram of its own measures."""
    images = metrics.total("autoprune_images_total")
    visual = "autoprune_visual_tokens_total"
    before = divide(metrics.total(visual, 'stage="before"'), images)
    after = divide(metrics.total(visual, 'stage="after"'), images)
    requests = metrics.total("vllm:request_prompt_tokens_count")
    prompt = metrics.mean("vllm:request_prompt_tokens")
    if prompt is not None and after is not None and images is not None and requests:
        prompt -= after * images / requests
    answer = metrics.mean("vllm:request_generation_tokens")
    misses = metrics.total("autoprune_feature_cache_misses_total")
    hits = metrics.total("autoprune_feature_cache_hits_total")
    questions = divide((hits or 0.0) + (misses or 0.0), misses)
    return Observation(
        questions=questions,
        tokens=_whole(before),
        budget=_whole(after),
        prompt=_whole(prompt) if after is not None else None,
        answer=_whole(answer),
        block=metrics.block_size(),
        selection=metrics.mean("autoprune_selection_seconds"),
        decode=metrics.mean("vllm:request_time_per_output_token_seconds"),
        notes=() if questions is None else (
            f"{questions:.1f} questions an image, from the feature cache: hits and misses over "
            "misses. Repeated questions and evicted images make the true number larger.",
        ),
    )  # fmt: skip


def read_times(metrics: Exposition, known: Observation) -> Observation:
    """Front end, and of tower and prefill the one that is not known while the other one is."""
    ttft, queue, prefill = (
        metrics.mean(f"vllm:{name}_seconds")
        for name in ("time_to_first_token", "request_queue_time", "request_prefill_time")
    )
    if ttft is None or queue is None or prefill is None:
        return Observation()
    notes = [
        "Times are means over all requests since the server's start, under its load.",
        "Front end: mean TTFT less queue and prefill, all of it counted as decoding of images.",
    ]
    requests = metrics.total("vllm:request_prefill_time_seconds_count")
    misses = divide(metrics.total("autoprune_feature_cache_misses_total"), requests)
    selections = divide(metrics.total("autoprune_selection_seconds_count"), requests) or 0.0
    computed = metrics.mean("vllm:request_prefill_kv_computed_tokens")
    rest = prefill - selections * (known.selection or 0.0)
    per_token = tower = None
    if known.prefill is None and known.tower is not None and misses is not None and computed:
        per_token = max(rest - misses * known.tower, 0.0) / computed
        notes.append(
            "Prefill per token: mean prefill time less tower and selection; what a request takes "
            "however long its prompt is counts as prefill."
        )
    elif known.prefill is not None and known.tower is None and misses and computed is not None:
        tower = max(rest - known.prefill * computed, 0.0) / misses
        notes.append("Tower: mean prefill time less selection and computed tokens.")
    return Observation(
        tower=tower,
        prefill=per_token,
        decode_image=max(ttft - queue - prefill, 0.0),
        notes=tuple(notes),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else max(round(value), 1)
