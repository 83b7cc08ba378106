"""Recomputes which tokens of an image are kept for a question, and the model's answer.

The checkpoint is opened with transformers, and tokens are chosen by the server's own code. Its
inputs equal the server's up to the rounding of bfloat16 in other kernels, which at K = 8 often
exchanges one of the least important patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from benchmarks.demo.configurations import Configuration
from benchmarks.minillava.engine import MAX_ANSWER_TOKENS
from vllm_autoprune import VisualTokens, load_state, materialize, refine
from vllm_autoprune.checkpoints.llava import LlavaVision
from vllm_autoprune.serving.shared.plan import make_feature_key
from vllm_autoprune.serving.shared.text_tower import read_text_tower
from vllm_autoprune.serving.worker.selection import select_at_random


@dataclass(frozen=True)
class Explanation:
    """Raster indices of the kept patches, and the answer that they lead to."""

    configuration: Configuration
    kept: tuple[int, ...]
    answer: str


class Explainer:
    """A checkpoint and a state, opened once."""

    def __init__(self, model: Path, text_tower: Path, state: str) -> None:
        self._state = load_state(state)
        self._vision = LlavaVision(model, read_text_tower(str(text_tower)))

    @torch.no_grad()
    def explain(
        self, image: Image.Image, question: str, configuration: Configuration
    ) -> Explanation:
        """The tokens that a server would keep, and the answer that it would give."""
        tokens = self._vision.encode(image, question).tokens
        kept = self._kept(tokens, image, configuration)
        return Explanation(
            configuration, tuple(kept.tolist()), self._answer(tokens, kept, question)
        )

    def _kept(
        self, tokens: VisualTokens, image: Image.Image, configuration: Configuration
    ) -> Tensor:
        budget = configuration.budget
        if configuration.keep == "full" or budget is None:
            return torch.arange(tokens.count)
        if configuration.keep == "random":
            key = make_feature_key(self._hash_pixels(image))
            return select_at_random(budget, tokens, [key]).indices[0]
        state = self._state if configuration.keep == "state" else self._state.without_exchange()
        return refine(materialize(state, budget), tokens).indices[0]

    def _hash_pixels(self, image: Image.Image) -> str:
        """As a server hashes them: after its image processor, in the dtype that it serves."""
        from vllm.multimodal.hasher import MultiModalHasher

        processor = self._vision.processor.image_processor
        pixels = processor(image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        return MultiModalHasher.hash_kwargs("blake3", pixel_values=pixels.to(torch.bfloat16))

    def _answer(self, tokens: VisualTokens, kept: Tensor, question: str) -> str:
        processor, llava = self._vision.processor, self._vision.model
        content = [{"type": "image"}, {"type": "text", "text": question}]
        chat = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        words, image = processor.tokenizer, processor.image_token
        ids = words(chat.replace(image, image * len(kept)), return_tensors="pt").input_ids
        embedded = llava.get_input_embeddings()(ids)
        embedded[ids == words.convert_tokens_to_ids(image)] = tokens.features[0, kept]
        ids_out: list[int] = []
        while len(ids_out) < MAX_ANSWER_TOKENS:
            hidden = llava.model.language_model(inputs_embeds=embedded, use_cache=False)
            best = llava.lm_head(hidden.last_hidden_state[:, -1]).argmax(-1)
            if int(best) == words.eos_token_id:
                break
            ids_out.append(int(best))
            embedded = torch.cat((embedded, llava.get_input_embeddings()(best)[:, None]), 1)
        return str(words.decode(ids_out)).strip()
