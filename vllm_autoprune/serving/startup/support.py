"""Support table: backbones and ways of serving, with tests; docs/support.md is made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["yes", "refused", "no", "untested"]
"""``untested`` is for what needs a GPU."""


@dataclass(frozen=True, slots=True)
class Support:
    """Support of one feature, and the tests that say so, as ``file::function`` below ``tests``."""

    feature: str
    status: Status
    note: str
    tests: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BackboneSupport:
    """One served model family, by the name of its record in ``serving.models``.

    ``relevance`` is where states may measure it; ``attention`` is what policies that read [CLS]
    are given; ``tower`` says whether states may read inside the vision tower and the language
    model's first layers; ``seen`` is what the tests serve.
    """

    name: str
    title: str
    relevance: Literal["CLIP or embeddings", "embeddings"]
    attention: Literal["[CLS]", "mean"]
    tower: Status
    layout: str
    positions: Literal["one number", "time, height, width"]
    video: Literal["untouched", "none"]
    seen: str


_TINY = "tiny random weights"

BACKBONE_SUPPORT: tuple[BackboneSupport, ...] = (
    BackboneSupport(
        "llava", "LLaVA-1.5 (CLIP tower)", "CLIP or embeddings", "[CLS]", "yes",
        "one grid", "one number", "none", "trained mini-LLaVA, all tests",
    ),
    BackboneSupport(
        "llava_next", "LLaVA-NeXT (CLIP tower)", "CLIP or embeddings", "[CLS]", "yes",
        "base view and crops, newlines dropped", "one number", "none", _TINY,
    ),
    BackboneSupport(
        "llava_onevision", "LLaVA-OneVision (SigLIP tower)", "embeddings", "mean", "refused",
        "base view and crops, newlines dropped", "one number", "untouched", _TINY,
    ),
    BackboneSupport(
        "qwen2_vl", "Qwen2-VL", "embeddings", "mean", "refused",
        "one grid of any size", "time, height, width", "untouched", _TINY,
    ),
    BackboneSupport(
        "qwen2_5_vl", "Qwen2.5-VL", "embeddings", "mean", "refused",
        "one grid of any size", "time, height, width", "untouched", _TINY,
    ),
    BackboneSupport(
        "qwen3_vl", "Qwen3-VL", "embeddings", "mean", "refused",
        "one grid of any size, deepstack levels alike", "time, height, width", "untouched",
        f"{_TINY}, trained mini-Qwen3-VL",
    ),
    BackboneSupport(
        "qwen3_vl_moe", "Qwen3-VL-MoE", "embeddings", "mean", "refused",
        "one grid of any size, deepstack levels alike", "time, height, width", "untouched", _TINY,
    ),
    BackboneSupport(
        "qwen3_5", "Qwen3.5", "embeddings", "mean", "refused",
        "one grid of any size", "time, height, width", "untouched", _TINY,
    ),
    BackboneSupport(
        "qwen3_5_moe", "Qwen3.5-MoE", "embeddings", "mean", "refused",
        "one grid of any size", "time, height, width", "untouched", _TINY,
    ),
    BackboneSupport(
        "glm4v", "GLM-4.1V", "embeddings", "mean", "refused",
        "one grid of any size", "time, height, width", "untouched", _TINY,
    ),
    BackboneSupport(
        "glm4v_moe", "GLM-4.5V (MoE)", "embeddings", "mean", "refused",
        "one grid of any size", "time, height, width", "untouched", _TINY,
    ),
    BackboneSupport(
        "internvl", "InternVL (`InternVLForConditionalGeneration`)", "embeddings", "mean",
        "refused", "equal tiles", "one number", "untouched", _TINY,
    ),
    BackboneSupport(
        "idefics3", "Idefics3", "embeddings", "mean", "refused",
        "equal tiles and the whole image, each with its share of K", "one number", "none", _TINY,
    ),
    BackboneSupport(
        "smolvlm", "SmolVLM2", "embeddings", "mean", "refused",
        "equal tiles and the whole image, each with its share of K", "one number", "none", _TINY,
    ),
    BackboneSupport(
        "gemma3", "Gemma 3", "embeddings", "mean", "refused",
        "one grid, and one for each crop", "one number", "none", _TINY,
    ),
)  # fmt: skip
"""Every backbone that is served pruned. Any other architecture is refused at start-up."""


SUPPORT: tuple[Support, ...] = (
    Support(
        "`/v1/chat/completions`, `LLM.chat`, `LLM.generate`", "yes", "one identity for all",
        ("serving/test_server.py::test_prompt_tokens_fall_by_exactly_n_minus_k",),
    ),
    Support(
        "Streaming, `n > 1`, `/v1/responses`, `/v1/completions`", "yes",
        "an image is encoded once for all samples; completions take text alone, as in vLLM",
        ("serving/test_endpoints.py::test_streamed_answer_is_the_whole_one",),
    ),
    Support(
        "Budgets in headers; `/v1/messages`", "yes",
        "`x-autoprune-budget`, `x-autoprune-state` at every endpoint, for one request alone",
        ("serving/test_field_inputs.py::test_settings_of_one_request_do_not_reach_another",),
    ),
    Support(
        "Pooling servers (`--runner pooling`)", "yes",
        "`/v1/embeddings`, `/pooling`, `/classify`, `/v1/score`: settings and refusals as for chat",
        ("serving/test_field_inputs.py::test_pooling_servers_answer_like_chat_servers",),
    ),
    Support(
        "Structured output, sampling", "yes", "choices, patterns, seeds",
        ("serving/test_modes.py::test_several_samples_and_structured_output",),
    ),
    Support(
        "Several images, several turns", "yes", "instruction of the turn with the image",
        ("serving/test_identity.py::test_order_of_two_images_matters",),
    ),
    Support(
        "Prefix caching, multi-modal caches", "yes", "image + state + K + instruction",
        ("serving/test_identity.py::test_interleaved_questions_answer_as_they_do_alone",),
    ),
    Support(
        "Processor cache in shared memory", "yes",
        "`--mm-processor-cache-type shm`, cores, deltas and recalls included",
        ("serving/test_modes.py::test_processor_cache_in_shared_memory",),
    ),
    Support(
        "KV connectors", "yes",
        "ExampleConnector: two servers share pruned KV; LMCache and offloading need a GPU",
        (
            "serving/test_connectors.py::test_a_second_engine_takes_pruned_kv_of_the_first",
            "serving/test_shared_store.py::"
            "test_requests_to_both_servers_are_answered_as_without_a_store",
        ),
    ),
    Support(
        "Encoder disaggregation (`--ec-transfer-config`)", "yes",
        "states that do not read the question; the engine that encodes by vLLM's runner V1",
        (
            "serving/test_connectors.py::test_images_encoded_by_another_engine",
            "serving/unit/startup/test_mode_checks.py"
            "::test_a_mode_is_refused_only_for_states_that_read_what_it_hides",
        ),
    ),
    Support(
        "Render and generate servers", "yes", "both with the plugin and the same settings",
        (
            "serving/test_render_split.py::test_rendered_elsewhere_is_answered_as_a_whole_request",
            "serving/test_processed_inputs.py::test_rendered_request_is_answered",
        ),
    ),
    Support(
        "Chunked prefill", "yes", "same tokens as whole prefill",
        ("serving/test_equivalence.py::test_prefill_and_caches_do_not_change_what_is_kept",),
    ),
    Support(
        "Priority scheduling, preemption", "yes",
        "preempted requests answer the same; an image that is encoded again "
        "[keeps its tokens](architecture.md#decisions-that-are-not-obvious)",
        ("serving/test_modes.py::test_priority_scheduling_with_preemption",),
    ),
    Support(
        "Speculative decoding", "yes", "by n-grams or a draft model, which sees no image",
        ("serving/test_modes.py::test_speculative_decoding",),
    ),
    Support(
        "LoRA on the language model", "yes",
        "adapters share the features of an image; refused where the state reads its first layers",
        ("serving/test_modes.py::test_adapters_of_the_language_model",),
    ),
    Support(
        "LoRA on the vision tower or projector", "refused", "features are kept by image",
        ("serving/unit/startup/test_config.py::test_lora_on_the_vision_tower",),
    ),
    Support(
        "Prompt embeddings beside images", "yes", "in one batch, or in one message",
        ("serving/test_modes.py::test_prompt_embeddings_beside_images",),
    ),
    Support(
        "`image_embeds` inputs", "no", "served unpruned: they come without signals",
        ("serving/test_modes.py::test_image_embeddings_are_served_unpruned",),
    ),
    Support(
        "Budget, state or control of one request", "yes",
        "what `--autoprune-requests` allows; all kinds in one step",
        ("serving/test_requests.py::test_states_and_budgets_share_a_step",),
    ),
    Support(
        "Ranking before the patch merger (`rank_at`)", "yes",
        "Qwen-VL, GLM-4.xV, InternVL, Idefics3, SmolVLM; the others have no merger and refuse it",
        (
            "serving/unit/worker/test_batch_inputs.py"
            "::test_a_state_that_ranks_before_the_merger_keeps_rows_after_it",
        ),
    ),
    Support(
        "Metrics of API servers and workers", "yes", "in `/metrics`, one API server or two",
        ("serving/test_metrics.py::test_two_front_ends_report_the_same_totals",),
    ),
    Support(
        "`--api-server-count` above 1", "yes", "both processes seen answering",
        ("serving/test_server.py::test_both_front_ends_answer_alike",),
    ),
    Support(
        "`--tensor-parallel-size` above 1", "yes", "two ranks choose the same tokens",
        ("serving/test_ranks.py::test_ranks_choose_the_same_tokens_and_answer_like_one",),
    ),
    Support(
        "`--data-parallel-size` above 1", "yes", "both engines seen answering",
        ("serving/test_data_parallel.py::test_both_engines_answer_alike",),
    ),
    Support(
        "`--pipeline-parallel-size` above 1", "yes",
        "two ranks answer like one (the test allocates what vLLM's CPU worker does not). Refused "
        "for M-RoPE models, and for states that read the language model's first layers",
        (
            "serving/test_modes.py::test_pipeline_ranks",
            "serving/unit/startup/test_mode_checks.py"
            "::test_positions_do_not_reach_later_ranks_of_a_pipeline",
        ),
    ),
    Support(
        "`--distributed-executor-backend ray`", "yes",
        "two workers in a local cluster choose the same tokens as two processes",
        ("serving/test_ray.py::test_workers_in_a_ray_cluster_select_as_processes_do",),
    ),
    Support(
        "`--mm-encoder-tp-mode data`", "yes",
        "states that do not read inside the vision tower; others are refused",
        ("serving/test_ranks.py::test_ranks_agree_with_a_data_parallel_tower",),
    ),
    Support(
        "Encoder CUDA graphs", "untested",
        "tokens are selected after them: on a CPU with vLLM's manager and a stand-in for replay. "
        "Refused for states that read inside the vision tower",
        ("serving/test_encoder_graphs.py::test_tokens_are_selected_after_encoder_graphs",),
    ),
    Support(
        "Compiled vision towers", "refused", "for states that read inside the vision tower",
        (
            "serving/unit/startup/test_mode_checks.py"
            "::test_a_mode_is_refused_only_for_states_that_read_what_it_hides",
        ),
    ),
    Support(
        "`reset_mm_cache`, `reset_encoder_cache`, `reload_weights`", "yes",
        "drop all features; with other weights from disk an engine answers as a new one",
        (
            "serving/test_feature_cache.py::test_cache_resets_and_new_weights_clear_features",
            "serving/test_feature_cache.py::test_new_weights_from_disk_answer_as_a_new_engine",
        ),
    ),
    Support(
        "Sleep and wake", "yes",
        "levels 0 and 1, without freeing memory, which needs a GPU; level 2 is refused with a "
        "text tower",
        (
            "serving/test_modes.py::test_sleep_and_wake_with_a_text_tower",
            "serving/unit/startup/test_activation.py"
            "::test_sleep_is_refused_before_the_engine_is_paused",
        ),
    ),
    Support(
        "Rolling out another state", "yes",
        "two servers behind a router under traffic: no request is dropped, none has another state",
        ("serving/test_rolling.py::test_another_state_is_rolled_out_under_traffic",),
    ),
    Support(
        "Async scheduling", "untested", "vLLM switches it off on a CPU",
    ),
    Support(
        "Any other architecture", "refused", "at start-up, naming those that are served",
        ("serving/unit/startup/test_config.py::test_a_model_that_cannot_be_pruned",),
    ),
    Support(
        "LLaVA with a SigLIP or Pixtral tower", "refused", "no [CLS] token to read",
        ("serving/unit/startup/test_config.py::test_a_model_that_cannot_be_pruned",),
    ),
    Support(
        "Pixtral, Mistral Small 3, MiniCPM-V, Kimi-VL, Llama 4",
        "refused",
        "by name, with the reason",
        (
            "serving/unit/startup/test_config.py"
            "::test_a_known_model_is_refused_by_name_and_with_the_reason",
        ),
    ),
    Support(
        "Rust front end", "refused", "it bypasses Python processors",
        ("serving/unit/startup/test_config.py::test_the_rust_front_end",),
    ),
    Support(
        "Model runners V1 and V2", "yes", "the same tokens; V2 on a CPU by Triton's interpreter",
        ("serving/test_runners.py::test_reports_of_both_runners_are_equal",),
    ),
    Support(
        "vLLM 0.33 as far as it needs no device", "yes",
        "rendering, processors, identities, plans and hooks, run with its sources",
        (
            "serving/unit/startup/test_versions.py::test_a_release_has_every_hook",
            "serving/unit/worker/test_encoder_inputs.py::test_a_dropped_payload_is_asked_for_nothing",
        ),
    ),
    Support("vLLM 0.33 with a model", "untested", "it has no wheel for CPUs"),
    Support("GPUs, CUDA graphs of the language model", "untested", "not yet run"),
)  # fmt: skip
"""``vllm serve`` with the plugin. Every row that says yes or refused names its test."""


def as_markdown() -> str:
    """Both tables as docs/support.md shows them."""
    lines = [
        "| backbone | tokens of an image | relevance | attention | inside the tower | positions "
        "| videos | seen on |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.title} | {row.layout} | {row.relevance} | {row.attention} | {row.tower} "
        f"| {row.positions} | {row.video} | {row.seen} |"
        for row in BACKBONE_SUPPORT
    ]
    lines += ["", "| | supported | | test |", "|---|---|---|---|"]
    lines += [
        f"| {row.feature} | {row.status} | {row.note} | {_test_files(row)} |" for row in SUPPORT
    ]
    return "\n".join(lines) + "\n"


def _test_files(row: Support) -> str:
    files = dict.fromkeys(test.partition("::")[0].rpartition("/")[2] for test in row.tests)
    return ", ".join(f"`{file}`" for file in files)
