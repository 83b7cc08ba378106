"""`/metrics`: differences of counters, peaks of gauges, and None for what is not told."""

from __future__ import annotations

from benchmarks.load.mock import mock_server
from benchmarks.load.server_metrics import Watch, fetch, reading
from benchmarks.server import free_port

TEXT = """
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 20.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:mm_cache_hits_total{engine="0"} 3.0
autoprune_visual_tokens_total{stage="before"} 5760.0
autoprune_visual_tokens_total{stage="after"} 640.0
autoprune_visual_tokens_created{stage="after"} 1.7e+09
"""


def test_figures_are_summed_over_engines_and_told_apart_by_label() -> None:
    assert reading(TEXT) == {
        "prompt_tokens": 120,
        "mm_cache_hits": 3,
        "visual_tokens_before": 5760,
        "visual_tokens_after": 640,
        "peak_kv_use": 0.5,
    }


def test_a_watch_takes_differences_and_peaks() -> None:
    watch = Watch("")
    first, last = dict(reading(TEXT)), dict(reading(TEXT))
    first.pop("visual_tokens_before")  # a labelled counter appears with its first event
    last["prompt_tokens"] = 200.0
    watch.first, watch.last, watch.peaks = first, last, {"peak_kv_use": 0.75}
    found = watch.metrics()
    assert found.read and found.prompt_tokens == 80 and found.mm_cache_hits == 0
    assert (found.visual_tokens_before, found.visual_tokens_after) == (5760, 0)
    assert found.peak_kv_use == 0.75
    assert found.generation_tokens is None


def test_a_server_that_tells_nothing_is_not_taken_for_one_without_hits() -> None:
    watch = Watch(f"http://127.0.0.1:{free_port()}")
    watch.look()
    assert not watch.metrics().read and watch.metrics().mm_cache_hits is None
    assert fetch(watch.url) is None


def test_a_server_is_read() -> None:
    with mock_server() as server:
        watch = Watch(server.url)
        watch.look()
        assert watch.metrics().peak_kv_use == 0.25
        assert fetch(server.url, "/v1/models") is not None
