"""Checkpoints: where one is, and LLaVA-1.5's vision side with transformers, without an engine.

The search reads the tokens of its candidates' probes from it, without an engine.

Inputs equal a server's except for the rounding of bfloat16 in other kernels, which at small budgets
may exchange one of the tokens of lowest rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor, nn

from vllm_autoprune.errors import ConfigError, Problem, UnsupportedModelError
from vllm_autoprune.ops.dtype import Dtype
from vllm_autoprune.serving.api.instruction import (
    split_content_words,
    truncate_clip_ids,
    truncate_text,
)
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.plan import LANGUAGE_IDS, RELEVANCE_IDS, Ids
from vllm_autoprune.serving.settings import TextTower, read_text_tower
from vllm_autoprune.serving.worker.question import ClipTower, InputEmbeddings, RelevanceSpace
from vllm_autoprune.tpdsl.prefix import DecoderLayer, DecoderPrefix, LanguagePrefix
from vllm_autoprune.tpdsl.tokens import (
    Grid,
    Instruction,
    NextLayer,
    TowerStates,
    VisualTokens,
    Words,
)

if TYPE_CHECKING:
    from transformers import LlamaModel, LlavaConfig, PreTrainedTokenizerBase
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Files of a checkpoint that are downloaded."""


def find_checkpoint(name: str) -> Path:
    """The folder of a local checkpoint, or of one on the Hugging Face Hub, downloaded if need be.

    Raises :class:`ConfigError` for an id of the Hub that cannot be had.
    """
    path = Path(name)
    if path.exists() or not _HUB_ID.fullmatch(name):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except (OSError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        what = f"is no folder, and not to be had from the Hub ({type(error).__name__})"
        fix = "give a folder with a Hugging Face checkpoint, or the id of one on the Hub"
        raise ConfigError("checkpoint", [Problem(name, what, fix)]) from None


def require_architecture(checkpoint: Path, known: Collection[str]) -> None:
    """Require one of the known architectures in the config.json of a checkpoint.

    Raises :class:`ConfigError` for folders without a checkpoint and
    :class:`UnsupportedModelError` for other architectures.
    """
    try:
        data = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not JSON"
        what = f"config.json cannot be read ({reason})"
        fix = "give a folder with a Hugging Face checkpoint"
        raise ConfigError("checkpoint", [Problem(str(checkpoint), what, fix)]) from None
    names = data.get("architectures") if isinstance(data, dict) else None
    architecture = str(names[0]) if isinstance(names, list) and names else "unknown"
    if architecture not in known:
        what = f"architecture {architecture} is not supported here"
        fix = f"give a checkpoint of {', '.join(known)}"
        raise UnsupportedModelError("checkpoint", [Problem(str(checkpoint), what, fix)])


_ARCHITECTURE = "LlavaForConditionalGeneration"


def build_prefix(
    model: LlamaModel, start: tuple[int, ...], image: Tensor, words: tuple[int, ...]
) -> DecoderPrefix:
    """The sequence [start, image, words] of one image ``(N, D)``, before any layer has run.

    Without words the start is repeated after the image, as on a server: policies need at least one
    text token.
    """
    words = words or start
    embedded = model.embed_tokens(torch.tensor([*start, *words]))
    before, after = embedded.split([len(start), len(words)])
    sequence = torch.cat([before, image.to(embedded.dtype), after])[None]
    layers = [_layer(model, block) for block in model.layers]
    text = torch.ones(1, len(words), dtype=torch.bool)
    return DecoderPrefix(layers, model.norm, sequence, len(start), text)


def _layer(model: LlamaModel, block: LlamaDecoderLayer) -> DecoderLayer:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    attention = block.self_attn

    def heads(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            project(rows).unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cosine, sine = model.rotary_emb(rows[None], torch.arange(len(rows))[None])
        query, key = apply_rotary_pos_emb(query[None], key[None], cosine, sine)
        return query[0], key[0], value

    return DecoderLayer(
        block.input_layernorm, heads, attention.o_proj, block.post_attention_layernorm, block.mlp
    )


_Hook = Callable[[nn.Module, object, Tensor], None]


def open_vision(checkpoint: Path, text_tower: Path | None = None) -> LlavaVision:
    """Open the vision side of a checkpoint, with relevance measured by a CLIP text tower if given.

    Without a text tower the language model's input embeddings measure it, as on a server. Raises
    :class:`ConfigError` for folders without a checkpoint and :class:`UnsupportedModelError` for
    other architectures than LLaVA-1.5.
    """
    require_architecture(checkpoint, [_ARCHITECTURE])
    tower = None if text_tower is None else read_text_tower(str(text_tower))
    return LlavaVision(checkpoint, tower)


class LlavaVision:
    """A LLaVA-1.5 checkpoint, opened once; ``model`` and ``processor`` are transformers' own."""

    def __init__(
        self, checkpoint: Path, tower: TextTower | None, dtype: Dtype = "bfloat16"
    ) -> None:
        from transformers import AutoProcessor, AutoTokenizer, LlavaForConditionalGeneration
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self.model, loaded = LlavaForConditionalGeneration.from_pretrained(
            checkpoint, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
        # The tokens that are returned run the model later, outside of no_grad.
        self.model.requires_grad_(False)
        _require_supported(checkpoint, self.model.config, tower, sorted(loaded["missing_keys"]))
        config = self.model.config.vision_config
        side = config.image_size // config.patch_size
        self.grid = Grid(side, side)
        self._relevance: RelevanceSpace
        if tower is None:
            embed = self.model.get_input_embeddings()
            self._relevance = InputEmbeddings(embed, torch.device("cpu"))
            self._words = self.processor.tokenizer
        else:
            self._relevance = ClipTower(tower, torch.device("cpu"))
            self._words = AutoTokenizer.from_pretrained(tower.path)
        self._clip = tower is not None

    @torch.no_grad()
    def encode(self, image: Image.Image, instruction: str) -> VisualTokens:
        """Visual tokens of an image (B = 1), with every input that can be computed."""
        prepared = self.processor.image_processor(image.convert("RGB"), return_tensors="pt")
        pixels = prepared["pixel_values"]
        tower, project = self.model.model.vision_tower, self.model.model.multi_modal_projector
        layer = self.model.config.vision_feature_layer
        # hidden_states start with the embeddings, so -2 is the output of the second last layer.
        reader = _ProjectionRecorder(tower.encoder.layers[layer].self_attn)
        next_reader = (
            _ProjectionRecorder(tower.encoder.layers[layer + 1].self_attn) if layer < -1 else None
        )
        hidden = tower(pixels.to(self.model.dtype), output_hidden_states=True).hidden_states[layer]
        heads = tower.config.num_attention_heads
        query, key = reader.take()
        patches = hidden[:, 1:]
        states = TowerStates(
            patches=patches,
            keys=key.unflatten(-1, (heads, -1)).mean(dim=2)[:, 1:],
            project=project,
            cls=hidden[:, :1],
            next_layer=None if next_reader is None else _next_layer(*next_reader.take()),
        )
        features = project(patches)
        return VisualTokens(
            features,
            self.grid,
            _cls_row(query, key, heads),
            self._instruction(patches, features, instruction),
            tower=states,
            language=self._language(features[0], instruction),
            encoder=patches,
            words=self._words_of(instruction),
        )

    def _words_of(self, instruction: str) -> Words:
        tokenizer = self.processor.tokenizer
        parts = split_content_words(truncate_text(instruction))
        ids = [token for part in parts for token in self._tokenize(tokenizer, part, special=False)]
        ids = ids[-LANGUAGE_IDS:]
        rows = self.model.get_input_embeddings()(torch.tensor(ids, dtype=torch.int64))
        return Words(rows[None], torch.ones(1, len(ids), dtype=torch.bool))

    def _language(self, image: Tensor, instruction: str) -> LanguagePrefix:
        tokenizer = self.processor.tokenizer
        start = (tokenizer.bos_token_id,)
        words = self._tokenize(tokenizer, instruction, special=False)[-LANGUAGE_IDS:]
        return build_prefix(self.model.model.language_model, start, image, words)

    def _tokenize(self, tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> Ids:
        end = truncate_text(text)
        ids = tokenizer(end, truncation=False, verbose=False, add_special_tokens=special)
        # A literal image token has no meaning here, and in some models no embedding.
        image = None if special else self.model.config.image_token_id
        return tuple(token for token in ids["input_ids"] if token != image)

    def _instruction(self, patches: Tensor, features: Tensor, instruction: str) -> Instruction:
        ids = self._tokenize(self._words, instruction, special=self._clip)
        ids = truncate_clip_ids(ids) if self._clip else ids[-RELEVANCE_IDS:]
        text, segments = self._relevance.instructions([ids])
        embedded = self._relevance.patches(patches)
        where = features if embedded is None else embedded
        return Instruction(where, text, segments, self._relevance.sign)


def _require_supported(
    checkpoint: Path, config: LlavaConfig, tower: TextTower | None, missing: Sequence[str]
) -> None:
    """Raise for models that a server refuses, and for checkpoints without all weights."""
    if missing:
        what = f"lacks weights: {', '.join(missing[:3])}" + (", ..." if len(missing) > 3 else "")
        fix = "give a complete checkpoint"
        raise ConfigError("checkpoint", [Problem(str(checkpoint), what, fix)])
    backbone = BACKBONES[_ARCHITECTURE]
    problems = list(backbone.problems(config))
    if problems:
        raise UnsupportedModelError(f"checkpoint {checkpoint}", problems)
    if tower is not None and (tower_problems := list(backbone.tower_problems(config, tower))):
        raise ConfigError("text tower", tower_problems)


class _ProjectionRecorder:
    """Recorder of queries and keys ``(B, 1 + N, Dv)`` of one attention layer in its next run."""

    def __init__(self, attention: nn.Module) -> None:
        self._outputs: dict[str, Tensor] = {}
        self._hooks = [
            attention.get_submodule(name).register_forward_hook(self._record_output(name))
            for name in ("q_proj", "k_proj")
        ]

    def _record_output(self, name: str) -> _Hook:
        def record(module: nn.Module, inputs: object, output: Tensor) -> None:
            self._outputs[name] = output

        return record

    def take(self) -> tuple[Tensor, Tensor]:
        """Return (query, key) in float32 and remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        return self._outputs["q_proj"].float(), self._outputs["k_proj"].float()


def _cls_row(query: Tensor, key: Tensor, heads: int) -> Tensor:
    """``(B, N)``: attention of [CLS] averaged over heads, [CLS] itself left out.

    In float32 from queries and keys, as the plugin reads it: the layer's own probabilities have
    been rounded to the model's dtype.
    """
    query, key = (x.unflatten(-1, (heads, -1)) for x in (query, key))
    scores = torch.einsum("bhd,bnhd->bhn", query[:, 0], key) * key.shape[-1] ** -0.5
    mean: Tensor = scores.softmax(dim=-1).mean(dim=1)
    return mean[:, 1:]


def _next_layer(query: Tensor, key: Tensor) -> NextLayer:
    """Attention and keys of the following layer as a single head, as PruMerge uses them."""
    scores = torch.einsum("bd,bnd->bn", query[:, 0], key) * key.shape[-1] ** -0.5
    return NextLayer(attention=scores.softmax(dim=-1)[:, 1:], keys=key[:, 1:])
