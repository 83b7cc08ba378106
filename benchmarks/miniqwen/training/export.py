"""Writer of the trained model as a Hugging Face checkpoint that transformers and vLLM load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from benchmarks.minillava.layout import PATCH
from benchmarks.minillava.render import PIXEL_MEAN, PIXEL_STD
from benchmarks.minillava.vocabulary import token_id
from benchmarks.miniqwen.sizes import MAX_TOKENS, MERGE, TOKEN
from benchmarks.miniqwen.vocabulary import (
    END,
    IMAGE_TOKEN,
    PAD,
    TURN,
    VIDEO_TOKEN,
    VISION_END,
    VISION_START,
)

# An answer follows a space, as in training: the same answer in a request is the same tokens then.
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    f"{{{{- '{TURN}' + message['role'] + '\\n' -}}}}"
    "{%- if message['role'] == 'assistant' -%}{{- ' ' -}}{%- endif -%}"
    "{%- if message['content'] is string -%}{{- message['content'] | trim -}}"
    "{%- else -%}"
    "{%- for part in message['content'] if part['type'] == 'image' -%}"
    f"{{{{- '{VISION_START}{IMAGE_TOKEN}{VISION_END}' -}}}}{{%- endfor -%}}"
    "{%- for part in message['content'] if part['type'] == 'text' -%}"
    "{{- part['text'] | trim -}}{%- endfor -%}"
    "{%- endif -%}"
    f"{{{{- '{END}\\n' -}}}}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{TURN}assistant\\n' -}}}}{{%- endif -%}}"
)


def build_processor(tokenizer: Tokenizer) -> Qwen3VLProcessor:
    """The processor of the checkpoint."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        model_max_length=4096,
        extra_special_tokens={
            "image_token": IMAGE_TOKEN,
            "video_token": VIDEO_TOKEN,
            "vision_start_token": VISION_START,
            "vision_end_token": VISION_END,
        },
    )
    shape = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": TOKEN * TOKEN, "longest_edge": MAX_TOKENS * TOKEN * TOKEN},
        "image_mean": list(PIXEL_MEAN),
        "image_std": list(PIXEL_STD),
    }
    return Qwen3VLProcessor(
        Qwen2VLImageProcessor(**shape),
        wrapped,
        Qwen3VLVideoProcessor(**shape),
        chat_template=_CHAT_TEMPLATE,
    )


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_checkpoint(
    folder: Path, model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer
) -> None:
    """Write weights in bf16, configuration, tokenizer and processor."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous().clone()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding table
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, object] = model.config.to_dict()
    config |= {"architectures": ["Qwen3VLForConditionalGeneration"], "dtype": "bfloat16"}
    _write_json(folder / "config.json", config)
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    generation: dict[str, object] = {"do_sample": False, "max_new_tokens": 8}
    ids = {"eos_token_id": end, "pad_token_id": pad}
    _write_json(folder / "generation_config.json", generation | ids)
    build_processor(tokenizer).save_pretrained(folder)
