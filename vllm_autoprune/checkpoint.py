"""Token counts of checkpoints, and LLaVA-1.5's visual tokens without an engine, for searches.

Visual tokens equal a server's, except that other kernels round bfloat16 differently. At small
budgets this may exchange one of the tokens of lowest rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor, nn

from vllm_autoprune.backbones import BackboneShape, read_config
from vllm_autoprune.errors import ConfigError, UnsupportedModelError
from vllm_autoprune.hub import describe_error, explain_unread
from vllm_autoprune.ops.dtype import Dtype
from vllm_autoprune.selftest.backbones import TINY_MODELS, write_processor
from vllm_autoprune.serving.api.instruction import (
    split_content_words,
    truncate_text,
    truncate_tower_ids,
)
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.plan import LANGUAGE_IDS, RELEVANCE_IDS, Ids
from vllm_autoprune.serving.worker.question import (
    ClipTower,
    InputEmbeddings,
    RelevanceSpace,
)
from vllm_autoprune.text_tower import read_text_tower
from vllm_autoprune.tpdsl.prefix import DecoderLayer, DecoderPrefix
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

    from vllm_autoprune.serving.api.placeholders import TokenCount


def count_tokens(checkpoint: str, width: int, height: int) -> TokenCount:
    """Count the visual tokens N and the tiles of an image of a size in pixels.

    vLLM's processor for ``checkpoint`` counts them. The checkpoint is a folder with tokenizer and
    processor, or a Hub id, of a model that is served pruned. Its code is not run. Raises
    :class:`ConfigError` if a file is missing or needs such code, or for an image that is refused.
    """
    read_config(checkpoint)  # vLLM's error would not tell that the Hub is missing
    try:
        from vllm.config import ModelConfig
        from vllm.multimodal.parse import ImageSize
        from vllm.multimodal.processing import InputProcessingContext
        from vllm.tokenizers import get_tokenizer

        config = ModelConfig(model=checkpoint)
        module, _, name = BACKBONES[config.architecture].model.partition(":")
        model = vars(import_module(module))[name]
        context = InputProcessingContext(config, get_tokenizer(checkpoint))
        info = model._processor_factory.info(context)
    except (OSError, ValueError, ImportError) as error:
        what = "its processor cannot be read"
        fix = "give a folder with its tokenizer and processor, or an id that can be fetched"
        problem = explain_unread(checkpoint, error, what, fix)
        raise ConfigError("checkpoint", [problem]) from None
    try:
        size = ImageSize(width, height)
        count: TokenCount = model.autoprune_placeholders.count(info, size, {})
    except ValueError as error:  # Qwen-VL takes no image 200 times as long as wide
        what = f"its processor takes no image of these sides ({describe_error(error)})"
        fix = "give another size"
        raise ConfigError.of(f"{width}x{height}", what, fix, subject="image") from None
    return count


def count_published(shape: BackboneShape, width: int, height: int) -> TokenCount:
    """Count the visual tokens and tiles of an image on a listed backbone, without its files.

    vLLM's processor counts them by the published settings of the backbone and the class of the
    family's tiny model.
    """
    if shape.family not in TINY_MODELS:  # LLaVA-1.5 resizes all images to one size
        from vllm_autoprune.serving.api.placeholders import TokenCount

        return TokenCount(shape.tokens, shape.tiles)
    with tempfile.TemporaryDirectory() as folder:
        write_processor(shape.family, Path(folder), shape.geometry)
        return count_tokens(folder, width, height)


class LlavaVision:
    """Encoder of a LLaVA-1.5 checkpoint, with the ``model`` and ``processor`` of transformers."""

    def __init__(
        self,
        checkpoint: Path,
        text_tower: Path | None = None,
        dtype: Dtype = "bfloat16",
    ) -> None:
        """Load the checkpoint.

        Relevance is measured by ``text_tower``, or by the language model's input embeddings if it
        is None. Raises :class:`ConfigError` for a folder without a checkpoint or without all of
        its weights, and :class:`UnsupportedModelError` for architectures other than LLaVA-1.5.
        """
        architecture = "LlavaForConditionalGeneration"
        if architecture not in (read_config(str(checkpoint)).architectures or ()):
            what = f"is no {architecture}"
            fix = "give a LLaVA-1.5"
            raise UnsupportedModelError.of(
                str(checkpoint), what, fix, subject="checkpoint"
            )
        from transformers import (
            AutoProcessor,
            AutoTokenizer,
            LlavaForConditionalGeneration,
        )
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self.model, loading = LlavaForConditionalGeneration.from_pretrained(
            checkpoint,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
        )
        # The returned tokens run layers of the model later, outside of no_grad.
        self.model.requires_grad_(False)
        if missing := sorted(loading["missing_keys"]):
            what = f"lacks weights: {', '.join(missing[:3])}"
            if len(missing) > 3:
                what += ", ..."
            fix = "give a complete checkpoint"
            raise ConfigError.of(str(checkpoint), what, fix, subject="checkpoint")
        config = self.model.config.vision_config
        side = config.image_size // config.patch_size
        self.grid = Grid(side, side)
        self._has_text_tower = text_tower is not None
        self._relevance: RelevanceSpace
        if text_tower is None:
            embed = self.model.get_input_embeddings()
            self._relevance = InputEmbeddings(embed, torch.device("cpu"))
            self._relevance_tokenizer = self.processor.tokenizer
        else:
            tower = read_text_tower(str(text_tower))
            self._relevance = ClipTower(tower, torch.device("cpu"))
            self._relevance_tokenizer = AutoTokenizer.from_pretrained(tower.path)

    @torch.no_grad()
    def encode(self, image: Image.Image, instruction: str) -> VisualTokens:
        """Visual tokens of an image (B = 1), with every input that can be computed."""
        prepared = self.processor.image_processor(
            image.convert("RGB"), return_tensors="pt"
        )
        tokens = self.encode_pixels(prepared["pixel_values"])
        tokenizer = self.processor.tokenizer
        model = self.model.model.language_model

        # The language model's embeddings of the content words.
        parts = split_content_words(truncate_text(instruction))
        content = [
            id
            for part in parts
            for id in self._tokenize(tokenizer, part, special=False)
        ]
        content = content[-LANGUAGE_IDS:]
        rows = model.embed_tokens(torch.tensor(content, dtype=torch.int64))[None]

        # The sequence [start, image (N, D), words], before any layer has run. Without words the
        # start is repeated after the image, as on a server: policies need a text token.
        start = (tokenizer.bos_token_id,)
        words = (
            self._tokenize(tokenizer, instruction, special=False)[-LANGUAGE_IDS:]
            or start
        )
        prefix = model.embed_tokens(torch.tensor(start))
        suffix = model.embed_tokens(torch.tensor(words))
        sequence = torch.cat([prefix, tokens.features[0].to(prefix.dtype), suffix])
        layers = [_layer(model, block) for block in model.layers]
        return replace(
            tokens,
            instruction=self.embed_instructions(tokens, [instruction]),
            words=Words(rows, torch.ones(1, len(content), dtype=torch.bool)),
            language=DecoderPrefix(
                layers, model.norm, sequence, len(start), len(words)
            ),
        )

    @torch.no_grad()
    def encode_pixels(self, pixels: Tensor) -> VisualTokens:
        """Visual tokens of processed images ``(B, 3, H, W)``, without the inputs of a question."""
        tower = self.model.model.vision_tower
        project = self.model.model.multi_modal_projector
        layer = self.model.config.vision_feature_layer
        heads = tower.config.num_attention_heads
        # hidden_states begins with the embeddings, so -2 is the output of the last layer but one.
        states = tower(
            pixels.to(self.model.dtype), output_hidden_states=True
        ).hidden_states
        hidden = states[layer]
        patches = states[layer][:, 1:]
        query, key = _project(tower.encoder.layers[layer], states[layer - 1], heads)
        next_layer = None
        if layer < -1:
            # PruMerge uses queries and keys as a single head.
            next_query, next_key = _project(tower.encoder.layers[layer + 1], hidden, 1)
            attention = _attend_from_cls(next_query, next_key)
            next_layer = NextLayer(attention=attention, keys=next_key[:, 1:, 0])
        return VisualTokens(
            project(patches),
            self.grid,
            _attend_from_cls(query, key),
            tower=TowerStates(
                patches, key.mean(dim=2)[:, 1:], project, hidden[:, :1], next_layer
            ),
            encoder=patches,
        )

    @torch.no_grad()
    def embed_instructions(
        self, tokens: VisualTokens, texts: Sequence[str]
    ) -> Instruction:
        """Embed the instructions to which relevance is measured, one text for each of B images."""
        rows = [
            self._tokenize(
                self._relevance_tokenizer, text, special=self._has_text_tower
            )
            for text in texts
        ]
        rows = [
            truncate_tower_ids(ids) if self._has_text_tower else ids[-RELEVANCE_IDS:]
            for ids in rows
        ]
        text, segments = self._relevance.instructions(rows)
        patches = self._relevance.patches(tokens.require_encoder())
        space = tokens.features if patches is None else patches
        return Instruction(space, text, segments, self._relevance.sign)

    def _tokenize(
        self, tokenizer: PreTrainedTokenizerBase, text: str, special: bool
    ) -> Ids:
        end = truncate_text(text)
        ids = tokenizer(
            end, truncation=False, verbose=False, add_special_tokens=special
        )
        # An image token that a text spells out has no meaning, and in some models no embedding.
        image_token = None if special else self.model.config.image_token_id
        return tuple(token for token in ids["input_ids"] if token != image_token)


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
        block.input_layernorm,
        heads,
        attention.o_proj,
        block.post_attention_layernorm,
        block.mlp,
    )


def _project(block: nn.Module, states: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys ``(B, 1 + N, H, Dh)`` of a layer of the tower, in float32."""
    rows = block.get_submodule("layer_norm1")(states)
    attention = block.get_submodule("self_attn")
    query, key = (
        attention.get_submodule(name)(rows).float().unflatten(-1, (heads, -1))
        for name in ("q_proj", "k_proj")
    )
    return query, key


def _attend_from_cls(query: Tensor, key: Tensor) -> Tensor:
    """Attention ``(B, N)`` of [CLS] to the patches, averaged over heads.

    It is computed from queries and keys ``(B, 1 + N, H, Dh)`` in float32, as on a server, because
    the layer's own probabilities are rounded to the model's dtype.
    """
    scores = torch.einsum("bhd,bnhd->bhn", query[:, 0], key) * key.shape[-1] ** -0.5
    mean: Tensor = scores.softmax(dim=-1).mean(dim=1)
    return mean[:, 1:]
