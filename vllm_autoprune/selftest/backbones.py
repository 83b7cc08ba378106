"""Tiny models of every backbone, with real configurations and processors and random weights.

Their answers are meaningless. What is compared is which tokens are kept, their positions, and
log-probabilities with and without pruning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Part = Mapping[str, object]
"""Settings of a part of a model."""

BUILDERS: dict[str, Callable[[Path], None]] = {}
"""Name of a backbone -> writes its model to a folder."""

NEEDED_PACKAGES = {"smolvlm": "num2words"}
"""Backbone -> package that its processor needs and that vLLM does not install."""

WIDTH = 64
"""Width of every tower and language model."""

_WORDS = (
    *("what", "which", "colour", "shape", "is", "the", "a", "of", "in", "on", "left", "right"),
    *("red", "green", "blue", "cat", "dog", "sky", "how", "many", "are", "there", "user", "you"),
)
_CHAT = (
    "{% for m in messages %}{{ m['role'] }} "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %} {% endfor %}"
    "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}you {% endif %}"
)
_TEXT: Part = {
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "vocab_size": 160,
}
_VISION: Part = {
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
_CLIP_NAMES = {"vision_tower.": "vision_tower.vision_model."}


def build(name: str, folder: Path) -> Path:
    """Write the tiny model of one backbone to ``folder``; returns the folder."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BUILDERS[name](folder)
    return folder


def _build_tokenizer(
    *special: str,
    image_text: str | None = None,
    extra: Mapping[str, str] | None = None,
    whole_words: bool = False,
) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words and of special tokens, the first of which is an image's.

    ``image_text`` is the text of an image in the chat template, ``extra`` maps the attribute names
    that processors use to tokens. ``whole_words`` adds the words as tokens too, for a family whose
    tokenizer class splits text by rules of its own.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", "<s>", "</s>", "<unk>", *_WORDS]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(list(special))
    if whole_words:
        tokenizer.add_tokens([AddedToken(word, single_word=True) for word in _WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens=dict(extra or {}),
        chat_template=_CHAT.replace("IMAGE", image_text or special[0]),
    )


def _write_model(
    folder: Path,
    kind: str,
    vision: Part,
    text: Part,
    tokens: Mapping[str, int | list[int]],
    renamed: Mapping[str, str] | None = None,
    transposed: str | None = None,
    **config: object,
) -> None:
    """Write a configuration and random weights, with a spread that makes tokens and layers differ.

    ``tokens`` has the ids of tokens by their names in the configuration. ``renamed`` maps parts of
    weight names in transformers to those in published checkpoints, which hold the weights with
    ``transposed`` in their names with their last two dimensions exchanged.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    parts = {"vision_config": dict(vision), "text_config": {**_TEXT, **text}}
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(kind, **parts, **tokens, **config)
    ).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 or "newline" in name or "class_embedding" in name:
            torch.nn.init.normal_(weight, std=0.15)
    model.to(torch.bfloat16).save_pretrained(folder)
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if transposed is not None and transposed in name:
            weight = weight.transpose(-1, -2).contiguous()
        for ours, published in (renamed or {}).items():
            name = name.replace(ours, published)
        weights[name] = weight
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _ids(tokenizer: PreTrainedTokenizerFast, **tokens: str) -> dict[str, Any]:
    """The ids of tokens, which must be in the vocabulary, by the same names."""
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    assert tokenizer.unk_token_id not in ids.values(), f"one of {tokens} is no token"
    return ids


# ---- M-RoPE: Qwen-VL and GLM-V ----


def _rope(*sections: int, **more: object) -> Part:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*sections], **more}
    return {"rope_parameters": rope}


_MERGING: Part = {
    "depth": 3,
    "hidden_size": WIDTH,
    "num_heads": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
"""Of every vision tower with a patch merger."""

_QWEN3_VISION: Part = {
    **_MERGING,
    "intermediate_size": 96,
    "out_hidden_size": WIDTH,
    "patch_size": 16,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [0, 1],
}
_QWEN3_TEXT: Part = {"head_dim": 32, **_rope(6, 5, 5, mrope_interleaved=True)}
_EXPERTS: Part = {
    "num_experts": 4,
    # All of them: a rounded feature may be routed to other experts by another model runner.
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
_QWEN3_5_VISION: Part = {**_QWEN3_VISION, "deepstack_visual_indexes": []}
_QWEN3_5_TEXT: Part = {
    # vLLM's CPU kernels take linear heads of 64 or 128. The keys and values of 32 tokens take as
    # much room as the state of a linear layer; vLLM would make larger blocks if they took less.
    "head_dim": 128,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    **_rope(6, 5, 5, partial_rotary_factor=0.25, mrope_interleaved=True),
}
_QWENS: Mapping[str, tuple[Part, Part]] = {
    "qwen2_vl": (
        {**_MERGING, "embed_dim": WIDTH, "mlp_ratio": 2, "patch_size": 14},
        _rope(4, 6, 6),
    ),
    "qwen2_5_vl": (
        {
            **_MERGING,
            "intermediate_size": 96,
            "out_hidden_size": WIDTH,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [2],
        },
        _rope(4, 6, 6),
    ),
    "qwen3_vl": (_QWEN3_VISION, _QWEN3_TEXT),
    "qwen3_vl_moe": (_QWEN3_VISION, {**_QWEN3_TEXT, **_EXPERTS}),
    "qwen3_5": (_QWEN3_5_VISION, _QWEN3_5_TEXT),
    # 96 wide, chunked and preempted prefill give other answers; 64 and 128 wide, the same. The
    # cause is taken to be rounding, as in the dense model, but has not been shown.
    "qwen3_5_moe": (
        _QWEN3_5_VISION,
        {**_QWEN3_5_TEXT, **_EXPERTS, "shared_expert_intermediate_size": 64},
    ),
}
"""Vision tower and language model of each."""


def _write_qwen(folder: Path, kind: str) -> None:
    import transformers as hf

    vision, text = _QWENS[kind]
    start, end, image, video = (
        f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")
    )
    tokenizer = _build_tokenizer(
        *(image, video, start, end),
        image_text=f"{start}{image}{end}",
        whole_words=kind.startswith("qwen3_5"),
    )
    ids = _ids(
        tokenizer,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    transposed = ".mlp.experts." if kind == "qwen3_vl_moe" else None
    _write_model(folder, kind, vision, text, ids, transposed=transposed)
    shape = {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 28 * 28, "longest_edge": 512 * 512},
    }
    processor, videos = {
        "qwen2_vl": (hf.Qwen2VLProcessor, hf.Qwen2VLVideoProcessor),
        "qwen2_5_vl": (hf.Qwen2_5_VLProcessor, hf.Qwen2VLVideoProcessor),
    }.get(kind, (hf.Qwen3VLProcessor, hf.Qwen3VLVideoProcessor))
    pixels = hf.Qwen2VLImageProcessor(**shape)
    template = tokenizer.chat_template
    processor(pixels, tokenizer, videos(**shape), chat_template=template).save_pretrained(folder)


BUILDERS |= {name: partial(_write_qwen, kind=name) for name in _QWENS}

_GLM_VISION: Part = {
    **_MERGING,
    "image_size": 224,
    "patch_size": 14,
    "out_hidden_size": WIDTH,
    "intermediate_size": 96,
}
_GLM_TEXT: Part = {"head_dim": 32, **_rope(2, 3, 3, partial_rotary_factor=0.5)}
_GLM_EXPERTS: Part = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "use_qk_norm": False,
}


def _write_glm(folder: Path, kind: str, text: Part) -> None:
    import transformers as hf

    image, video = "<|image|>", "<|video|>"
    edges = [f"<|{edge}_of_{item}|>" for item in ("image", "video") for edge in ("begin", "end")]
    tokenizer = _build_tokenizer(image, video, *edges, image_text=f"{edges[0]}{image}{edges[1]}")
    names = (f"{item}_{edge}_token_id" for item in ("image", "video") for edge in ("start", "end"))
    ids = _ids(
        tokenizer,
        image_token_id=image,
        video_token_id=video,
        **dict(zip(names, edges, strict=True)),
    )
    _write_model(folder, kind, _GLM_VISION, text, ids)
    size = {"shortest_edge": 112 * 112, "longest_edge": 2 * 512 * 512}
    pixels, videos = hf.Glm4vImageProcessor(size=size), hf.Glm4vVideoProcessor(size=size)
    template = tokenizer.chat_template
    hf.Glm4vProcessor(pixels, tokenizer, videos, chat_template=template).save_pretrained(folder)


BUILDERS["glm4v"] = partial(_write_glm, kind="glm4v", text=_GLM_TEXT)
BUILDERS["glm4v_moe"] = partial(_write_glm, kind="glm4v_moe", text={**_GLM_TEXT, **_GLM_EXPERTS})


# ---- tiles, and images of one size ----


_PATCH = 14
"""Pixels across a patch."""


def _square(side: int) -> Part:
    """A tower for square images."""
    return {"image_size": side, "patch_size": _PATCH, **_VISION}


def _siglip(side: int) -> Part:
    return {"model_type": "siglip_vision_model", "vision_use_head": False, **_square(side)}


def _register(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """Register what writes the backbone that its name says."""
    BUILDERS[function.__name__.removeprefix("_write_")] = function
    return function


@_register
def _write_llava_next(folder: Path) -> None:
    import transformers as hf

    tokenizer = _build_tokenizer("<image>")
    side = 56
    pinpoints = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
    _write_model(
        folder,
        "llava_next",
        vision={"model_type": "clip_vision_model", **_square(side)},
        text={"model_type": "llama"},
        tokens=_ids(tokenizer, image_token_index="<image>"),
        renamed=_CLIP_NAMES,
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-2,
    )
    pixels = hf.LlavaNextImageProcessor(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_grid_pinpoints=pinpoints,
    )
    hf.LlavaNextProcessor(
        pixels,
        tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


@_register
def _write_llava_onevision(folder: Path) -> None:
    import transformers as hf

    tokenizer = _build_tokenizer("<image>", "<video>")
    side = 56
    pinpoints = [[side * i, side * j] for i in range(1, 7) for j in range(1, 7)]
    _write_model(
        folder,
        "llava_onevision",
        vision=_siglip(side),
        text={"model_type": "qwen2"},
        tokens=_ids(tokenizer, image_token_index="<image>", video_token_index="<video>"),
        renamed=_CLIP_NAMES,
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    size = {"height": side, "width": side}
    hf.LlavaOnevisionProcessor(
        hf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pinpoints),
        tokenizer,
        hf.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=(side // _PATCH) ** 2,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


@_register
def _write_internvl(folder: Path) -> None:
    import transformers as hf

    special = {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    }
    tokenizer = _build_tokenizer(*special.values(), extra=special)
    side = 56
    _write_model(
        folder,
        "internvl",
        vision={"image_size": [side] * 2, "patch_size": [_PATCH] * 2, "num_channels": 3, **_VISION},
        text={"model_type": "qwen2"},
        tokens=_ids(tokenizer, image_token_id="<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
        vision_feature_layer=-1,
    )
    size = {"height": side, "width": side}
    hf.InternVLProcessor(
        hf.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=6),
        tokenizer,
        hf.InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


@_register
def _write_gemma3(folder: Path) -> None:
    import transformers as hf

    special = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    newlines = ["\n" * count for count in range(1, 5)]
    tokenizer = _build_tokenizer(*special.values(), *newlines, extra=special)
    side = 112
    _write_model(
        folder,
        "gemma3",
        vision=_siglip(side),
        text={
            "model_type": "gemma3_text",
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 512,
        },
        tokens=_ids(tokenizer, **{f"{name}_index": token for name, token in special.items()}),
        renamed=_CLIP_NAMES,
        mm_tokens_per_image=16,
    )
    hf.Gemma3Processor(
        hf.Gemma3ImageProcessor(size={"height": side, "width": side}),
        tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=16,
    ).save_pretrained(folder)


def _write_idefics(
    folder: Path, kind: str, side: int, scale: int, pixels: Any, processor: Any, *processors: object
) -> None:
    """Write a model with tiles ``side`` pixels wide, ``scale`` patches across a token."""
    across = 2
    tiles = [f"<row_{i}_col_{j}>" for i in range(1, across + 1) for j in range(1, across + 1)]
    around = "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
    tokenizer = _build_tokenizer("<image>", *around, *tiles, "\n", "\n\n")
    _write_model(
        folder,
        kind,
        vision=_square(side),
        text={"model_type": "llama"},
        tokens=_ids(tokenizer, image_token_id="<image>"),
        pad_token_id=0,
        scale_factor=scale,
    )
    processor(
        pixels(size={"longest_edge": across * side}, max_image_size={"longest_edge": side}),
        tokenizer,
        *processors,
        image_seq_len=(side // _PATCH // scale) ** 2,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


@_register
def _write_idefics3(folder: Path) -> None:
    import transformers as hf

    _write_idefics(folder, "idefics3", 84, 2, hf.Idefics3ImageProcessor, hf.Idefics3Processor)


@_register
def _write_smolvlm(folder: Path) -> None:
    import transformers as hf

    # As in SmolVLM2-2.2B, whose tiles are 384 pixels wide, patches do not fill a tile.
    side = 9 * _PATCH + 4
    videos = hf.SmolVLMVideoProcessor(
        video_sampling={"fps": 1, "max_frames": 64, "video_size": {"longest_edge": side}}
    )
    classes = hf.SmolVLMImageProcessor, hf.SmolVLMProcessor
    _write_idefics(folder, "smolvlm", side, 3, *classes, videos)
