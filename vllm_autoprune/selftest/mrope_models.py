"""Tiny models of the families with M-RoPE, Qwen-VL and GLM-V, with real configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_autoprune.selftest.tiny_models import (
    TEXT,
    VOCABULARY,
    build_tokenizer,
    token_id,
    write_checkpoint,
)

Part = Mapping[str, object]

_GLM_VISION: Part = {
    "depth": 3,
    "hidden_size": 64,
    "num_heads": 2,
    "image_size": 224,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "intermediate_size": 96,
}
_GLM_TEXT: Part = {
    **TEXT,
    "vocab_size": VOCABULARY,
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 3, 3],
    },
}
_GLM_EXPERTS: Part = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "use_qk_norm": False,
}


def _glm(folder: Path, kind: str, text: Part) -> None:
    from transformers import (
        AutoConfig,
        Glm4vImageProcessor,
        Glm4vProcessor,
        Glm4vVideoProcessor,
    )

    image, video = "<|image|>", "<|video|>"
    edges = [f"<|{edge}_of_{item}|>" for item in ("image", "video") for edge in ("begin", "end")]
    tokenizer = build_tokenizer(image, video, *edges, image_text=f"{edges[0]}{image}{edges[1]}")
    names = ("image_start", "image_end", "video_start", "video_end")
    config = AutoConfig.for_model(
        kind,
        vision_config=dict(_GLM_VISION),
        text_config=dict(text),
        image_token_id=token_id(tokenizer, image),
        video_token_id=token_id(tokenizer, video),
        **{
            f"{name}_token_id": token_id(tokenizer, edge)
            for name, edge in zip(names, edges, strict=True)
        },
    )
    write_checkpoint(folder, config)
    size = {"shortest_edge": 112 * 112, "longest_edge": 2 * 512 * 512}
    Glm4vProcessor(
        Glm4vImageProcessor(size=size),
        tokenizer,
        Glm4vVideoProcessor(size=size),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


def _qwen(
    folder: Path,
    kind: str,
    processor: Any,
    video: Any,
    vision: Part,
    text: Part,
    transposed: str | None = None,
) -> None:
    from transformers import AutoConfig, Qwen2VLImageProcessor

    start, end = "<|vision_start|>", "<|vision_end|>"
    image_pad, video_pad = "<|image_pad|>", "<|video_pad|>"
    tokenizer = build_tokenizer(
        image_pad,
        video_pad,
        start,
        end,
        image_text=f"{start}{image_pad}{end}",
        whole_words=kind.startswith("qwen3_5"),
    )
    config = AutoConfig.for_model(
        kind,
        vision_config=dict(vision),
        text_config={
            **TEXT,
            "vocab_size": VOCABULARY,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
            **text,
        },
        image_token_id=token_id(tokenizer, image_pad),
        video_token_id=token_id(tokenizer, video_pad),
        vision_start_token_id=token_id(tokenizer, start),
        vision_end_token_id=token_id(tokenizer, end),
    )
    write_checkpoint(folder, config, transposed=transposed)
    shape = {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 28 * 28, "longest_edge": 512 * 512},
    }
    pixels = Qwen2VLImageProcessor(**shape)
    processor(
        pixels, tokenizer, video(**shape), chat_template=tokenizer.chat_template
    ).save_pretrained(folder)


_QWEN: Part = {
    "depth": 3,
    "hidden_size": 64,
    "num_heads": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
"""Settings that all vision towers share."""


def _qwen2(folder: Path) -> None:
    from transformers import Qwen2VLProcessor, Qwen2VLVideoProcessor

    vision: Part = {**_QWEN, "embed_dim": 64, "mlp_ratio": 2, "patch_size": 14}
    _qwen(folder, "qwen2_vl", Qwen2VLProcessor, Qwen2VLVideoProcessor, vision, {})


def _qwen2_5(folder: Path) -> None:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor

    vision: Part = {
        **_QWEN,
        "intermediate_size": 96,
        "out_hidden_size": 64,
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [2],
    }
    _qwen(folder, "qwen2_5_vl", Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, vision, {})


_QWEN3: Part = {
    **_QWEN,
    "intermediate_size": 96,
    "out_hidden_size": 64,
    "patch_size": 16,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [0, 1],
}
_QWEN3_TEXT: Part = {
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
_EXPERTS: Part = {
    "num_experts": 4,
    # All of them: a rounded feature may be routed to other experts by another model runner.
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}


def _qwen3(folder: Path) -> None:
    from transformers import Qwen3VLProcessor, Qwen3VLVideoProcessor

    _qwen(folder, "qwen3_vl", Qwen3VLProcessor, Qwen3VLVideoProcessor, _QWEN3, _QWEN3_TEXT)


def _qwen3_moe(folder: Path) -> None:
    from transformers import Qwen3VLProcessor, Qwen3VLVideoProcessor

    text: Part = {**_QWEN3_TEXT, **_EXPERTS}
    kinds = "qwen3_vl_moe", Qwen3VLProcessor, Qwen3VLVideoProcessor
    _qwen(folder, *kinds, _QWEN3, text, transposed=".mlp.experts.")


_QWEN3_5: Part = {**_QWEN3, "deepstack_visual_indexes": []}
_QWEN3_5_TEXT: Part = {
    # vLLM's CPU kernels take linear heads of 64 or 128. The keys and values of 32 tokens take as
    # much room as the state of a linear layer; vLLM would make larger blocks if they took less.
    "head_dim": 128,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}


def _qwen3_5(folder: Path) -> None:
    from transformers import Qwen3VLProcessor, Qwen3VLVideoProcessor

    _qwen(folder, "qwen3_5", Qwen3VLProcessor, Qwen3VLVideoProcessor, _QWEN3_5, _QWEN3_5_TEXT)


def _qwen3_5_moe(folder: Path) -> None:
    from transformers import Qwen3VLProcessor, Qwen3VLVideoProcessor

    # 96 wide, chunked and preempted prefill give other answers; 64 and 128 wide, the same. The
    # cause is taken to be rounding, as in the dense model, but has not been shown.
    text: Part = {**_QWEN3_5_TEXT, **_EXPERTS, "shared_expert_intermediate_size": 64}
    _qwen(folder, "qwen3_5_moe", Qwen3VLProcessor, Qwen3VLVideoProcessor, _QWEN3_5, text)


MROPE_BUILDERS: Mapping[str, Callable[[Path], None]] = {
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "glm4v": lambda folder: _glm(folder, "glm4v", _GLM_TEXT),
    "glm4v_moe": lambda folder: _glm(folder, "glm4v_moe", {**_GLM_TEXT, **_GLM_EXPERTS}),
}
"""Name of a backbone -> writes its model to a folder."""
