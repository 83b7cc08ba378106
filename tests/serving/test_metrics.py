"""``/metrics`` agrees with the client's counts, with one API server and with two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.server import Server
from benchmarks.yardsticks.examples import image_token_id
from tests.serving.engine import examples
from tests.serving.http import ask, body, budget, prompt_tokens
from tests.serving.paths import TOKENS
from vllm_autoprune.ops.dtype import choose_dtype

pytestmark = pytest.mark.engine

KV_BYTES = 2 * 6 * 6 * 32 * {"bfloat16": 2, "float32": 4}[choose_dtype()]
"""Keys and values of one token of mini-LLaVA: 2 x 6 layers x 6 heads x 32 x bytes of the dtype."""


def samples(server: Server) -> dict[str, float]:
    """All metrics of the plugin, by name and labels."""
    return {
        sample.name + "".join(f" {key}={sample.labels[key]}" for key in sorted(sample.labels)): (
            sample.value
        )
        for family in text_string_to_metric_families(server.get("/metrics"))
        for sample in family.samples
        if sample.name.startswith("autoprune_")
    }


def measure_increase(server: Server, send_requests: Callable[[], None]) -> Callable[..., float]:
    """Increase of each metric while ``send_requests`` runs."""
    before = samples(server)
    send_requests()
    after = samples(server)

    def by(name: str) -> float:
        assert name in after, sorted(after)
        return after[name] - before.get(name, 0.0)

    return by


def test_recalled_tokens_are_prompt_tokens_and_are_counted(two_front_ends: Server) -> None:
    example = examples(12)[-5]
    conversation: dict[str, Any] = body(two_front_ends, example)
    conversation["messages"] += [
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "And its shape?"},
    ]

    def send_requests() -> None:
        counted: Any
        status, counted = two_front_ends.post(
            "/tokenize", {"model": two_front_ends.model, "messages": conversation["messages"]}
        )
        assert status == 200
        status, answer = two_front_ends.post("/v1/chat/completions", conversation)
        assert status == 200
        assert counted["count"] == prompt_tokens(answer)
        assert counted["tokens"].count(image_token_id()) == 16 + 5

    by = measure_increase(two_front_ends, send_requests)
    assert by("autoprune_recalled_tokens_total") == 5
    assert by("autoprune_visual_tokens_total stage=after") == 16 + 5
    assert by("autoprune_images_total chooser=state") == 1


def test_one_front_end(pruned: Server) -> None:
    # Images that no other test uses: vLLM's encoder cache would hide the worker's counts.
    questions = examples(12)[-4:]

    def send_requests() -> None:
        for k, example in enumerate(questions):
            ask(pruned, example, **budget(50 + k))
        ask(pruned, questions[0], mm_processor_kwargs={"autoprune": {"enabled": False}})
        ask(pruned, questions[0], mm_processor_kwargs={"autoprune": {"state": "dart", "budget": 9}})
        bad = body(pruned, questions[0], **budget(0))
        assert pruned.post("/v1/chat/completions", bad)[0] == 400
        # A refused request is not counted.
        looked_at = {"model": pruned.model, "messages": body(pruned, questions[0])["messages"]}
        assert pruned.post("/tokenize", looked_at)[0] == 200

    by = measure_increase(pruned, send_requests)
    assert by("autoprune_requests_total state=autoprune") == 4
    assert by("autoprune_requests_total state=off") == 1
    assert by("autoprune_requests_total state=dart") == 1
    assert by("autoprune_requests_refused_total") == 1
    assert by("autoprune_images_total chooser=state") == 6
    kept = 50 + 51 + 52 + 53 + TOKENS + 9
    assert by("autoprune_visual_tokens_total stage=before") == 6 * TOKENS
    assert by("autoprune_visual_tokens_total stage=after") == kept
    assert by("autoprune_kv_bytes_saved_total") == (6 * TOKENS - kept) * KV_BYTES
    # In the worker: one image per step, without the tower if its features are cached.
    assert by("autoprune_selection_seconds_count") == 6
    assert by("autoprune_selection_seconds_sum") > 0
    hits = by("autoprune_feature_cache_hits_total")
    assert hits + by("autoprune_feature_cache_misses_total") == 6
    # Stock vLLM serves the unpruned image, without caching features.
    assert hits >= 6 - 1 - len({example.image_id for example in questions})
    assert samples(pruned)["autoprune_feature_cache_bytes"] > 0
    assert by("autoprune_unsafe_states_total") == 0
    assert by("autoprune_fallbacks_total fallback=reference reason=error") == 0


def test_two_front_ends_report_the_same_totals(two_front_ends: Server) -> None:
    questions = examples(1)[:2]

    def send_requests() -> None:
        for i in range(20):
            ask(two_front_ends, questions[i % 2])

    by = measure_increase(two_front_ends, send_requests)
    assert by("autoprune_requests_total state=autoprune") == 20
    assert by("autoprune_images_total chooser=state") == 20
    assert by("autoprune_visual_tokens_total stage=before") == 20 * TOKENS
    assert by("autoprune_visual_tokens_total stage=after") == 20 * 16
    assert by("autoprune_kv_bytes_saved_total") == 20 * (TOKENS - 16) * KV_BYTES
    # Every front end reports all totals, including those of the workers.
    scrapes = [samples(two_front_ends) for _ in range(8)]
    for name in (
        "autoprune_requests_total state=autoprune",
        "autoprune_selection_seconds_count",
    ):
        assert len({each[name] for each in scrapes}) == 1
    assert scrapes[0]["autoprune_selection_seconds_count"] > 0
