"""Prompt format and tokenizer of mini-Qwen3-VL, with Qwen's special tokens."""

from __future__ import annotations

from tokenizers import Tokenizer

from benchmarks.minillava.vocabulary import train_tokenizer
from benchmarks.minillava.wordings import answer_words, tokenizer_texts
from benchmarks.miniqwen.pages import WORDS
from benchmarks.miniqwen.wordings import BRIEF, PAGE_KINDS, SEEN, UNSEEN

PAD, TURN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_TOKEN, VIDEO_TOKEN = "<|image_pad|>", "<|video_pad|>"
SPECIALS = (PAD, TURN, END, VISION_START, VISION_END, IMAGE_TOKEN, VIDEO_TOKEN)

BEFORE_IMAGE = f"{TURN}user\n{VISION_START}"
AFTER_IMAGE = f"{VISION_END}{{question}}{END}\n{TURN}assistant\n"

VOCABULARY = 768


def prompt(question: str) -> str:
    """The chat template's prompt of one question about one image."""
    return BEFORE_IMAGE + IMAGE_TOKEN + AFTER_IMAGE.format(question=question)


def _page_texts() -> list[str]:
    """Sentences that contain every wording of pages and every word for its slots."""
    texts: list[str] = []
    for kind in PAGE_KINDS:
        for wording in (*SEEN[kind], *UNSEEN[kind], *BRIEF[kind]):
            for i, word in enumerate(WORDS):
                other = WORDS[(i + 7) % len(WORDS)]
                slots = {"word": word, "label": word, "head": other, "first": word}
                texts.append(wording.format(**slots, second=other, number=i % 10))
    return texts


def language_tokenizer() -> Tokenizer:
    """Train the byte-level BPE tokenizer; a name or a word of pages is one token."""
    texts = [prompt(text) for text in (*tokenizer_texts(), *_page_texts())]
    words = [f" {word}" for word in (*answer_words(), *WORDS)] * 50
    # A new line ends before the space of an answer, which belongs to the token of the answer.
    return train_tokenizer([*texts, *words], SPECIALS, PAD, VOCABULARY, r"|\n")
