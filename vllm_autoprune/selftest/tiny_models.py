"""Parts of tiny random models: dimensions, a tokenizer of whole words, a checkpoint writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

WORDS = (
    *("what", "which", "colour", "shape", "is", "the", "a", "of", "in", "on", "left", "right"),
    *("red", "green", "blue", "cat", "dog", "sky", "how", "many", "are", "there", "user", "you"),
)
CHAT = (
    "{% for m in messages %}{{ m['role'] }} "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %} {% endfor %}"
    "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}you {% endif %}"
)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
VOCABULARY = 160

NO_NAMES: Mapping[str, str] = {}
CLIP_NAMES: Mapping[str, str] = {"vision_tower.": "vision_tower.vision_model."}


def build_tokenizer(
    image: str,
    *special: str,
    image_text: str | None = None,
    extra: Mapping[str, str] | None = None,
    whole_words: bool = False,
) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words; ``image`` and ``special`` are added as special tokens.

    ``image_text`` is the text of an image in the chat template, ``extra`` maps the attribute names
    that processors use to tokens. ``whole_words`` adds the words as tokens too, for a family whose
    tokenizer class splits text by rules of its own.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([image, *special])
    if whole_words:
        tokenizer.add_tokens([AddedToken(word, single_word=True) for word in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens=dict(extra or {}),
        chat_template=CHAT.replace("IMAGE", image_text or image),
    )


def token_id(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    """The id of one token, which must be in the vocabulary."""
    number = tokenizer.convert_tokens_to_ids(text)
    assert isinstance(number, int) and number != tokenizer.unk_token_id, f"{text!r} is no token"
    return number


def write_checkpoint(
    folder: Path,
    config: PreTrainedConfig,
    renamed: Mapping[str, str] = NO_NAMES,
    transposed: str | None = None,
) -> None:
    """Write random weights for a configuration, with a spread that makes tokens and layers differ.

    ``renamed`` maps parts of weight names in transformers to those in published checkpoints, which
    hold the weights with ``transposed`` in their names with their last two dimensions exchanged.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_config(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 or "newline" in name or "class_embedding" in name:
            torch.nn.init.normal_(weight, std=0.15)
    model.to(torch.bfloat16).save_pretrained(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for ours, published in renamed.items():
        weights = {name.replace(ours, published): weight for name, weight in weights.items()}
    if transposed is not None:
        weights = {
            name: weight.transpose(-1, -2).contiguous() if transposed in name else weight
            for name, weight in weights.items()
        }
    save_file(weights, file, {"format": "pt"})
