"""Reference selection on mini-LLaVA, computed with transformers alone in float32."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tests.serving.paths import CLIP, LLAVA
from vllm_autoprune import Grid, Instruction, PruningPolicy, VisualTokens, refine
from vllm_autoprune.serving.api.instruction import split_content_words
from vllm_autoprune.serving.settings import read_text_tower
from vllm_autoprune.tpdsl.base_policy import RefinedTokens
from vllm_autoprune.tpdsl.tokens import NextLayer, TowerStates, Words

BOS = 1


class WholePrefix:
    """A ``LanguagePrefix`` from one forward pass of the whole language model."""

    start = 1

    def __init__(self, model: Any, image: Tensor, words: list[int]) -> None:
        words = words or [BOS]
        table = model.embed_tokens.weight
        self._sequence = torch.cat([table[[BOS]], image, table[words]])[None]
        self._norm = model.norm
        self._out = model(
            inputs_embeds=self._sequence, output_hidden_states=True, output_attentions=True
        )
        self.layers = len(model.layers)
        self.text = torch.ones(1, len(words), dtype=torch.bool)

    def embeddings(self) -> Tensor:
        return self._sequence

    def states(self, layer: int) -> Tensor:
        assert layer < self.layers - 1, "transformers shows the last layer normed"
        states: Tensor = self._out.hidden_states[layer + 1]
        return states

    def normed(self, layer: int) -> Tensor:
        normed: Tensor = self._norm(self.states(layer))
        return normed

    def keys(self, layer: int) -> Tensor:
        keys: Tensor = self._out.past_key_values.layers[layer].keys
        return keys

    def attention(self, layer: int) -> Tensor:
        rows: Tensor = self._out.attentions[layer][:, :, -self.text.shape[1] :]
        return rows


class Offline:
    """Both checkpoints, opened once."""

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(LLAVA)

    @cached_property
    def _model(self) -> Any:
        from transformers import LlavaForConditionalGeneration

        return LlavaForConditionalGeneration.from_pretrained(
            LLAVA, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @cached_property
    def _clip(self) -> Any:
        from transformers import CLIPModel

        return CLIPModel.from_pretrained(CLIP, dtype=torch.float32).eval()

    @cached_property
    def _clip_words(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(CLIP)

    @torch.no_grad()
    def kept(self, policy: PruningPolicy, image: Image.Image, question: str) -> RefinedTokens:
        """The policy's selection for one image and question."""
        return refine(policy, self.tokens(image, question))

    @torch.no_grad()
    def tokens(self, image: Image.Image, question: str) -> VisualTokens:
        """Visual tokens with every optional input, B = 1."""
        model = self._model.model
        pixels = self._processor.image_processor(image, return_tensors="pt")["pixel_values"]
        tower = model.vision_tower
        seen = tower(pixels, output_hidden_states=True, output_attentions=True)
        states, before = seen.hidden_states[-2], seen.hidden_states[-3]
        layers = [m for n, m in tower.named_modules() if n.split(".")[-2:-1] == ["layers"]]
        read, following = layers[-2], layers[-1]
        heads = model.config.vision_config.num_attention_heads
        keys = read.self_attn.k_proj(read.layer_norm1(before)).unflatten(-1, (heads, -1))
        normed = following.layer_norm1(states)
        query, key = following.self_attn.q_proj(normed), following.self_attn.k_proj(normed)
        wide = (query @ key.transpose(1, 2) * query.shape[-1] ** -0.5).softmax(dim=-1)
        projected = model.multi_modal_projector(states[:, 1:])
        side = int(projected.shape[1] ** 0.5)
        words = self._processor.tokenizer.encode(question, add_special_tokens=False)
        return VisualTokens(
            features=projected,
            grid=Grid(side, side),
            cls_attention=seen.attentions[-2].mean(dim=1)[:, 0, 1:],
            instruction=self._relevance(states[:, 1:], question),
            tower=TowerStates(
                patches=states[:, 1:],
                keys=keys.mean(dim=2)[:, 1:],
                project=model.multi_modal_projector,
                cls=states[:, :1],
                next_layer=NextLayer(wide[:, 0, 1:], key[:, 1:]),
            ),
            language=WholePrefix(model.language_model, projected[0], words),
            encoder=states[:, 1:],
            words=self._words(question),
        )

    def _words(self, question: str) -> Words:
        encode = self._processor.tokenizer.encode
        parts = split_content_words(question)
        ids = [token for part in parts for token in encode(part, add_special_tokens=False)]
        rows = self._model.get_input_embeddings()(torch.tensor([ids], dtype=torch.int64))
        return Words(rows, torch.ones(1, len(ids), dtype=torch.bool))

    def _relevance(self, patches: Tensor, question: str) -> Instruction:
        clip = self._clip
        words = self._clip_words(question, return_tensors="pt")
        text = clip.text_projection(clip.text_model(**words).pooler_output)
        tokens_in_clip = clip.visual_projection(clip.vision_model.post_layernorm(patches))
        one = torch.ones(1, 1, dtype=torch.bool)
        return Instruction(tokens_in_clip, text[:, None], one, read_text_tower(str(CLIP)).sign)
