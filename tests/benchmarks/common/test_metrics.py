"""A server's own figures: differences of counters, peaks of gauges, version and state."""

from __future__ import annotations

import json

import pytest

from benchmarks.common import BenchmarkError
from benchmarks.common.fake_server import fake_server
from benchmarks.common.metrics import (
    MetricsWatcher,
    fetch,
    list_models,
    read_figures,
    server_info,
)
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


def test_figures_are_summed_over_engines_and_selected_by_label() -> None:
    assert read_figures(TEXT) == {
        "prompt_tokens": 120,
        "mm_cache_hits": 3,
        "visual_tokens_before": 5760,
        "visual_tokens_after": 640,
        "peak_kv_use": 0.5,
    }


def test_the_watcher_computes_differences_and_peaks() -> None:
    watch = MetricsWatcher("")
    first, last = dict(read_figures(TEXT)), dict(read_figures(TEXT))
    first.pop("visual_tokens_before")  # a labelled counter appears with its first event
    last["prompt_tokens"] = 200.0
    watch.first, watch.last, watch.peaks = first, last, {"peak_kv_use": 0.75}
    metrics = watch.metrics()
    assert metrics.read and metrics.prompt_tokens == 80 and metrics.mm_cache_hits == 0
    assert (metrics.visual_tokens_before, metrics.visual_tokens_after) == (5760, 0)
    assert metrics.peak_kv_use == 0.75
    assert metrics.generation_tokens is None


def test_missing_metrics_are_none_not_zero() -> None:
    watch = MetricsWatcher(f"http://127.0.0.1:{free_port()}")
    watch.update()
    assert not watch.metrics().read and watch.metrics().mm_cache_hits is None
    assert fetch(watch.url) is None


def test_metrics_are_read_from_a_server() -> None:
    with fake_server() as server:
        watch = MetricsWatcher(server.url)
        watch.update()
        assert watch.metrics().peak_kv_use == 0.25
        assert fetch(server.url, "/v1/models") is not None


def test_the_models_of_a_server_are_listed() -> None:
    with fake_server(model="mini") as server:
        assert list_models(server.url) == ["mini"]
    with (
        fake_server(pages={"/v1/models": "[]"}) as server,
        pytest.raises(BenchmarkError, match="not a list of models"),
    ):
        list_models(server.url)


def test_version_and_state_of_a_server() -> None:
    state = {"state": "autoprune", "digest": "abc", "version": "0.1.0", "budget": {"k": 64}}
    pages = {"/version": '{"version": "0.32.0"}', "/v1/autoprune": json.dumps(state)}
    with fake_server(pages=pages) as server:
        info, elsewhere = server_info(server.url), server_info(f"{server.url}/nothing")
    assert info == {
        "server version": "0.32.0",
        "autoprune state": "autoprune",
        "autoprune digest": "abc",
        "autoprune version": "0.1.0",
        "autoprune budget": "64",
    }
    assert elsewhere == {}
    assert server_info(server.url) == {}  # it is down now


def test_server_info_ignores_pages_that_are_no_json_object() -> None:
    with fake_server(pages={"/version": "<html>", "/v1/autoprune": "[1]"}) as server:
        assert server_info(server.url) == {}
