"""Questions by which a search chose a state, recognised by the content of their images.

A search splits questions by image, because questions about one image correlate. A state's
provenance therefore has digests of the images. They are found in a file of questions even if it was
extended or reordered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from vllm_autoprune.evaluation.asked_question import AskedQuestion

_Question = TypeVar("_Question", bound=AskedQuestion)

_DIGITS = 8


def format_images(digests: Iterable[str]) -> str:
    """The ``chosen_by`` of a provenance, from the SHA-256 of images."""
    return " ".join(sorted({digest[:_DIGITS] for digest in digests}))


def select_chosen(questions: Sequence[_Question], images: str) -> list[_Question]:
    """The questions about at least one of ``images``, as :func:`format_images` writes them."""
    digests = set(images.split())
    return [
        question
        for question in questions
        if any(picture.digest[:_DIGITS] in digests for picture in question.pictures)
    ]
