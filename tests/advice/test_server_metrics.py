"""Estimates from ``/metrics``: image sizes, questions per image, and times of tower or prefill."""

from __future__ import annotations

import pytest

from vllm_autoprune.advice.observation import Observation
from vllm_autoprune.advice.server_metrics import Exposition, read_times, read_traffic

# 40 requests with an image of 640 tokens and 16 of text, K = 64; 10 images; 5 s of selection.
PAGE = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="True"} 1.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 3200.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 40.0
vllm:request_generation_tokens_sum{engine="0",model_name="m"} 400.0
vllm:request_generation_tokens_count{engine="0",model_name="m"} 40.0
vllm:request_time_per_output_token_seconds_sum{engine="0",model_name="m"} 0.8
vllm:request_time_per_output_token_seconds_count{engine="0",model_name="m"} 40.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 100.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 40.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 8.0
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 40.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 57.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="m"} 40.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="m"} 3200.0
vllm:request_prefill_kv_computed_tokens_count{engine="0",model_name="m"} 40.0
autoprune_images_total{chooser="state"} 40.0
autoprune_visual_tokens_total{stage="before"} 25600.0
autoprune_visual_tokens_total{stage="after"} 2560.0
autoprune_feature_cache_hits_total 30.0
autoprune_feature_cache_misses_total 10.0
autoprune_selection_seconds_bucket{le="+Inf"} 40.0
autoprune_selection_seconds_count 40.0
autoprune_selection_seconds_sum 5.0
"""


def test_traffic() -> None:
    known = read_traffic(Exposition(PAGE))
    assert (known.questions, known.tokens, known.budget) == (4.0, 640, 64)
    assert (known.prompt, known.answer, known.block) == (16, 10, 32)
    assert known.selection == pytest.approx(0.125) and known.decode == pytest.approx(0.02)
    assert "feature cache" in known.notes[0]


def test_prefill_from_a_given_tower_and_the_other_way_round() -> None:
    """57 s of prefill: 10 towers of 2 s, 5 s of selection, 3200 tokens of 10 ms."""
    traffic = read_traffic(Exposition(PAGE))
    times = read_times(Exposition(PAGE), Observation(tower=2.0).filled_from(traffic))
    assert times.prefill == pytest.approx(0.010) and times.tower is None
    times = read_times(Exposition(PAGE), Observation(prefill=0.01).filled_from(traffic))
    assert times.tower == pytest.approx(2.0) and times.prefill is None
    assert times.decode_image == pytest.approx((100 - 8 - 57) / 40)


def test_neither_can_be_read_without_the_other() -> None:
    times = read_times(Exposition(PAGE), read_traffic(Exposition(PAGE)))
    assert times.tower is None and times.prefill is None


def test_a_server_without_the_plugin_says_nothing_about_images() -> None:
    stock = "\n".join(line for line in PAGE.splitlines() if not line.startswith("autoprune"))
    known = read_traffic(Exposition(stock))
    assert (known.questions, known.tokens, known.budget, known.prompt) == (None, None, None, None)
    assert known.answer == 10


def test_an_idle_server_and_one_without_a_prefix_cache() -> None:
    assert read_traffic(Exposition("")) == Observation()
    page = PAGE.replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"')
    assert Exposition(page).block_size() == 0
    assert read_times(Exposition(""), Observation()) == Observation()
