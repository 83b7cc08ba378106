"""Model folders of true widths, without weights, and what a checkpoint's config.json determines.

LLaVA-1.5, LLaVA-NeXT and Qwen2.5-VL (7B), and CLIP-L. The language model's depth is an option; all
other sizes are those of the published configs (llava-hf/llava-1.5-7b-hf,
llava-hf/llava-v1.6-vicuna-7b-hf, Qwen/Qwen2.5-VL-7B-Instruct, openai/clip-vit-large-patch14-336).
Such folders are served with ``--load-format dummy``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from vllm_autoprune.ops.dtype import choose_dtype

if TYPE_CHECKING:  # loaded by what writes a folder
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast, ProcessorMixin

_Json = dict[str, object]

TOKENS, WIDTH, CLIP_WIDTH = 576, 4096, 768
"""N, D, and the width of CLIP's joint space."""
HEAD, TOWER_LAYERS = 128, 24
"""The width of an attention head, and the layers of the vision tower."""

VOCABULARY, IMAGE_TOKEN, PAD = 32064, 32000, 32001
_CLIP_VOCABULARY = 49408
SIDE, PATCH = 336, 14
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_VISION: _Json = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "image_size": SIDE,
    "patch_size": PATCH,
    "projection_dim": CLIP_WIDTH,
}
_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
"""Tilings of llava-hf/llava-v1.6-vicuna-7b-hf, (height, width) in pixels."""


def write_llava(
    folder: Path, layers: int, *, tower_layers: int = TOWER_LAYERS, width: int = WIDTH
) -> Path:
    """A LLaVA-1.5 folder for ``--load-format dummy``; returns it.

    ``width``, a multiple of 128, is the language model's; its proportions stay. At full size, 23
    layers of the vision tower (all but the last) precede 32 language layers of width 4096. A layer
    of width 2048 costs a quarter, so 2 tower layers with 4 of those take about the same share.
    """
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaProcessor

    config = LlavaConfig(
        **_configure_llava(layers, tower_layers, width),
        image_seq_length=TOKENS,
        architectures=["LlavaForConditionalGeneration"],
    )
    images = CLIPImageProcessor(**_CROP)
    return _save(folder, config, LlavaProcessor(images, _build_llava_tokenizer(), **_PLACEHOLDERS))


def write_llava_next(folder: Path, layers: int) -> Path:
    """LLaVA-1.6 with Vicuna-7B: LLaVA-1.5's shape, with image tiles; returns the folder."""
    from transformers import LlavaNextConfig, LlavaNextImageProcessor, LlavaNextProcessor

    config = LlavaNextConfig(
        **_configure_llava(layers, TOWER_LAYERS, WIDTH),
        image_grid_pinpoints=_PINPOINTS,
        architectures=["LlavaNextForConditionalGeneration"],
    )
    images = LlavaNextImageProcessor(**_CROP, image_grid_pinpoints=_PINPOINTS)
    tokenizer = _build_llava_tokenizer()
    return _save(folder, config, LlavaNextProcessor(images, tokenizer, **_PLACEHOLDERS))


_CROP: Any = {
    "size": {"shortest_edge": SIDE},
    "crop_size": {"height": SIDE, "width": SIDE},
}
_PLACEHOLDERS: Any = {
    "patch_size": PATCH,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
    "chat_template": _CHAT_TEMPLATE,
}


def _configure_llava(layers: int, tower_layers: int, width: int) -> dict[str, Any]:
    if width % HEAD or not 0 < width <= WIDTH:
        raise ValueError(f"a width of {width}: expected a multiple of {HEAD} up to {WIDTH}")
    text: _Json = {
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
    tower: _Json = {"model_type": "clip_vision_model", **_VISION, "num_hidden_layers": tower_layers}
    return {
        "text_config": text,
        "vision_config": tower,
        "image_token_index": IMAGE_TOKEN,
        "pad_token_id": PAD,
        "dtype": "bfloat16",
    }


def _build_llava_tokenizer() -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    special = {0: "<unk>", 1: "<s>", 2: "</s>", IMAGE_TOKEN: "<image>", PAD: "<pad>"}
    known = {3: "USER", 4: "ASSISTANT", 5: ":"}
    return PreTrainedTokenizerFast(
        tokenizer_object=_build_word_tokenizer(VOCABULARY, special, known),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
        model_max_length=4096,
    )


def _save(folder: Path, config: PreTrainedConfig, processor: ProcessorMixin) -> Path:
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def write_clip(folder: Path) -> Path:
    """CLIP-L/14-336 with random weights and its text tower at full size; returns the folder.

    Its vision tower has one layer, because only its last normalisation and projection are used.
    """
    import torch
    from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

    if (folder / "model.safetensors").is_file():
        return folder
    end = _CLIP_VOCABULARY - 1
    text: _Json = {
        "hidden_size": CLIP_WIDTH,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 77,
        "vocab_size": _CLIP_VOCABULARY,
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
    tokenizer = _build_word_tokenizer(_CLIP_VOCABULARY, special, {})
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A {finish}", special_tokens=[(begin, end - 1), (finish, end)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=begin,
        eos_token=finish,
        pad_token=finish,
        unk_token="<unk>",
        model_max_length=77,
    ).save_pretrained(folder)
    return folder


_QWEN_VOCABULARY = 152064
_QWEN_SPECIALS = {
    151643: "<|endoftext|>",
    151644: "<|im_start|>",
    151645: "<|im_end|>",
    151652: "<|vision_start|>",
    151653: "<|vision_end|>",
    151655: "<|image_pad|>",
    151656: "<|video_pad|>",
}
_QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %} {% endfor %}{% endif %}"
    "<|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def write_qwen(folder: Path, layers: int) -> Path:
    """Qwen/Qwen2.5-VL-7B-Instruct; its vision tower at full depth. Returns the folder."""
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLConfig,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "out_hidden_size": 3584,
            "num_heads": 16,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        text_config={
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": layers,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": _QWEN_VOCABULARY,
            "max_position_embeddings": 32768,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [16, 24, 24],
            },
        },
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )
    known = {0: "<unk>", 1: "user", 2: "assistant"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_build_word_tokenizer(_QWEN_VOCABULARY, _QWEN_SPECIALS, known),
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_QWEN_TEMPLATE,
    )
    sizes = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280 * 4}
    cut = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "size": sizes}
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(**cut),
        tokenizer,
        Qwen2VLVideoProcessor(**cut),
        chat_template=_QWEN_TEMPLATE,
    )
    return _save(folder, config, processor)


def _build_word_tokenizer(size: int, special: dict[int, str], known: dict[int, str]) -> Tokenizer:
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


_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The sizes that determine the bytes of a token: a key and a value in every layer."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """2 x layers x KV heads x head dimension x bytes of the dtype."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def formula(self) -> str:
        """The computation in words and numbers."""
        return (
            "prompt tokens x 2 (key, value) "
            f"x {self.layers} layers x {self.kv_heads} KV heads x {self.head_dim} head dimension "
            f"x {self.dtype_bytes} bytes = prompt tokens x {self.bytes_per_token}"
        )


def read_kv_layout(checkpoint: Path, dtype: str | None = None) -> KvLayout:
    """The layout of a checkpoint's Llama, served in ``dtype``, or this machine's."""
    text = _read_config(checkpoint).get_text_config()
    return KvLayout(
        layers=text.num_hidden_layers,
        kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        dtype_bytes=_DTYPE_BYTES[dtype or choose_dtype()],
    )


def count_visual_tokens(checkpoint: Path) -> int:
    """Visual tokens of one image before pruning, N."""
    vision = _read_config(checkpoint).vision_config
    return int(vision.image_size // vision.patch_size) ** 2


def _read_config(checkpoint: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(checkpoint)
