"""Prompt format and tokenizers of the language model and of the CLIP text tower."""

from __future__ import annotations

from collections.abc import Sequence

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
from benchmarks.minillava.wordings import answer_words, tokenizer_texts

UNKNOWN, BEGIN, END, PAD, IMAGE_TOKEN = "<unk>", "<s>", "</s>", "<pad>", "<image>"
_LANGUAGE_SPECIALS = (UNKNOWN, BEGIN, END, PAD, IMAGE_TOKEN)
CLIP_BEGIN, CLIP_END = "<|startoftext|>", "<|endoftext|>"
CLIP_LENGTH = 40
"""Longest input of the text tower, in tokens."""

BEFORE_IMAGE = "USER: "
AFTER_IMAGE = "\n{question} ASSISTANT:"

VOCABULARY = 640

# A name such as "red square" is one token ("superwords": Liu et al. 2025, arXiv 2503.13423). With
# two tokens, a model trained from scratch looked shapes up by the last word for a thousand steps.
_NAME = f" (?:{'|'.join(COLOURS)}) (?:{'|'.join((*SHAPES, SIGN, 'shapes'))})\\b"
_WORDS = r"| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+"
_SPACES = r"|\s+"


def prompt(question: str) -> str:
    """The LLaVA-1.5 prompt of one question about one image."""
    return BEFORE_IMAGE + IMAGE_TOKEN + AFTER_IMAGE.format(question=question)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token; raises KeyError if the tokenizer does not have it."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise KeyError(f"the tokenizer has no token {token!r}")
    return number


def _trainer(size: int, specials: list[AddedToken]) -> BpeTrainer:
    return BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )


def train_tokenizer(
    texts: Sequence[str], specials: Sequence[str], unknown: str, size: int, lines: str = ""
) -> Tokenizer:
    """Train a byte-level BPE tokenizer in which a name is one token.

    It adds no special tokens to a prompt, so chat and completion prompts agree. No training text
    has a number of two digits, so every digit of a number is a token of its own. `lines` is a
    pattern that is tried before that of white space.
    """
    tokenizer = Tokenizer(BPE(unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(f"{_NAME}{_WORDS}{lines}{_SPACES}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokens = [AddedToken(token, special=True) for token in specials]
    tokenizer.train_from_iterator(texts, _trainer(size, tokens))
    return tokenizer


def language_tokenizer() -> Tokenizer:
    """Train the tokenizer of the language model."""
    texts = [prompt(text) for text in tokenizer_texts()]
    texts += [f" {word}" for word in answer_words()] * 50
    return train_tokenizer(texts, _LANGUAGE_SPECIALS, UNKNOWN, VOCABULARY)


def clip_tokenizer() -> Tokenizer:
    """Train the lower-casing BPE tokenizer of the text tower, with CLIP's begin and end tokens."""
    tokenizer = Tokenizer(BPE(unk_token=CLIP_END))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    texts = tokenizer_texts() + [f" {word}" for word in answer_words()] * 50
    tokenizer.train_from_iterator(texts, _trainer(VOCABULARY - 48, []))
    # Added last: CLIP pools on the end token, which has the largest id, as in OpenAI's CLIP.
    tokenizer.add_special_tokens([AddedToken(CLIP_BEGIN), AddedToken(CLIP_END)])
    begin, end = token_id(tokenizer, CLIP_BEGIN), token_id(tokenizer, CLIP_END)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLIP_BEGIN} $A {CLIP_END}",
        pair=f"{CLIP_BEGIN} $A {CLIP_END} $B:1 {CLIP_END}:1",
        special_tokens=[(CLIP_BEGIN, begin), (CLIP_END, end)],
    )
    return tokenizer
