"""The instruction as token ids, once for each need that reads it.

Knows nothing about which image it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_autoprune.serving.plan import Ids
from vllm_autoprune.serving.towers import TextTower
from vllm_autoprune.tpdsl.tokens import Need

if TYPE_CHECKING:
    from vllm.multimodal.processing import BaseProcessingInfo

LAST_WORDS = 256
"""Tokens that the language model's first layers see of an instruction: its last ones.

Their attention to all tokens before them is held, which a pasted document would make gigabytes.
"""


class Words:
    """Tokenizers of one served model and of the text tower beside it."""

    def __init__(self, info: BaseProcessingInfo, tower: TextTower | None, image_token: int) -> None:
        self._info = info
        self._tower = tower
        self._image_token = image_token

    def read(self, text: str, needs: Collection[Need]) -> tuple[Ids, Ids]:
        """Ids for (relevance, language model); empty where nobody reads them."""
        said = self._relevance(text) if "instruction" in needs else ()
        read = self._language(text)[-LAST_WORDS:] if "language" in needs else ()
        return said, read

    @cached_property
    def _relevance(self) -> Callable[[str], Ids]:
        if self._tower is None:
            return self._language
        from transformers import AutoTokenizer

        clip = AutoTokenizer.from_pretrained(self._tower.path)
        # No truncation: long instructions become several segments, as CDPruner's code has it.
        return lambda text: tuple(clip(text, truncation=False, verbose=False)["input_ids"])

    def _language(self, text: str) -> Ids:
        ids = self._info.get_tokenizer().encode(text, add_special_tokens=False)
        # A literal image token has no meaning here, and in some models no embedding.
        return tuple(token for token in ids if token != self._image_token)
