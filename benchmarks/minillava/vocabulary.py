"""Both tokenizers: the language model's and the CLIP text tower's, trained on our wordings.

Knows nothing about scenes, images or models.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from benchmarks.minillava.questions import every_text
from benchmarks.minillava.scenes import COLOURS, SHAPES

UNKNOWN, BEGIN, END, PAD, IMAGE_TOKEN = "<unk>", "<s>", "</s>", "<pad>", "<image>"
LANGUAGE_SPECIALS = (UNKNOWN, BEGIN, END, PAD, IMAGE_TOKEN)
CLIP_BEGIN, CLIP_END = "<|startoftext|>", "<|endoftext|>"
CLIP_LENGTH = 40

BEFORE_IMAGE = "USER: "
AFTER_IMAGE = "\n{question} ASSISTANT:"


def prompt(question: str) -> str:
    """The LLaVA-1.5 prompt of one question about one image."""
    return BEFORE_IMAGE + IMAGE_TOKEN + AFTER_IMAGE.format(question=question)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer is known to have."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(f"the tokenizer has no token {token!r}")
    return found


def _answers() -> list[str]:
    return [f" {word}" for word in (*COLOURS, *SHAPES, "yes", "no", *map(str, range(10)))]


def language_tokenizer() -> Tokenizer:
    """Byte-level BPE that adds no token of its own, so chat and plain prompts agree."""
    tokenizer = Tokenizer(BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=448,
        min_frequency=1,
        special_tokens=[AddedToken(token, special=True) for token in LANGUAGE_SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [prompt(text) for text in every_text()] + _answers() * 50
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def clip_tokenizer() -> Tokenizer:
    """Lower-casing BPE with CLIP's two specials; the end token is the one pooled on."""
    tokenizer = Tokenizer(BPE(unk_token=CLIP_END))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(every_text() + _answers() * 50, trainer)
    # Added last, so that the end token's id is the largest, as in OpenAI's CLIP.
    tokenizer.add_special_tokens([AddedToken(CLIP_BEGIN), AddedToken(CLIP_END)])
    begin, end = token_id(tokenizer, CLIP_BEGIN), token_id(tokenizer, CLIP_END)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLIP_BEGIN} $A {CLIP_END}",
        pair=f"{CLIP_BEGIN} $A {CLIP_END} $B:1 {CLIP_END}:1",
        special_tokens=[(CLIP_BEGIN, begin), (CLIP_END, end)],
    )
    return tokenizer
