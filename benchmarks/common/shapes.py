"""Model folders of true widths, without weights: LLaVA-1.5 and LLaVA-NeXT (7B), CLIP-L.

The language model's depth is an option; all other sizes are those of the published configs
(llava-hf/llava-1.5-7b-hf, llava-hf/llava-v1.6-vicuna-7b-hf, openai/clip-vit-large-patch14-336).
Such folders are served with ``--load-format dummy``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

Json = dict[str, object]

TOKENS, WIDTH, CLIP_WIDTH = 576, 4096, 768
"""N, D, and the width of CLIP's joint space."""
HEAD, TOWER_LAYERS = 128, 24
"""The width of an attention head, and the layers of the vision tower."""

VOCABULARY, IMAGE_TOKEN, PAD = 32064, 32000, 32001
CLIP_VOCABULARY = 49408
SIDE, PATCH = 336, 14
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_VISION: Json = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": TOWER_LAYERS,
    "num_attention_heads": 16,
    "image_size": SIDE,
    "patch_size": PATCH,
    "projection_dim": CLIP_WIDTH,
}
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
"""Tilings of llava-hf/llava-v1.6-vicuna-7b-hf, (height, width) in pixels."""

_IMAGE_PROCESSOR: Json = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": SIDE},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": SIDE, "width": SIDE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_convert_rgb": True,
}


def write_llava(
    folder: Path, layers: int, *, tower_layers: int = TOWER_LAYERS, width: int = WIDTH
) -> Path:
    """A LLaVA-1.5 folder for ``--load-format dummy``; returns it.

    ``width``, a multiple of 128, is the language model's; its proportions stay. At full size, 23
    layers of the vision tower (all but the last) precede 32 language layers of width 4096. A layer
    of width 2048 costs a quarter, so 2 tower layers with 4 of those take about the same share.
    """
    if width % HEAD or not 0 < width <= WIDTH:
        raise ValueError(f"a width of {width}: expected a multiple of {HEAD} up to {WIDTH}")
    folder.mkdir(parents=True, exist_ok=True)
    text: Json = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 11008 * width // WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": width // HEAD,
        "num_key_value_heads": width // HEAD,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": PAD,
    }
    config: Json = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": "bfloat16",
        "image_seq_length": TOKENS,
        "image_token_index": IMAGE_TOKEN,
        "pad_token_id": PAD,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "tie_word_embeddings": False,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": text,
        "vision_config": {
            "model_type": "clip_vision_model",
            **_VISION,
            "num_hidden_layers": tower_layers,
        },
    }
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    _write(folder / "preprocessor_config.json", _IMAGE_PROCESSOR)
    processor: Json = {
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "image_processor": _IMAGE_PROCESSOR,
    }
    _write(folder / "processor_config.json", processor)
    special = {0: "<unk>", 1: "<s>", 2: "</s>", IMAGE_TOKEN: "<image>", PAD: "<pad>"}
    tokenizer = build_word_tokenizer(VOCABULARY, special, {3: "USER", 4: "ASSISTANT", 5: ":"})
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "LlavaProcessor",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "extra_special_tokens": {"image_token": "<image>"},
        "model_max_length": 4096,
    }
    _write(folder / "tokenizer_config.json", tokenizer_config)
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    return folder


def write_clip(folder: Path) -> Path:
    """CLIP-L/14-336 with random weights and its text tower at full size; returns the folder.

    Its vision tower has one layer, because only its last normalisation and projection are used.
    """
    import torch
    from transformers import CLIPConfig, CLIPModel

    if (folder / "model.safetensors").is_file():
        return folder
    end = CLIP_VOCABULARY - 1
    text: Json = {
        "hidden_size": CLIP_WIDTH,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 77,
        "vocab_size": CLIP_VOCABULARY,
        "projection_dim": CLIP_WIDTH,
        "bos_token_id": end - 1,
        "eos_token_id": end,
        "pad_token_id": end,
    }
    torch.manual_seed(0)
    vision = {**_VISION, "num_hidden_layers": 1}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=CLIP_WIDTH)
    CLIPModel(config).to(torch.bfloat16).save_pretrained(folder)
    begin, finish = "<|startoftext|>", "<|endoftext|>"
    special = {0: "<unk>", end - 1: begin, end: finish}
    tokenizer = build_word_tokenizer(CLIP_VOCABULARY, special, {})
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A {finish}", special_tokens=[(begin, end - 1), (finish, end)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": finish,
        "pad_token": finish,
        "unk_token": "<unk>",
        "model_max_length": 77,
    }
    _write(folder / "tokenizer_config.json", tokenizer_config)
    return folder


def write_llava_next(folder: Path, layers: int) -> Path:
    """LLaVA-1.6 with Vicuna-7B: LLaVA-1.5's shape, with image tiles; returns the folder."""
    write_llava(folder, layers)
    _edit(
        folder / "config.json",
        {
            "architectures": ["LlavaNextForConditionalGeneration"],
            "model_type": "llava_next",
            "image_grid_pinpoints": PINPOINTS,
            "use_image_newline_parameter": True,
        },
    )
    tiled: Json = {
        "image_processor_type": "LlavaNextImageProcessor",
        "image_grid_pinpoints": PINPOINTS,
        "crop_size": {"height": SIDE, "width": SIDE},
        "do_pad": True,
    }
    pictures = _edit(folder / "preprocessor_config.json", tiled)
    named: Json = {"processor_class": "LlavaNextProcessor"}
    _edit(folder / "processor_config.json", {**named, "image_processor": pictures})
    _edit(folder / "tokenizer_config.json", named)
    return folder


def build_word_tokenizer(size: int, special: dict[int, str], known: dict[int, str]) -> Tokenizer:
    """One token a word: ``w0``, ``w1``, ...; every id has a text, since dummy weights emit any."""
    fixed = {**special, **known}
    free = (i for i in range(size) if i not in fixed)
    vocabulary = {text: i for i, text in fixed.items()}
    vocabulary |= {f"w{number}": i for number, i in enumerate(free)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(list(special.values()))
    return tokenizer


def draw_words(count: int, number: int, vocabulary: int = 31_000) -> str:
    """``count`` words of one token each, unique by number from the start: no prefix is shared."""
    generator = random.Random(number)
    head = [number % 1000, number // 1000]
    tail = [generator.randrange(1000, vocabulary) for _ in range(count - len(head))]
    return " ".join(f"w{i}" for i in (*head, *tail))


def _write(path: Path, content: Json) -> Json:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return content


def _edit(path: Path, changes: Json) -> Json:
    """Replace some fields of a JSON file; returns the new content."""
    return _write(path, json.loads(path.read_text()) | changes)
