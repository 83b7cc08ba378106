"""Fake vLLM configurations and installations, and what is said of settings that do not fit."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.ec_manager_config import EncoderCacheManagerConfig

from vllm_autoprune import ConfigError
from vllm_autoprune.errors import Problem
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.startup import _resolve_settings

LLAVA = "LlavaForConditionalGeneration"


def vllm_config(
    settings: object = None,
    architecture: str = LLAVA,
    lora: object = None,
    **changes: object,
) -> Any:
    """The part of a VllmConfig that settings are checked against; ``changes`` of the HF config."""
    vision = {
        "hidden_size": 160,
        "num_hidden_layers": 4,
        "image_size": 336,
        "patch_size": 14,
    }
    merged = {
        "spatial_merge_size": 2,
        "fullatt_block_indexes": [3],
        "qk_normalization": False,
    }
    text = {"model_type": "llama", "bos_token_id": 1, "max_position_embeddings": 4096}
    thinker = SimpleNamespace(vision_config=SimpleNamespace(**merged))
    fields: dict[str, object] = {
        "model_type": "llava",
        "thinker_config": thinker,
        "vision_config": SimpleNamespace(
            model_type="clip_vision_model", **vision, **merged
        ),
        "text_config": SimpleNamespace(**text),
        "vision_feature_select_strategy": "default",
        "vision_feature_layer": -2,
        "vit_config": SimpleNamespace(hidden_stride=2),
        "downsample_ratio": 0.5,
        "ps_version": "v2",
    }
    model = SimpleNamespace(
        architecture=architecture,
        trust_remote_code=False,
        hf_config=SimpleNamespace(
            get_text_config=lambda: SimpleNamespace(
                rope_parameters={"rope_theta": 1e4}
            ),
            **{**fields, **changes},
        ),
        uses_mrope=architecture in BACKBONES and BACKBONES[architecture].mrope,
        dtype=torch.bfloat16,
        get_total_num_hidden_layers=lambda: 4,
        get_total_num_kv_heads=lambda: 6,
        get_head_size=lambda: 32,
        multimodal_config=SimpleNamespace(
            mm_encoder_tp_mode="weights",
            mm_device_do_normalize=architecture not in BACKBONES
            or not BACKBONES[architecture].host_norm,
        ),
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[]),
        additional_config={"autoprune": settings, "theirs": {"x": 1}},
        lora_config=lora,
        ec_transfer_config=None,
        kv_transfer_config=None,
        compilation_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        speculative_config=None,
        ec_manager_config=EncoderCacheManagerConfig(),
        use_v2_model_runner=False,
    )


def refusal(settings: object, config: Any = None) -> tuple[Problem, ...]:
    """Every problem of refused settings; each must have a fix."""
    with pytest.raises(ConfigError) as caught:
        _resolve_settings(settings, vllm_config() if config is None else config)
    problems = caught.value.problems
    assert problems
    assert all(problem.what and problem.fix for problem in problems)
    return problems


def places(settings: object, config: Any = None) -> list[str]:
    """JSON pointers of the problems of refused settings."""
    return [problem.where for problem in refusal(settings, config)]


def pretend(monkeypatch: pytest.MonkeyPatch, **installed: str | None) -> None:
    """Let these distributions be installed, and no others."""

    def version(name: str) -> str:
        if (release := installed.get(name.replace("-", "_"))) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return release

    monkeypatch.setattr(importlib.metadata, "version", version)
