"""Tiny models of every backbone, with real configurations and processors and random weights.

Their answers are meaningless. What is compared is which tokens are kept, their positions, and
log-probabilities with and without pruning. ``tiny_models.toml`` says what is written of each.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_autoprune.backbones import find_config_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WIDTH = 64
"""Width of every tower and language model."""

NEEDED_PACKAGES = {"smolvlm": "num2words"}
"""Backbone -> package that its processor needs and that vLLM does not install."""

_WORDS = (
    "what",
    "which",
    "colour",
    "shape",
    "is",
    "the",
    "a",
    "of",
    "in",
    "on",
    "left",
    "right",
    "red",
    "green",
    "blue",
    "cat",
    "dog",
    "sky",
    "how",
    "many",
    "are",
    "there",
    "user",
    "you",
)
_ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj")
"""Weights of an attention layer, which some checkpoints have joined into one."""

_CHAT = (
    "{% for m in messages %}{{ m['role'] }} "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}IMAGE{% elif p['type'] == 'video' %}VIDEO"
    "{% else %}{{ p['text'] }}{% endif %} {% endfor %}"
    "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}you {% endif %}"
)
_TEXT: Mapping[str, object] = {
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
"""Configuration of every language model."""

ORIGINAL = "transformers"
"""Folder of a model that transformers can read, within the same model as it is published."""

_Row = dict[str, Any]


def _merge(row: _Row, changes: _Row) -> _Row:
    """Copy ``row`` with values from ``changes``; tables are merged in the same way."""
    merged = {**row, **changes}
    for key in row.keys() & changes.keys():
        if isinstance(row[key], dict):
            merged[key] = _merge(row[key], changes[key])
    return merged


def _read_rows() -> dict[str, _Row]:
    rows = tomllib.loads(
        Path(__file__).with_name("tiny_models.toml").read_text(encoding="utf-8")
    )
    for name, row in rows.items():
        if like := row.pop("like", None):
            rows[name] = _merge(rows[like], row)
    return {name: row for name, row in rows.items() if not name.startswith("_")}


TINY_MODELS: Mapping[str, _Row] = _read_rows()
"""Row of ``tiny_models.toml`` for each backbone."""


def build(
    name: str, folder: Path, changes: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Write the tiny model of one backbone to ``folder``; returns the folder.

    ``changes`` are other values of its row.
    """
    row = _change_row(name, changes)
    tokenizer = _make_tokenizer(row)
    config = _make_config(name, row, tokenizer)
    _write_model(config, folder)
    _write_processor(row, tokenizer, folder)
    if "published" in row:
        # Published checkpoints have some weights in another form.
        shutil.copytree(folder, folder / ORIGINAL)
        _publish_config(row, config, folder)
    _publish_weights(row, folder)
    return folder


def write_processor(name: str, folder: Path, changes: Mapping[str, Any]) -> Path:
    """Write configuration, processor and tokenizer of :func:`build`, without weights."""
    from transformers.models.auto import modeling_auto

    row = _change_row(name, changes)
    tokenizer = _make_tokenizer(row)
    config = _make_config(name, row, tokenizer)
    classes = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    config.architectures = [classes[config.model_type]]
    config.save_pretrained(folder)
    _write_processor(row, tokenizer, folder)
    if "published" in row:
        _publish_config(row, config, folder)
    return folder


def _change_row(name: str, changes: Mapping[str, Any]) -> _Row:
    """The row of ``name`` with ``changes``: a copy, as configurations change their arguments."""
    row = copy.deepcopy(_merge(TINY_MODELS[name], dict(changes)))
    if "tiles" in row:
        for part in ("config", "pixels"):
            row.setdefault(part, {})["image_grid_pinpoints"] = row["tiles"]
    return row


def _write_processor(row: _Row, tokenizer: Any, folder: Path) -> None:
    import transformers

    def make(part: str, **more: object) -> Any:
        settings = {**row[part], **more}
        return getattr(transformers, settings.pop("class"))(**settings)

    parts = {"image_processor": make("pixels"), "tokenizer": tokenizer}
    if "processor" not in row:  # vLLM has a class of its own
        for part in parts.values():
            part.save_pretrained(folder)
        return
    if "videos" in row:
        parts["video_processor"] = make("videos")
    if "audio" in row:
        parts["feature_extractor"] = make("audio")
    processor = make("processor", **parts, chat_template=tokenizer.chat_template)
    processor.save_pretrained(folder)


def _publish_config(row: _Row, config: Any, folder: Path) -> None:
    """Write config.json as published checkpoints have it."""
    from transformers import AutoConfig

    if outer := row.get("thinker_of"):
        thinker = config.to_dict()
        config = AutoConfig.for_model(outer, thinker_config=thinker)
        config.save_pretrained(folder)
    file = folder / "config.json"
    published = json.loads(file.read_text())
    for ours, theirs in row.get("renamed_parts", {}).items():
        published[theirs] = published.pop(ours)
    published = _merge(published, row["published"])
    if name := row.get("vllm_config"):
        published = {**published.pop("text_config"), **published}
        from vllm.transformers_utils import configs

        _register_config(getattr(configs, name))
    if name := row.get("stand_in"):
        from vllm_autoprune.selftest import configurations

        _register_config(getattr(configurations, name))
    file.write_text(json.dumps(published))


def _register_config(config: type[PreTrainedConfig]) -> None:
    """Register a configuration that vLLM takes from the code of checkpoints otherwise."""
    from transformers import AutoConfig

    AutoConfig.register(config.model_type, config, exist_ok=True)


def _make_tokenizer(row: _Row) -> Any:
    """A tokenizer of whole words and of the model's special tokens."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *_WORDS]
    ids = {word: index for index, word in enumerate(words)}
    if start := row.get("first_id"):
        ids |= {token: start + i for i, token in enumerate(row["tokens"])}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(row["tokens"])
    if row.get("whole_words"):
        tokenizer.add_tokens([AddedToken(word, single_word=True) for word in _WORDS])
    image = row.get("image_text", row["tokens"][0])
    video = image.replace("image", "video")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens=row.get("attributes", {}),
        chat_template=_CHAT.replace("IMAGE", image).replace("VIDEO", video),
    )


def _make_config(name: str, row: _Row, tokenizer: Any) -> Any:
    ids = {
        field: tokenizer.convert_tokens_to_ids(token)
        for field, token in row["ids"].items()
    }
    unknown = tokenizer.unk_token_id
    assert unknown not in ids.values(), f"one of {row['ids']} is no token"
    config_class: Any = find_config_class(row.get("model_type", name))
    return config_class(
        vision_config=row["vision"],
        text_config={**_TEXT, **row["text"]},
        **{**row.get("config", {}), **ids},
    )


def _write_model(config: Any, folder: Path) -> None:
    """Random weights, whose spread makes tokens and layers differ."""
    import torch
    from transformers import AutoModelForImageTextToText

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).eval()
        for weight_name, weight in model.named_parameters():
            is_row = "newline" in weight_name or "class_embedding" in weight_name
            if weight.dim() > 1 or is_row:
                torch.nn.init.normal_(weight, std=0.15)
    for part in (*model.parameters(), *model.buffers()):
        if part.is_floating_point():  # rotations of Llama 4's tower are complex
            part.data = part.data.bfloat16()
    model.save_pretrained(folder)


def _publish_weights(row: _Row, folder: Path) -> None:
    """Drop, pad, join, transpose, rename and add weights as published checkpoints have them."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    file.unlink()
    weights = {
        name: _pad(row, name, weight)
        for name, weight in weights.items()
        if not re.search(row.get("dropped", "(?!)"), name)
    }
    if "joined" in row:
        for name in [n for n in weights if f"{row['joined']}q_proj" in n]:
            parts = [name.replace("q_proj", part) for part in _ATTENTION_PARTS]
            joined = torch.cat([weights.pop(part) for part in parts])
            weights[name.replace("q_proj", "qkv")] = joined
    published = {}
    for name, weight in weights.items():
        if "transposed" in row and row["transposed"] in name:
            weight = weight.transpose(-1, -2).contiguous()
        for ours, theirs in row.get("renamed", {}).items():
            name = re.sub(ours, theirs, name)
        published[row.get("weight_prefix", "") + name] = weight
    draw = torch.Generator().manual_seed(0)
    for pattern, shape in row.get("added", {}).items():
        for layer in ("0", "1") if "*" in pattern else ("",):
            noise = 0.15 * torch.randn(shape, generator=draw)
            name = pattern.replace("*", layer)
            published[name] = (noise if len(shape) > 1 else 1 + noise).bfloat16()
    file = folder / row.get("weight_file", file.name)
    file.parent.mkdir(exist_ok=True)
    save_file(published, file, {"format": "pt"})


def _pad(row: _Row, name: str, weight: Any) -> Any:
    """The weight in the first places of zeros of its shape in published checkpoints."""
    for pattern, shape in row.get("padded", {}).items():
        if re.search(pattern, name):
            padded = weight.new_zeros(shape)
            padded[tuple(map(slice, weight.shape))] = weight
            return padded
    return weight
