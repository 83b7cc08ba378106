"""Words of a question that say what it is about, as MMTok's code chooses them."""

from __future__ import annotations

import re

_ENDINGS = (
    "Answer the question using a single word or phrase.",
    "Answer with the option's letter from the given choices directly.",
)
"""Instructions that benchmarks put behind a question."""

_FREQUENT = frozenset({
    "a", "an", "the", "is", "are", "was", "were", "be", "been", "being", "have", "has", "had",
    "do", "does", "did", "it", "they", "he", "she", "we", "you", "i", "what", "where", "when",
    "why", "how", "who", "which", "and", "or", "but", "so", "if", "then", "question", "answer",
    "to", "for", "with", "by", "from", "at", "into", "onto", "upon",
})  # fmt: skip
"""Words that say nothing about the content of an image."""


def split_content_words(text: str) -> list[str]:
    """The words of a question that are not frequent ones; the whole text where none is left."""
    bare = text.replace("<image>", "")
    for ending in _ENDINGS:
        bare = bare.replace(ending, "")
    words = [word for word in re.findall(r"\b\w+\b", bare) if word.lower() not in _FREQUENT]
    return words or [bare.strip()]
