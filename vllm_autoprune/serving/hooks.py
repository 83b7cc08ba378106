"""Names within vLLM that the plugin depends on, and a check that this installation has them."""

from __future__ import annotations

import importlib
import operator
from dataclasses import dataclass

from vllm_autoprune.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Hook:
    """Names in ``module``, dotted for attributes, that ``used_by`` depends on."""

    module: str
    names: tuple[str, ...]
    used_by: str
    only: str = ""
    """The stock model class, or ``"worker"``, that alone relies on them; empty: every server."""


def _model(module: str, kind: str, *methods: str, merger: str = "") -> Hook:
    """Hook of a model class, with the names that every pruned model depends on.

    ``merger`` is the class of its patch merger, which is called with what states rank before it.
    """
    common = ("_processor_factory", "embed_multimodal", "load_weights")
    names = tuple(f"{kind}.{name}" for name in (*common, *methods))
    if merger:
        names += (f"{merger}.forward",)
    return Hook(f"vllm.model_executor.models.{module}", names, f"models: {kind}", only=kind)


_QWEN = (
    "_parse_and_validate_image_input",
    "_process_image_input",
    "get_mrope_input_positions",
)

HOOKS: tuple[Hook, ...] = (
    Hook(
        "vllm.engine.arg_utils",
        ("EngineArgs.add_cli_args", "EngineArgs.create_model_config"),
        "plugin: the flags",
    ),
    Hook(
        "vllm.config",
        (
            "VllmConfig.try_verify_and_update_config",
            "MultiModalConfig.is_multimodal_pruning_enabled",
            "CacheConfig.block_size",
        ),
        "plugin: the settings; compat: positions of kept tokens; kv_blocks: their size",
    ),
    Hook(
        "vllm.model_executor.models",
        ("ModelRegistry.register_model",),
        "compat: the pruned model class",
    ),
    Hook(
        "vllm.model_executor.model_loader.utils",
        ("_MODEL_ARCH_BY_HASH",),
        "compat: the pruned model class",
    ),
    Hook("vllm.renderers.registry", ("RENDERER_REGISTRY.renderers",), "compat: the renderer"),
    Hook(
        "vllm.renderers.hf",
        (
            "HfRenderer.render_messages",
            "HfRenderer.render_messages_async",
            "HfRenderer._process_tokens",
            "HfRenderer._process_tokens_async",
            "HfRenderer._apply_prompt_embeds_to_engine_input",
            "safe_apply_chat_template",
        ),
        "renderer: the instruction",
    ),
    Hook(
        "vllm.renderers.online_renderer",
        (
            "validate_request_mm_kwargs",
            "OnlineRenderer.preprocess_chat",
            "OnlineRenderer.preprocess_cmpl",
        ),
        "compat: requests may set what --autoprune-requests says",
    ),
    Hook(
        "vllm.entrypoints.pooling.base.serving",
        ("validate_request_mm_kwargs", "PoolingBaseServing._init_ctx"),
        "compat: the same on pooling servers",
    ),
    Hook(
        "vllm.entrypoints.anthropic.serving",
        ("AnthropicServingMessages",),
        "compat: headers of clients",
    ),
    Hook(
        "vllm.v1.engine.input_processor",
        ("InputProcessor.process_inputs",),
        "engine_requests: forged plans",
    ),
    Hook(
        "vllm.v1.engine.output_processor",
        ("OutputProcessor.add_request",),
        "engine_requests: what is counted",
    ),
    Hook(
        "vllm.multimodal.processing",
        (
            "BaseMultiModalProcessor.apply",
            "BaseMultiModalProcessor._cached_apply_hf_processor",
            "BaseMultiModalProcessor._apply_hf_processor_main",
            "BaseMultiModalProcessor._get_mm_fields_config",
            "BaseMultiModalProcessor._get_mm_hashes",
            "BaseMultiModalProcessor._recompute_cached_prompt_update",
            "ProcessorInputs",
        ),
        "processor: K placeholders and cache identity",
    ),
    Hook(
        "vllm.multimodal.inputs",
        (
            "MultiModalBatchedField",
            "MultiModalFieldElem",
            "MultiModalKwargsItem.get_data",
            "MultiModalKwargsItems.from_hf_inputs",
        ),
        "processor: the plan beside the tensors; engine_requests: forged plans",
    ),
    Hook(
        "vllm.multimodal.cache",
        (
            "LruKeyReplicatedSenderCache.get_and_update_item",
            "LruKeyReplicatedSenderCache.touch_sender_cache_item",
        ),
        "sender_cache: changed by requests that reach the engine alone",
    ),
    Hook(
        "vllm.multimodal.cache.base",
        ("BaseMultiModalProcessorCache", "BaseMultiModalReceiverCache.get_and_update_features"),
        "sender_cache; receiver_cache: tensors of an image once",
    ),
    Hook(
        "vllm.multimodal.hasher",
        ("MultiModalHasher.hash_kwargs",),
        "engine_requests: digest of tensors",
    ),
    Hook(
        "vllm.multimodal.parse",
        (
            "ImageProcessorItems.get_image_size",
            "ImageSize",
            "MultiModalDataItems.select",
        ),
        "processor: what comes unpruned, and what an image shows",
    ),
    Hook(
        "vllm.multimodal.processing.processor",
        ("PromptUpdateDetails",),
        "processor: K placeholders",
    ),
    _model("llava", "LlavaForConditionalGeneration", "_parse_and_validate_image_input"),
    _model(
        "llava_next",
        "LlavaNextForConditionalGeneration",
        "_parse_and_validate_image_input",
        "_merge_image_patch_embeddings",
    ),
    _model(
        "llava_onevision",
        "LlavaOnevisionForConditionalGeneration",
        "_parse_and_validate_image_input",
        "_image_pixels_to_features",
        "_merge_image_patch_embeddings",
    ),
    _model(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        *_QWEN,
        merger="Qwen2VisionPatchMerger",
    ),
    _model(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        *_QWEN,
        "recompute_mrope_positions",
        merger="Qwen2_5_VisionPatchMerger",
    ),
    _model(
        "qwen3_vl",
        "Qwen3VLForConditionalGeneration",
        *_QWEN,
        "recompute_mrope_positions",
        merger="Qwen3_VisionPatchMerger",
    ),
    _model(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        *_QWEN,
        "recompute_mrope_positions",
    ),
    _model(
        "qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        *_QWEN,
        "recompute_mrope_positions",
    ),
    _model(
        "qwen3_5",
        "Qwen3_5MoeForConditionalGeneration",
        *_QWEN,
        "recompute_mrope_positions",
    ),
    _model("glm4_1v", "Glm4vForConditionalGeneration", *_QWEN),
    _model("glm4_1v", "Glm4vMoeForConditionalGeneration", *_QWEN),
    _model(
        "interns1",
        "InternS1ForConditionalGeneration",
        "extract_feature",
        merger="InternS1MultiModalProjector",
    ),
    _model("idefics3", "Idefics3ForConditionalGeneration", merger="Idefics3SimpleMLP"),
    Hook(
        "vllm.model_executor.models.idefics3",
        ("Idefics3Model.image_pixels_to_features",),
        "models: rows of tiles",
        only="Idefics3ForConditionalGeneration",
    ),
    _model("smolvlm", "SmolVLMForConditionalGeneration"),
    Hook(
        "vllm.model_executor.models.idefics3",
        ("Idefics3SimpleMLP.forward", "Idefics3Model.image_pixels_to_features"),
        "models: rows of tiles, and what enters the patch merger",
        only="SmolVLMForConditionalGeneration",
    ),
    _model("gemma3_mm", "Gemma3ForConditionalGeneration", "_image_pixels_to_features"),
    Hook(
        "vllm.model_executor.models.interfaces",
        ("SupportsMultiModal.get_language_model", "supports_multimodal_pruning"),
        "models: relevance by embeddings; positions",
    ),
    Hook(
        "vllm.v1.worker.cpu_model_runner",
        ("CPUModelRunner.load_model",),
        "compat: positions of kept tokens on a CPU",
        only="worker",
    ),
    Hook(
        "vllm.v1.worker.gpu_worker",
        (
            "Worker.get_model",
            "Worker.reset_encoder_cache",
            "Worker.reset_mm_cache",
            "Worker.reload_weights",
            "Worker.update_weights",
            "Worker.finish_weight_update",
        ),
        "compat: features are dropped with vLLM's caches of images",
        only="worker",
    ),
    Hook("vllm.exceptions", ("VLLMValidationError",), "engine_requests: forged plans"),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        ("GPUModelRunner._execute_mm_encoder",),
        "compat: encoder calls within what profiling saw",
        only="worker",
    ),
    Hook(
        "vllm.v1.worker.gpu.mm.encoder_runner",
        ("EncoderRunner.execute_mm_encoder",),
        "compat: encoder calls within what profiling saw",
        only="worker",
    ),
    Hook(
        "vllm.v1.worker.gpu.mm.rope",
        ("RopeState.update_prefill_positions",),
        "compat: positions of kept tokens under Model Runner V2",
        only="worker",
    ),
    Hook(
        "vllm.v1.worker.encoder_cudagraph",
        ("EncoderCudaGraphManager.execute",),
        "compat: tokens are selected after the graphs",
        only="worker",
    ),
    Hook(
        "vllm.multimodal.utils",
        ("group_and_batch_mm_items",),
        "models: unpruned tokens of an item",
    ),
    Hook(
        "vllm.v1.core.encoder_cache_manager",
        (
            "EncoderCacheManager.create_manager",
            "EncoderCacheManager.can_allocate",
            "EncoderCacheManager.allocate",
            "EncoderCacheManager.get_freed_mm_hashes",
        ),
        "encoder_budget: unpruned tokens of a step",
    ),
    Hook("vllm.v1.engine.core", ("EngineCore.sleep",), "compat: levels of sleep"),
    Hook("vllm.platforms", ("current_platform",), "compat: which runner is patched"),
    Hook(
        "vllm.utils.torch_utils",
        ("kv_cache_dtype_str_to_dtype",),
        "metrics_setup: bytes of one token",
    ),
    Hook("vllm.model_executor.models.utils", ("StageMissingLayer",), "models: text-only"),
    Hook(
        "vllm.distributed",
        (
            "get_tp_group",
            "model_parallel_is_initialized",
            "tensor_model_parallel_all_gather",
            "tensor_model_parallel_all_reduce",
        ),
        "tensor_parallel: the same tokens on all ranks",
    ),
)


def require_hooks(stock: str) -> None:
    """Raise if this vLLM lacks a name that serving this model class depends on.

    Raises :class:`ConfigError` with every name. Within the versions that are allowed at all this
    finds builds that differ from the release they name.
    """
    problems = [
        Problem(f"{hook.module}.{name}", f"is not there ({hook.used_by})", _FIX)
        for hook in HOOKS
        if hook.only in ("", stock)
        for name in find_missing_names(hook)
    ]
    if problems:
        raise ConfigError("this vLLM is not the one that the plugin was written for", problems)


_FIX = "install a released vLLM in the supported range, and see `vllm-autoprune doctor`"


def find_missing_names(hook: Hook) -> tuple[str, ...]:
    """The names of a hook that this vLLM lacks; the module itself where its import fails."""
    try:
        module = importlib.import_module(hook.module)
    except Exception as error:  # a broken installation may raise anything
        return (f"{hook.module} ({type(error).__name__}: {error})",)
    return tuple(name for name in hook.names if not _has(module, name))


def _has(module: object, name: str) -> bool:
    try:
        operator.attrgetter(name)(module)
    except AttributeError:
        return False
    return True
