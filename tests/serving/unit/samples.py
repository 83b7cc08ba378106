"""Fake vLLM configurations, small images, and tiny CLIP checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tpdsl.samples import state
from vllm_autoprune import ConfigError
from vllm_autoprune.errors import Problem
from vllm_autoprune.serving.shared.served_state import ServedState
from vllm_autoprune.serving.shared.text_tower import TextTower
from vllm_autoprune.serving.startup.config import resolve_settings
from vllm_autoprune.serving.worker.features import ImageFeatures, Region
from vllm_autoprune.tpdsl.tokens import Grid

LLAVA = "LlavaForConditionalGeneration"
BOS, EOS, SEGMENT, WIDTH, VISION_WIDTH = 62, 63, 8, 12, 24
SIX = Grid(6, 6)
WORDS = ("what", "colour", "is", "the", "cat")


def hf_config(**changes: object) -> Any:
    """The fields of a LLaVA-1.5 config that the plugin looks at."""
    vision = SimpleNamespace(
        model_type="clip_vision_model",
        hidden_size=VISION_WIDTH,
        num_hidden_layers=4,
        image_size=336,
        patch_size=14,
    )
    text = SimpleNamespace(model_type="llama", bos_token_id=1, max_position_embeddings=4096)
    fields: dict[str, object] = {
        "model_type": "llava",
        "vision_config": vision,
        "text_config": text,
        "vision_feature_select_strategy": "default",
        "vision_feature_layer": -2,
    }
    return SimpleNamespace(**{**fields, **changes})


def vllm_config(
    settings: object = None,
    architecture: str = LLAVA,
    lora: object = None,
    compiled: Mapping[str, bool] = MappingProxyType({}),
    **changes: object,
) -> Any:
    """The part of a VllmConfig that settings are checked against."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            architecture=architecture,
            hf_config=hf_config(**changes),
            dtype=torch.bfloat16,
            get_total_num_hidden_layers=lambda: 4,
            get_total_num_kv_heads=lambda: 6,
            get_head_size=lambda: 32,
            multimodal_config=SimpleNamespace(mm_encoder_tp_mode="weights"),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        additional_config={"autoprune": settings, "theirs": {"x": 1}},
        lora_config=lora,
        ec_transfer_config=None,
        kv_transfer_config=None,
        compilation_config=SimpleNamespace(**compiled),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )


def served(
    changes: dict[str, object] | None = None,
    budget: int = 8,
    tower: TextTower | None = None,
    cache_bytes: int = 0,
) -> ServedState:
    """The shipped state with some fields changed, as a ServedState."""
    return ServedState(LLAVA, state(changes), budget, tower, cache_bytes)


def region(seed: int, grid: Grid, width: int = 16) -> Region:
    """Random features of tokens, without patches of their own."""
    source = torch.Generator().manual_seed(seed)
    return Region(
        grid,
        torch.randn(grid.tokens, width, generator=source),
        torch.rand(grid.tokens, generator=source),
    )


def image(seed: int, grid: Grid = SIX, width: int = 16) -> ImageFeatures:
    """An image of one region."""
    return ImageFeatures((region(seed, grid, width),))


def rows_of(features: ImageFeatures, rows: Tensor) -> list[int]:
    """Indices of an image's tokens with these rows."""
    same = (rows[:, None] == features.rows()[None]).all(dim=2)
    assert bool((same.sum(dim=1) == 1).all()), "a row is no token of this image"
    return [int(i) for i in same.long().argmax(dim=1)]


def clip_config(**text: object) -> Any:
    """Both towers of CLIP, tiny."""
    from transformers import CLIPConfig

    return CLIPConfig(
        text_config={
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": SEGMENT,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": 0,
            **text,
        },
        vision_config={
            "hidden_size": VISION_WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 28,
            "patch_size": 7,
        },
        projection_dim=WIDTH,
    )


def describe(
    folder: Path, stated: Mapping[str, object] | None = None, tokenizer: bool = True
) -> Path:
    """A folder that describes a CLIP model, without weights; ``stated`` goes into its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**json.loads(clip_config().to_json_string(use_diff=False)), **(stated or {})}
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        add_tokenizer(folder)
    return folder


def add_tokenizer(folder: Path, words: int = 64) -> None:
    """A tokenizer of whole words with CLIP's start and end tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    known = ["<unk>", *WORDS]
    known += [f"w{i}" for i in range(words - 2 - len(known))]
    vocabulary = {word: i for i, word in enumerate([*known, "<s>", "</s>"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    ends = [("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def refusal(settings: object, config: Any = None) -> tuple[Problem, ...]:
    """Every problem of refused settings; each must have a fix."""
    with pytest.raises(ConfigError) as caught:
        resolve_settings(settings, vllm_config() if config is None else config)
    problems = caught.value.problems
    assert problems
    assert all(problem.what and problem.fix for problem in problems)
    return problems


def places(settings: object, config: Any = None) -> list[str]:
    """JSON pointers of the problems of refused settings."""
    return [problem.where for problem in refusal(settings, config)]
