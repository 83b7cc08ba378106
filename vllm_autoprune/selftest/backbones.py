"""Tiny models of every backbone, with real configurations and processors and random weights.

Their answers are meaningless. What is compared is which tokens are kept, their positions, and
log-probabilities with and without pruning.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_autoprune.selftest.mrope_models import MROPE_BUILDERS
from vllm_autoprune.selftest.tiny_models import (
    CLIP_NAMES,
    TEXT,
    VISION,
    VOCABULARY,
    build_tokenizer,
    token_id,
    write_checkpoint,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers.image_processing_utils import BaseImageProcessor
    from transformers.processing_utils import ProcessorMixin

BUILDERS: dict[str, Callable[[Path], None]] = dict(MROPE_BUILDERS)
"""Name of a backbone -> writes its model to a folder."""

NEEDED_PACKAGES = {"smolvlm": "num2words"}
"""Backbone -> package that its processor needs and that vLLM does not install."""


def build(name: str, folder: Path) -> Path:
    """Write the tiny model of one backbone to ``folder``; returns the folder."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BUILDERS[name](folder)
    return folder


def _register(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register the function that writes a backbone's tiny model."""

    def register(function: Callable[[Path], None]) -> Callable[[Path], None]:
        BUILDERS[name] = function
        return function

    return register


@_register("llava_next")
def _llava_next(folder: Path) -> None:
    from transformers import (
        LlavaNextConfig,
        LlavaNextImageProcessor,
        LlavaNextProcessor,
    )

    tokenizer = build_tokenizer("<image>")
    side, patch = 56, 14
    pinpoints = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
    config = LlavaNextConfig(
        vision_config={
            "model_type": "clip_vision_model",
            "image_size": side,
            "patch_size": patch,
            **VISION,
        },
        text_config={"model_type": "llama", "vocab_size": VOCABULARY, **TEXT},
        image_token_index=token_id(tokenizer, "<image>"),
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-2,
    )
    write_checkpoint(folder, config, CLIP_NAMES)
    pixels = LlavaNextImageProcessor(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_grid_pinpoints=pinpoints,
    )
    LlavaNextProcessor(
        pixels,
        tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


@_register("llava_onevision")
def _onevision(folder: Path) -> None:
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionImageProcessor,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
    )

    tokenizer = build_tokenizer("<image>", "<video>")
    side, patch = 56, 14
    pinpoints = [[side * i, side * j] for i in range(1, 7) for j in range(1, 7)]
    config = LlavaOnevisionConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "image_size": side,
            "patch_size": patch,
            "vision_use_head": False,
            **VISION,
        },
        text_config={"model_type": "qwen2", "vocab_size": VOCABULARY, **TEXT},
        image_token_index=token_id(tokenizer, "<image>"),
        video_token_index=token_id(tokenizer, "<video>"),
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    write_checkpoint(folder, config, CLIP_NAMES)
    pixels = LlavaOnevisionImageProcessor(
        size={"height": side, "width": side}, image_grid_pinpoints=pinpoints
    )
    LlavaOnevisionProcessor(
        pixels,
        tokenizer,
        LlavaOnevisionVideoProcessor(size={"height": side, "width": side}),
        num_image_tokens=(side // patch) ** 2,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


@_register("internvl")
def _internvl(folder: Path) -> None:
    from transformers import (
        GotOcr2ImageProcessor,
        InternVLConfig,
        InternVLProcessor,
        InternVLVideoProcessor,
    )

    special = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = build_tokenizer("<IMG_CONTEXT>", "<img>", "</img>", "<video>", extra=special)
    side = 56
    config = InternVLConfig(
        vision_config={
            "image_size": [side, side],
            "patch_size": [14, 14],
            "num_channels": 3,
            **VISION,
        },
        text_config={"model_type": "qwen2", "vocab_size": VOCABULARY, **TEXT},
        image_token_id=token_id(tokenizer, "<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
        vision_feature_layer=-1,
    )
    write_checkpoint(folder, config)
    size = {"height": side, "width": side}
    InternVLProcessor(
        GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=6),
        tokenizer,
        InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


@_register("gemma3")
def _gemma3(folder: Path) -> None:
    from transformers import Gemma3Config, Gemma3ImageProcessor, Gemma3Processor

    special = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    newlines = ["\n" * count for count in range(1, 5)]
    tokenizer = build_tokenizer(
        "<start_of_image>", "<end_of_image>", "<image_soft_token>", *newlines, extra=special
    )
    side = 112
    config = Gemma3Config(
        vision_config={
            "model_type": "siglip_vision_model",
            "image_size": side,
            "patch_size": 14,
            "vision_use_head": False,
            **VISION,
        },
        text_config={
            "model_type": "gemma3_text",
            "vocab_size": VOCABULARY,
            **TEXT,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 512,
        },
        image_token_index=token_id(tokenizer, "<image_soft_token>"),
        boi_token_index=token_id(tokenizer, "<start_of_image>"),
        eoi_token_index=token_id(tokenizer, "<end_of_image>"),
        mm_tokens_per_image=16,
    )
    write_checkpoint(folder, config, CLIP_NAMES)
    Gemma3Processor(
        Gemma3ImageProcessor(size={"height": side, "width": side}),
        tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=16,
    ).save_pretrained(folder)


@_register("idefics3")
def _idefics3(folder: Path) -> None:
    from transformers import Idefics3Config, Idefics3ImageProcessor, Idefics3Processor

    _write_idefics(folder, Idefics3Config, Idefics3ImageProcessor, Idefics3Processor, 84, 2)


@_register("smolvlm")
def _smolvlm(folder: Path) -> None:
    from transformers import (
        SmolVLMConfig,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    # As in SmolVLM2-2.2B, whose tiles are 384 pixels wide, patches do not fill a tile.
    side = 9 * 14 + 4
    videos = SmolVLMVideoProcessor(
        video_sampling={"fps": 1, "max_frames": 64, "video_size": {"longest_edge": side}}
    )
    _write_idefics(folder, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor, side, 3, videos)


def _write_idefics(
    folder: Path,
    config_class: Callable[..., PreTrainedConfig],
    pixels_class: Callable[..., BaseImageProcessor],
    processor_class: Callable[..., ProcessorMixin],
    side: int,
    scale: int,
    *processors: object,
) -> None:
    """Write a model with tiles ``side`` pixels wide, ``scale`` patches across a token."""
    patch, across = 14, 2
    tiles = [f"<row_{i}_col_{j}>" for i in range(1, across + 1) for j in range(1, across + 1)]
    around = "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
    tokenizer = build_tokenizer("<image>", *around, *tiles, "\n", "\n\n")
    config = config_class(
        vision_config={"image_size": side, "patch_size": patch, **VISION},
        text_config={"model_type": "llama", "vocab_size": VOCABULARY, **TEXT},
        image_token_id=token_id(tokenizer, "<image>"),
        pad_token_id=0,
        scale_factor=scale,
    )
    write_checkpoint(folder, config)
    processor_class(
        pixels_class(size={"longest_edge": across * side}, max_image_size={"longest_edge": side}),
        tokenizer,
        *processors,
        image_seq_len=(side // patch // scale) ** 2,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)
