"""Writer of trained modules as Hugging Face checkpoints, with the tensor names of llava-hf."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import CLIPModel, LlamaForCausalLM

from benchmarks.minillava.layout import PATCH, Canvas
from benchmarks.minillava.render import PIXEL_MEAN, PIXEL_STD
from benchmarks.minillava.vocabulary import (
    BEGIN,
    CLIP_BEGIN,
    CLIP_END,
    CLIP_LENGTH,
    END,
    IMAGE_TOKEN,
    PAD,
    UNKNOWN,
    token_id,
)

Json = dict[str, object]

_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- message['role'].upper() + ': ' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}"
    "{%- for part in message['content'] if part['type'] == 'image' -%}"
    "{{- '<image>\\n' -}}{%- endfor -%}"
    "{%- for part in message['content'] if part['type'] == 'text' -%}"
    "{{- part['text'] -}}{%- endfor -%}"
    "{%- endif -%}"
    "{{- '</s>' if message['role'] == 'assistant' else ' ' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"
)


def _bf16_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {
        prefix + name: value.detach().to(torch.bfloat16).contiguous().clone()
        for name, value in module.state_dict().items()
        if not name.endswith("position_ids")
    }


def _image_processor(canvas: Canvas) -> Json:
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": canvas.image},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": canvas.image, "width": canvas.image},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(PIXEL_MEAN),
        "image_std": list(PIXEL_STD),
        "do_convert_rgb": True,
    }


def _write_json(folder: Path, name: str, content: Json) -> None:
    (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _write_clip(folder: Path, canvas: Canvas, clip: CLIPModel, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_bf16_tensors(clip, ""), folder / "model.safetensors", metadata={"format": "pt"})
    config: Json = clip.config.to_dict()
    config |= {"architectures": ["CLIPModel"], "dtype": "bfloat16", "autoprune_relevance_sign": 1}
    _write_json(folder, "config.json", config)
    _write_json(folder, "preprocessor_config.json", _image_processor(canvas))
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": CLIP_BEGIN} | dict.fromkeys(
        ("eos_token", "pad_token", "unk_token"), CLIP_END
    )
    settings: Json = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    _write_json(folder, "tokenizer_config.json", settings | {"model_max_length": CLIP_LENGTH})


def _llava_config(
    canvas: Canvas, clip: CLIPModel, model: LlamaForCausalLM, tokenizer: Tokenizer
) -> Json:
    vision: Json = clip.config.vision_config.to_dict()
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": "bfloat16",
        "image_seq_length": canvas.patches,
        "image_token_index": token_id(tokenizer, IMAGE_TOKEN),
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]},
        "vision_config": vision | {"model_type": "clip_vision_model"},
    }


def write_checkpoint(
    out: Path,
    canvas: Canvas,
    clip: CLIPModel,
    projector: nn.Module,
    model: LlamaForCausalLM,
    clip_tokenizer: Tokenizer,
    language_tokenizer: Tokenizer,
) -> None:
    """Write `out/llava` and `out/clip`, which contain the same vision tower."""
    _write_clip(out / "clip", canvas, clip, clip_tokenizer)
    folder = out / "llava"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _bf16_tensors(clip.vision_model, "vision_tower.vision_model.")
    tensors |= _bf16_tensors(projector, "multi_modal_projector.")
    tensors |= _bf16_tensors(model, "language_model.")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder, "config.json", _llava_config(canvas, clip, model, language_tokenizer))
    ids = {
        f"{name}_token_id": token_id(language_tokenizer, token)
        for name, token in (("bos", BEGIN), ("eos", END), ("pad", PAD))
    }
    _write_json(folder, "generation_config.json", {"do_sample": False, "max_new_tokens": 8, **ids})
    language_tokenizer.save(str(folder / "tokenizer.json"))
    tokens: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "LlavaProcessor",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "extra_special_tokens": {"image_token": IMAGE_TOKEN},
        "model_max_length": 2048,
    }
    _write_json(folder, "tokenizer_config.json", tokens)
    processor: Json = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE_TOKEN,
        "num_additional_image_tokens": 1,
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "image_processor": _image_processor(canvas),
    }
    _write_json(folder, "processor_config.json", processor)
    _write_json(
        folder,
        "preprocessor_config.json",
        _image_processor(canvas) | {"processor_class": "LlavaProcessor"},
    )
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
