"""Tiny models of GLM-4.1V and GLM-4.5V, with real configurations and processors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from vllm_autoprune.selftest.tiny_models import (
    TEXT,
    VOCABULARY,
    build_tokenizer,
    token_id,
    write_checkpoint,
)

Part = Mapping[str, object]

_VISION: Part = {
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
_TEXT: Part = {
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
_EXPERTS: Part = {
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
        vision_config=dict(_VISION),
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


def _glm4v(folder: Path) -> None:
    _glm(folder, "glm4v", _TEXT)


def _glm4v_moe(folder: Path) -> None:
    _glm(folder, "glm4v_moe", {**_TEXT, **_EXPERTS})


GLM_BUILDERS: Mapping[str, Callable[[Path], None]] = {
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v_moe,
}
"""Name of a backbone -> writes its model to a folder."""
