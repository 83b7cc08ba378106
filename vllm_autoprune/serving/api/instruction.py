"""Extraction of an image's instruction and detail from the request.

The instruction is the text of the user turn that holds the image. It comes from OpenAI-style
messages, or from a prompt where there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from vllm_autoprune.serving.shared.detail_budgets import LEVELS, Detail
from vllm_autoprune.serving.shared.plan import RELEVANCE_IDS

_LAST_IDS = 4 * RELEVANCE_IDS
"""Token ids of a prompt that are decoded, far more than are used of the text."""

_IMAGE_PARTS = ("image_url", "image", "image_pil", "input_image", "image_embeds")


def extract_instructions(messages: Sequence[object]) -> list[str]:
    """Extract one instruction for each image, in the order of the images in the conversation.

    Later turns never change it, so what an image keeps, and its prefix cache, survive a
    conversation. Other turns and the chat template do not belong to it.
    """
    instructions: list[str] = []
    for content in _contents(messages):
        texts = [text for part in content if (text := part_text(part)) is not None]
        images = sum(shows_image(part) for part in content)
        instructions += ["\n".join(texts).strip()] * images
    return instructions


def extract_details(messages: Sequence[object]) -> list[Detail | None]:
    """Extract the detail of each image, in the same order; None for ``auto``, or none given.

    Later turns never change it, so an image keeps the budget that it was sent with.
    """
    return [
        _detail(part) for content in _contents(messages) for part in content if shows_image(part)
    ]


def _contents(messages: Sequence[object]) -> Iterator[Sequence[object]]:
    """The content of every message that may hold images."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, Sequence) and not isinstance(content, str):
            yield content


def _detail(part: object) -> Detail | None:
    """The level within ``image_url``, or beside it, where the Responses API has it."""
    if not isinstance(part, Mapping):
        return None
    image = part.get("image_url")
    detail = image.get("detail") if isinstance(image, Mapping) else part.get("detail")
    return next((level for level in LEVELS if level == detail), None)


def message_parts(message: object) -> Sequence[object]:
    """The parts of a message; a text alone is one."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return [content]
    return content if isinstance(content, Sequence) else []


def part_text(part: object) -> str | None:
    """The text of a part; None for one of another kind."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") in ("text", "input_text"):
        text = part.get("text")
        return text if isinstance(text, str) else None
    return None


def shows_image(part: object) -> bool:
    """Whether a part is an image, or its embeddings."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in _IMAGE_PARTS if kind is not None else any(key in part for key in _IMAGE_PARTS)


def extract_prompt_instruction(
    ids: Sequence[int], image_token: int, decode: Callable[[Sequence[int]], str], suffix: str
) -> str:
    """Extract the text after the last image, for a prompt that came without messages.

    ``suffix`` is what the chat template appends for generation; it is cut off where the prompt
    ends in it. Later turns cannot be told apart here, so they belong to the instruction.
    """
    last = max((i for i, token in enumerate(ids) if token == image_token), default=-1)
    text = decode(ids[max(last + 1, len(ids) - _LAST_IDS) :]).strip()
    ending = suffix.strip()
    return text.removesuffix(ending).strip() if ending else text
