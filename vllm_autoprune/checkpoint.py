"""Checkpoints: where one is, and LLaVA-1.5's vision side with transformers, without an engine.

The search reads the tokens of its candidates' probes from it, without an engine.

Inputs equal a server's except for the rounding of bfloat16 in other kernels, which at small budgets
may exchange one of the tokens of lowest rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
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
    from transformers import LlamaModel, PreTrainedTokenizerBase
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
        """Raises for models that a server refuses, and for checkpoints without all weights."""
        from transformers import AutoProcessor, AutoTokenizer, LlavaForConditionalGeneration
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self.model, loaded = LlavaForConditionalGeneration.from_pretrained(
            checkpoint, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
        # The tokens that are returned run the model later, outside of no_grad.
        self.model.requires_grad_(False)
        if missing := sorted(loaded["missing_keys"]):
            what = f"lacks weights: {', '.join(missing[:3])}" + ", ..." * (len(missing) > 3)
            problem = Problem(str(checkpoint), what, "give a complete checkpoint")
            raise ConfigError("checkpoint", [problem])
        backbone = BACKBONES[_ARCHITECTURE]
        if problems := list(backbone.problems(self.model.config)):
            raise UnsupportedModelError(f"checkpoint {checkpoint}", problems)
        if tower and (problems := list(backbone.tower_problems(self.model.config, tower))):
            raise ConfigError("text tower", problems)
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
        tokens = self.encode_pixels(prepared["pixel_values"])
        patches, features = tokens.require_encoder(), tokens.features
        return replace(
            tokens,
            instruction=self._measure_relevance(patches, features, instruction),
            language=self._start_language(features[0], instruction),
            words=self._embed_words(instruction),
        )

    @torch.no_grad()
    def encode_pixels(self, pixels: Tensor) -> VisualTokens:
        """Visual tokens of processed images ``(B, 3, H, W)``, without the inputs of a question."""
        tower, project = self.model.model.vision_tower, self.model.model.multi_modal_projector
        layer = self.model.config.vision_feature_layer
        has_next = layer < -1
        # hidden_states start with the embeddings, so -2 is the output of the second last layer.
        with _record_projections(tower.encoder.layers[layer:][:2]) as projections:
            hidden = tower(pixels.to(self.model.dtype), output_hidden_states=True).hidden_states[
                layer
            ]
        (query, key), *following = projections
        heads = tower.config.num_attention_heads
        query, key = (rows.unflatten(-1, (heads, -1)) for rows in (query, key))
        next_layer = None
        if has_next:
            # As a single head, as PruMerge uses them.
            next_query, next_key = (rows[:, :, None] for rows in following[0])
            attention = _attend_from_cls(next_query, next_key)
            next_layer = NextLayer(attention=attention, keys=next_key[:, 1:, 0])
        patches = hidden[:, 1:]
        return VisualTokens(
            project(patches),
            self.grid,
            _attend_from_cls(query, key),
            tower=TowerStates(
                patches=patches,
                keys=key.mean(dim=2)[:, 1:],
                project=project,
                cls=hidden[:, :1],
                next_layer=next_layer,
            ),
            encoder=patches,
        )

    def _tokenize(self, tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> Ids:
        end = truncate_text(text)
        ids = tokenizer(end, truncation=False, verbose=False, add_special_tokens=special)
        # A literal image token has no meaning here, and in some models no embedding.
        image = None if special else self.model.config.image_token_id
        return tuple(token for token in ids["input_ids"] if token != image)

    def _measure_relevance(
        self, patches: Tensor, features: Tensor, instruction: str
    ) -> Instruction:
        ids = self._tokenize(self._words, instruction, special=self._clip)
        ids = truncate_clip_ids(ids) if self._clip else ids[-RELEVANCE_IDS:]
        text, segments = self._relevance.instructions([ids])
        embedded = self._relevance.patches(patches)
        where = features if embedded is None else embedded
        return Instruction(where, text, segments, self._relevance.sign)

    def _embed_words(self, instruction: str) -> Words:
        tokenizer = self.processor.tokenizer
        parts = split_content_words(truncate_text(instruction))
        ids = [token for part in parts for token in self._tokenize(tokenizer, part, special=False)]
        ids = ids[-LANGUAGE_IDS:]
        rows = self.model.get_input_embeddings()(torch.tensor(ids, dtype=torch.int64))
        return Words(rows[None], torch.ones(1, len(ids), dtype=torch.bool))

    def _start_language(self, image: Tensor, instruction: str) -> LanguagePrefix:
        """The sequence [start, image (N, D), words], before any layer has run.

        Without words the start is repeated after the image, as on a server: policies need at least
        one text token.
        """
        tokenizer, model = self.processor.tokenizer, self.model.model.language_model
        start = (tokenizer.bos_token_id,)
        words = self._tokenize(tokenizer, instruction, special=False)[-LANGUAGE_IDS:] or start
        embedded = model.embed_tokens(torch.tensor([*start, *words]))
        before, after = embedded.split([len(start), len(words)])
        sequence = torch.cat([before, image.to(embedded.dtype), after])
        layers = [_layer(model, block) for block in model.layers]
        return DecoderPrefix(layers, model.norm, sequence, len(start), len(words))


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


@contextmanager
def _record_projections(layers: Iterable[nn.Module]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Queries and keys ``(B, 1 + N, Dv)`` of the layers in the next run, in float32."""
    outputs: dict[tuple[int, str], Tensor] = {}
    recorded: list[tuple[Tensor, Tensor]] = []

    def record(key: tuple[int, str], module: nn.Module, inputs: object, output: Tensor) -> None:
        outputs[key] = output.float()

    layers = list(layers)
    hooks = [
        layer.get_submodule(f"self_attn.{name}").register_forward_hook(
            partial(record, (number, name))
        )
        for number, layer in enumerate(layers)
        for name in ("q_proj", "k_proj")
    ]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()
    recorded += [(outputs[n, "q_proj"], outputs[n, "k_proj"]) for n in range(len(layers))]


def _attend_from_cls(query: Tensor, key: Tensor) -> Tensor:
    """``(B, N)``: attention of [CLS], averaged over heads and without itself.

    From queries and keys ``(B, 1 + N, H, Dh)`` in float32, as the plugin reads it: the layer's own
    probabilities have been rounded to the model's dtype.
    """
    scores = torch.einsum("bhd,bnhd->bhn", query[:, 0], key) * key.shape[-1] ** -0.5
    mean: Tensor = scores.softmax(dim=-1).mean(dim=1)
    return mean[:, 1:]
