"""Which tokens of an image are kept for a question, and what the model then says.

Knows nothing about servers: the checkpoint is opened with transformers, and tokens are chosen by
the same code that a server runs. Its inputs are the server's up to the rounding of bfloat16 in
other kernels, which at K = 8 often exchanges one of the patches that matter least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.demo.ask import MAX_TOKENS
from benchmarks.demo.configurations import Configuration
from vllm_autoprune import Grid, Instruction, VisualTokens, load_state, materialize, refine
from vllm_autoprune.serving.plan import image_key
from vllm_autoprune.serving.prune import keep_at_random
from vllm_autoprune.serving.relevance import ClipTower
from vllm_autoprune.serving.towers import describe_tower


@dataclass(frozen=True)
class Explanation:
    """Raster indices of the kept patches, and the answer that they lead to."""

    configuration: Configuration
    kept: tuple[int, ...]
    answer: str


class Explainer:
    """A checkpoint and a state, opened once."""

    def __init__(self, model: Path, text_tower: Path, state: str) -> None:
        from transformers import (
            AutoProcessor,
            AutoTokenizer,
            LlavaForConditionalGeneration,
        )
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._state = load_state(state)
        self._processor = AutoProcessor.from_pretrained(model)
        self._llava, loaded = LlavaForConditionalGeneration.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="eager", output_loading_info=True
        )
        if loaded["missing_keys"]:
            raise ValueError(f"{model} lacks weights: {sorted(loaded['missing_keys'])}")
        config = self._llava.config.vision_config
        side = config.image_size // config.patch_size
        self.grid = Grid(side, side)
        self._clip = ClipTower(describe_tower(str(text_tower)), torch.device("cpu"))
        self._clip_words = AutoTokenizer.from_pretrained(text_tower)

    @torch.no_grad()
    def explain(
        self, image: Image.Image, question: str, identity: str, configuration: Configuration
    ) -> Explanation:
        """``identity`` as in the request: the random keep is drawn from it."""
        tokens = self.tokens(image, question)
        kept = self._kept(tokens, identity, configuration)
        return Explanation(
            configuration, tuple(kept.tolist()), self._answer(tokens, kept, question)
        )

    def tokens(self, image: Image.Image, question: str) -> VisualTokens:
        """The record that the served policy reads."""
        pixels = self._processor.image_processor(image, return_tensors="pt")["pixel_values"]
        tower = self._llava.model.vision_tower
        layer = self._llava.config.vision_feature_layer
        # hidden_states begin with the embeddings, so -2 is what the last layer but one returned.
        attention = _ClsAttention(
            tower.encoder.layers[layer].self_attn, tower.config.num_attention_heads
        )
        hidden = tower(pixels.to(torch.bfloat16), output_hidden_states=True).hidden_states[layer]
        patches = hidden[:, 1:]
        ids = self._clip_words(question, truncation=False, verbose=False)["input_ids"]
        text, segments = self._clip.instructions([tuple(ids)])
        relevance = Instruction(self._clip.patches(patches), text, segments, self._clip.sign)
        features = self._llava.model.multi_modal_projector(patches)
        return VisualTokens(features, self.grid, attention.take(), relevance)

    def _kept(self, tokens: VisualTokens, identity: str, configuration: Configuration) -> Tensor:
        budget = configuration.budget
        if configuration.keep == "full" or budget is None:
            return torch.arange(tokens.count)
        if configuration.keep == "random":
            return keep_at_random(budget, tokens, [image_key(identity)]).indices[0]
        state = self._state if configuration.keep == "state" else self._state.without_exchange()
        return refine(materialize(state, budget), tokens).indices[0]

    def _answer(self, tokens: VisualTokens, kept: Tensor, question: str) -> str:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        chat = self._processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        words, image = self._processor.tokenizer, self._processor.image_token
        ids = words(chat.replace(image, image * len(kept)), return_tensors="pt").input_ids
        embedded = self._llava.get_input_embeddings()(ids)
        embedded[ids == words.convert_tokens_to_ids(image)] = tokens.features[0, kept]
        said: list[int] = []
        while len(said) < MAX_TOKENS:
            hidden = self._llava.model.language_model(inputs_embeds=embedded, use_cache=False)
            best = self._llava.lm_head(hidden.last_hidden_state[:, -1]).argmax(-1)
            if int(best) == words.eos_token_id:
                break
            said.append(int(best))
            embedded = torch.cat((embedded, self._llava.get_input_embeddings()(best)[:, None]), 1)
        return str(words.decode(said)).strip()


class _ClsAttention:
    """The [CLS] row of one layer's attention at its next run, averaged over heads.

    In float32 from queries and keys, as the plugin reads it: the layer's own probabilities have
    been rounded to the model's dtype.
    """

    def __init__(self, attention: nn.Module, heads: int) -> None:
        self._heads = heads
        self._seen: dict[str, Tensor] = {}
        self._hooks = [
            attention.get_submodule(name).register_forward_hook(self._noting(name))
            for name in ("q_proj", "k_proj")
        ]

    def _noting(self, name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def note(module: nn.Module, inputs: object, output: Tensor) -> None:
            self._seen[name] = output

        return note

    def take(self) -> Tensor:
        """``(B, N)``, [CLS] itself left out; the hooks are gone afterwards."""
        for hook in self._hooks:
            hook.remove()
        query, key = (
            self._seen[name].float().unflatten(-1, (self._heads, -1))
            for name in ("q_proj", "k_proj")
        )
        scores = torch.einsum("bhd,bnhd->bhn", query[:, 0], key) * key.shape[-1] ** -0.5
        return scores.softmax(dim=-1).mean(dim=1)[:, 1:]
