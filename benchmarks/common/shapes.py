"""Model folders of true widths without weights, and sizes that follow from a config.json.

LLaVA-1.5, LLaVA-NeXT and Qwen2.5-VL (7B), and CLIP-L. The language model's depth is an option; all
other sizes are those of the published configs, in ``shapes.toml``. Such folders are served with
``--load-format dummy``.
"""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_autoprune.backbones import find_backbone
from vllm_autoprune.ops.dtype import choose_dtype

if TYPE_CHECKING:  # imported at run time only by functions that write a folder
    from tokenizers.processors import PostProcessor
    from transformers import PreTrainedTokenizerFast

TOKENS = 576
_WIDTH = 4096
"""N and D of an image of LLaVA-1.5."""
_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
"""Tilings of llava-hf/llava-v1.6-vicuna-7b-hf, (height, width) in pixels."""


def write_shape(
    name: str,
    folder: Path,
    layers: int,
    *,
    tower_layers: int | None = None,
    width: int = _WIDTH,
) -> Path:
    """Write a folder of ``llava-1.5-7b``, ``llava-next-7b`` or ``qwen2.5-vl-7b``; returns its path.

    ``width``, a multiple of 128 (the width of a head), replaces the 4096 of LLaVA's language model;
    its proportions stay. At full size, 23 layers of the vision tower (all but the last) precede 32
    language layers of width 4096. A layer of width 2048 costs a quarter, so 2 tower layers before 4
    such layers take about the same share.
    """
    import transformers

    shape = read_shape("qwen" if name.startswith("qwen") else "llava", layers)
    text = shape["config"]["text_config"]
    pixels = shape["image_processor"]
    for size in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    ):
        text[size] = text[size] * width // _WIDTH
    if tower_layers is not None:
        shape["config"]["vision_config"]["num_hidden_layers"] = tower_layers
    tokenizer = _build_tokenizer(shape, text["vocab_size"])
    config: transformers.PreTrainedConfig
    processor: transformers.ProcessorMixin
    match name:
        case "llava-1.5-7b":
            config = transformers.LlavaConfig(
                **shape["config"],
                image_seq_length=TOKENS,
                architectures=["LlavaForConditionalGeneration"],
            )
            images = transformers.CLIPImageProcessor(**pixels)
            processor = transformers.LlavaProcessor(
                images, tokenizer, **shape["processor"]
            )
        case "llava-next-7b":
            config = transformers.LlavaNextConfig(
                **shape["config"],
                image_grid_pinpoints=_PINPOINTS,
                architectures=["LlavaNextForConditionalGeneration"],
            )
            tiles = transformers.LlavaNextImageProcessor(
                **pixels, image_grid_pinpoints=_PINPOINTS
            )
            processor = transformers.LlavaNextProcessor(
                tiles, tokenizer, **shape["processor"]
            )
        case _:
            config = transformers.Qwen2_5_VLConfig(**shape["config"])
            processor = transformers.Qwen2_5_VLProcessor(
                transformers.Qwen2VLImageProcessor(**pixels),
                tokenizer,
                transformers.Qwen2VLVideoProcessor(**pixels),
                chat_template=shape["tokenizer"]["chat_template"],
            )
    config.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def write_clip(folder: Path) -> Path:
    """Write CLIP-L/14-336 with random weights and a full-size text tower; returns the folder.

    Its vision tower has one layer, because only its last normalisation and projection are used.
    """
    import torch
    from tokenizers.processors import TemplateProcessing
    from transformers import CLIPConfig, CLIPModel

    if (folder / "model.safetensors").is_file():
        return folder
    shape = read_shape("clip")
    text = read_shape("clip")["text_config"]
    vision = {**read_shape("llava")["config"]["vision_config"], "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=text["projection_dim"]
    )
    CLIPModel(config).to(torch.bfloat16).save_pretrained(folder)
    begin = shape["tokenizer"]["bos_token"]
    end = shape["tokenizer"]["eos_token"]
    ends = [(begin, text["bos_token_id"]), (end, text["eos_token_id"])]
    template = TemplateProcessing(single=f"{begin} $A {end}", special_tokens=ends)
    _build_tokenizer(shape, text["vocab_size"], template).save_pretrained(folder)
    return folder


def read_shape(name: str, layers: int | None = None) -> dict[str, Any]:
    """Read a table of ``shapes.toml``; ``layers`` replaces the depth of the language model."""
    shape = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())[name]
    if layers is not None:
        shape["config"]["text_config"]["num_hidden_layers"] = layers
    assert isinstance(shape, dict)
    return shape


def _build_tokenizer(
    shape: dict[str, Any], size: int, post_processor: PostProcessor | None = None
) -> PreTrainedTokenizerFast:
    """A word tokenizer: one token for each of ``w0``, ``w1``, ...

    Words in angle brackets are special tokens. Every id has a text, because dummy weights may emit
    any id.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    vocabulary = dict(shape["words"])
    fixed = set(vocabulary.values())
    free = (i for i in range(size) if i not in fixed)
    vocabulary |= {f"w{number}": i for number, i in enumerate(free)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(
        [word for word in shape["words"] if word.startswith("<")]
    )
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **shape["tokenizer"])


def draw_words(count: int, number: int, vocabulary: int = 31_000) -> str:
    """``count`` words of one token each; texts of different ``number`` share no prefix."""
    generator = random.Random(number)
    head = [number % 1000, number // 1000]
    tail = [generator.randrange(1000, vocabulary) for _ in range(count - len(head))]
    return " ".join(f"w{i}" for i in (*head, *tail))


def count_kv_bytes(checkpoint: Path, dtype: str | None = None) -> int:
    """Bytes of one token's keys and values in all layers, in ``dtype`` or this machine's dtype.

    They are 2 (key, value) x layers x width of KV heads x bytes of a number.
    """
    shape = find_backbone(str(checkpoint))
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype or choose_dtype()]
    return 2 * shape.layers * shape.kv_width * size


def count_visual_tokens(checkpoint: Path) -> int:
    """Visual tokens of one image before pruning, N."""
    return find_backbone(str(checkpoint)).tokens
