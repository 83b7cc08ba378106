"""Both tokenizers: the language model's and the CLIP text tower's, trained on our wordings.

Knows nothing about scenes, images or models.
"""

from __future__ import annotations

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from benchmarks.minillava.layout import COLOURS, SHAPES, SIGN
from benchmarks.minillava.wordings import answer_words, every_text

UNKNOWN, BEGIN, END, PAD, IMAGE_TOKEN = "<unk>", "<s>", "</s>", "<pad>", "<image>"
_LANGUAGE_SPECIALS = (UNKNOWN, BEGIN, END, PAD, IMAGE_TOKEN)
CLIP_BEGIN, CLIP_END = "<|startoftext|>", "<|endoftext|>"
CLIP_LENGTH = 40
"""Positions of the text tower."""

BEFORE_IMAGE = "USER: "
AFTER_IMAGE = "\n{question} ASSISTANT:"

VOCABULARY = 640

# A name is one token, across the space ("superwords": Liu et al. 2025, arXiv 2503.13423). A trained
# model puts the words of a name together in its first layers; one that starts from nothing looked
# shapes up by their last word alone for a thousand steps.
_NAME = f" (?:{'|'.join(COLOURS)}) (?:{'|'.join((*SHAPES, SIGN, 'shapes'))})\\b"
_WORDS = r"| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


def prompt(question: str) -> str:
    """The LLaVA-1.5 prompt of one question about one image."""
    return BEFORE_IMAGE + IMAGE_TOKEN + AFTER_IMAGE.format(question=question)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer is known to have."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(f"the tokenizer has no token {token!r}")
    return found


def _trainer(size: int, specials: list[AddedToken]) -> BpeTrainer:
    return BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def language_tokenizer() -> Tokenizer:
    """Byte-level BPE that adds no token of its own, so chat and plain prompts agree.

    No text holds a number of two digits, so a number's digits stay one token each.
    """
    tokenizer = Tokenizer(BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_NAME + _WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True) for token in _LANGUAGE_SPECIALS]
    texts = [prompt(text) for text in every_text()]
    texts += [f" {word}" for word in answer_words()] * 50
    tokenizer.train_from_iterator(texts, _trainer(VOCABULARY, specials))
    return tokenizer


def clip_tokenizer() -> Tokenizer:
    """Lower-casing BPE with CLIP's two specials; the end token is the one pooled on."""
    tokenizer = Tokenizer(BPE(unk_token=CLIP_END))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    texts = every_text() + [f" {word}" for word in answer_words()] * 50
    tokenizer.train_from_iterator(texts, _trainer(VOCABULARY - 48, []))
    # Added last, so that the end token's id is the largest, as in OpenAI's CLIP.
    tokenizer.add_special_tokens([AddedToken(CLIP_BEGIN), AddedToken(CLIP_END)])
    begin, end = token_id(tokenizer, CLIP_BEGIN), token_id(tokenizer, CLIP_END)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLIP_BEGIN} $A {CLIP_END}",
        pair=f"{CLIP_BEGIN} $A {CLIP_END} $B:1 {CLIP_END}:1",
        special_tokens=[(CLIP_BEGIN, begin), (CLIP_END, end)],
    )
    return tokenizer
