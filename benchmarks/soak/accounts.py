"""What a server's ``/metrics`` grew by, beside what its client counted.

Knows nothing about how requests were sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.soak.client import Tally

Reading = Mapping[str, float]
"""Value by name and labels, summed over engines and reasons why a request ended."""

_OURS = "autoprune_"
_THEIRS = ("vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_LABELS = ("policy", "keep", "stage")
_TROUBLE = (
    "autoprune_fallbacks_total",
    "autoprune_selection_errors_total",
    "autoprune_unsafe_states_total",
)


@dataclass(frozen=True, slots=True)
class Line:
    """One figure, counted by both."""

    what: str
    client: float
    server: float

    @property
    def equal(self) -> bool:
        """Counters are whole numbers."""
        return self.client == self.server


def reading(exposition: str) -> Reading:
    """The counters of one ``/metrics`` answer."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name not in _THEIRS and not sample.name.startswith(_OURS):
                continue
            labels = "".join(f" {sample.labels[key]}" for key in _LABELS if key in sample.labels)
            name = sample.name + labels
            found[name] = found.get(name, 0.0) + sample.value
    return found


def compared(before: Reading, after: Reading, tally: Tally, kv_bytes: int) -> list[Line]:
    """Every figure that both count; one that only the server has counts 0 at the client.

    ``kv_bytes`` is what one token takes. ``autoprune_fallbacks_total{kept="none"}`` is no trouble
    and not exported.
    """
    client: dict[str, float] = {
        "vllm:request_success_total": tally.answered,
        "vllm:prompt_tokens_total": tally.prompt_tokens,
        "vllm:generation_tokens_total": tally.answer_tokens,
        "autoprune_requests_refused_total": tally.refused,
        "autoprune_visual_tokens_total before": tally.before,
        "autoprune_visual_tokens_total after": tally.after,
        "autoprune_kv_bytes_saved_total": (tally.before - tally.after) * kv_bytes,
        **{f"autoprune_requests_total {policy}": n for policy, n in tally.requests.items()},
        **{f"autoprune_images_total {keep}": n for keep, n in tally.images.items()},
        **dict.fromkeys(_TROUBLE, 0.0),
    }
    counted = ("autoprune_requests_total ", "autoprune_images_total ")
    only = {name for name in after if name.startswith(counted)} - client.keys()
    client |= dict.fromkeys(only, 0.0)
    grown = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in client}
    return [Line(name, client[name], grown[name]) for name in sorted(client)]
