"""Model folder of Qwen2.5-VL-7B's widths, without weights, for ``--load-format dummy``."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.shapes import build_word_tokenizer

QWEN_VOCABULARY = 152064
QWEN_SPECIALS = {
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

    folder.mkdir(parents=True, exist_ok=True)
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
            "vocab_size": QWEN_VOCABULARY,
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
    config.save_pretrained(folder)
    known = {0: "<unk>", 1: "user", 2: "assistant"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_word_tokenizer(QWEN_VOCABULARY, QWEN_SPECIALS, known),
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_QWEN_TEMPLATE,
    )
    sizes = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280 * 4}
    cut = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "size": sizes}
    Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(**cut),
        tokenizer,
        Qwen2VLVideoProcessor(**cut),
        chat_template=_QWEN_TEMPLATE,
    ).save_pretrained(folder)
    return folder
