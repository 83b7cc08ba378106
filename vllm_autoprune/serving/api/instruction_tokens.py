"""Tokenization of the instruction, once for each input that reads it, bounded in length."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_autoprune.serving.api.content_words import split_content_words
from vllm_autoprune.serving.shared.plan import LANGUAGE_IDS, RELEVANCE_IDS, Ids
from vllm_autoprune.serving.shared.text_tower import TextTower
from vllm_autoprune.tpdsl.tokens import Need

if TYPE_CHECKING:
    from vllm.multimodal.processing import BaseProcessingInfo

MAX_CHARACTERS = 16 * RELEVANCE_IDS
"""Characters of an instruction that are tokenized: its last ones, from the beginning of a word.

A token of prose has about four characters, so this is more text than is ever read.
"""


def truncate_text(text: str, characters: int = MAX_CHARACTERS) -> str:
    """Cut an instruction to its end: a pasted document would take seconds to tokenize."""
    if len(text) <= characters:
        return text
    cut = text[-characters:]
    if text[-characters - 1].isspace():
        return cut
    words = cut.split(maxsplit=1)
    return words[1] if len(words) == 2 else cut


def truncate_clip_ids(ids: Ids) -> Ids:
    """CLIP's token ids of an instruction, at most RELEVANCE_IDS: its start token and the last."""
    return ids if len(ids) <= RELEVANCE_IDS else (ids[0], *ids[1 - RELEVANCE_IDS :])


class InstructionTokenizer:
    """Tokenizer of instructions, by the served model's vocabulary and the text tower's."""

    def __init__(self, info: BaseProcessingInfo, tower: TextTower | None, image_token: int) -> None:
        self._info = info
        self._tower = tower
        self._image_token = image_token

    def tokenize(self, text: str, needs: Collection[Need]) -> tuple[Ids, Ids]:
        """Ids for (relevance, language model); empty where ``needs`` lacks the input.

        The second ones are the whole text for the language model's first layers, else the words
        that a policy covers, each tokenized alone.
        """
        end = truncate_text(text)
        relevance = self._relevance(end) if "instruction" in needs else ()
        if "language" in needs:
            return relevance, self._language(end)[-LANGUAGE_IDS:]
        return relevance, self._words(end)[-LANGUAGE_IDS:] if "words" in needs else ()

    @cached_property
    def _relevance(self) -> Callable[[str], Ids]:
        if self._tower is None:
            return lambda text: self._language(text)[-RELEVANCE_IDS:]
        from transformers import AutoTokenizer

        clip = AutoTokenizer.from_pretrained(self._tower.path)
        # Not cut to one segment: long instructions become several, as CDPruner's code has it.
        return lambda text: truncate_clip_ids(
            tuple(clip(text, truncation=False, verbose=False)["input_ids"])
        )

    def _words(self, text: str) -> Ids:
        parts = [self._language(word) for word in split_content_words(text)]
        return tuple(token for part in parts for token in part)

    def _language(self, text: str) -> Ids:
        ids = self._info.get_tokenizer().encode(text, add_special_tokens=False)
        # A literal image token has no meaning here, and in some models no embedding.
        return tuple(token for token in ids if token != self._image_token)
