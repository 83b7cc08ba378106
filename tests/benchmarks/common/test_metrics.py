"""A server's own figures: differences of counters, peaks of gauges, version and state."""

from __future__ import annotations

import json
from collections.abc import Iterator

from benchmarks.common.fake_server import fake_server
from benchmarks.common.metrics import MetricsWatcher, ServerMetrics, server_info
from benchmarks.server import free_port

BEFORE = """
# HELP vllm:request_success_total Count of requests.
vllm:request_success_total{engine="0",model_name="m"} 100.0
vllm:request_success_total{engine="1",model_name="m"} 20.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.75
vllm:mm_cache_hits_total{engine="0"} 3.0
autoprune_visual_tokens_total{stage="after"} 640.0
autoprune_visual_tokens_created{stage="after"} 1.7e+09
"""
AFTER = """
vllm:request_success_total{engine="0",model_name="m"} 180.0
vllm:request_success_total{engine="1",model_name="m"} 20.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:mm_cache_hits_total{engine="0"} 3.0
autoprune_visual_tokens_total{stage="before"} 5760.0
autoprune_visual_tokens_total{stage="after"} 1280.0
"""


def test_counters_are_differences_and_gauges_are_peaks() -> None:
    pages: Iterator[str] = iter([BEFORE, AFTER])
    with fake_server(pages={"/metrics": lambda: next(pages)}) as server:
        watch = MetricsWatcher(server.url)
        watch.update()
        watch.update()
    watch.update()  # it is down now: nothing changes
    # Summed over engines; a labelled counter appears with its first event; absent ones are None.
    assert watch.metrics() == ServerMetrics(
        read=True,
        finished=80,
        mm_cache_hits=0,
        visual_tokens_before=5760,
        visual_tokens_after=640,
        peak_kv_use=0.75,
    )


def test_a_server_that_was_never_read_has_no_figures() -> None:
    watch = MetricsWatcher(f"http://127.0.0.1:{free_port()}")
    watch.update()
    assert watch.metrics() == ServerMetrics(read=False)


def test_version_and_state_of_a_server() -> None:
    state = {"state": "autoprune", "digest": "abc", "version": "0.1.0", "budget": {"k": 64}}
    pages = {"/version": '{"version": "0.32.0"}', "/v1/autoprune": json.dumps(state)}
    with fake_server(pages=pages) as server:
        assert server_info(server.url) == {
            "server version": "0.32.0",
            "autoprune state": "autoprune",
            "autoprune digest": "abc",
            "autoprune version": "0.1.0",
            "autoprune budget": "64",
        }
        assert server_info(f"{server.url}/nothing") == {}
    assert server_info(server.url) == {}  # it is down now
    with fake_server(pages={"/version": "<html>", "/v1/autoprune": "[1]"}) as server:
        assert server_info(server.url) == {}
