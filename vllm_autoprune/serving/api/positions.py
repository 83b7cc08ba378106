"""Positions that a request takes: a bound on them, as on its tokens.

Under M-RoPE a pruned image takes as many positions as the whole one, its longer side in tokens,
however few of its tokens are kept. So a prompt may be shorter than its positions::

    tokens     [text][ K kept ][text]                 bounded by vLLM: max_model_len
    positions  [text][ max(height, width)   ][text]   bounded here, by the same number

Stock vLLM needs no such bound for images: a whole image has at least as many tokens as positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.multimodal.processing.processor import PromptUpdateDetails

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFieldElem
    from vllm.multimodal.processing.processor import MultiModalPromptUpdates, ResolvedPromptUpdate
    from vllm.v1.engine import EngineCoreRequest


ItemFields = Mapping[str, "MultiModalFieldElem"]
"""Processed tensors of an image or video, by name."""


@dataclass(frozen=True, slots=True)
class ItemSize:
    """Size of one processed image or video.

    ``span`` is the number of positions that the whole item takes; None where they are those of its
    rows, one after another. ``frames`` is T of a video, 0 of an image.
    """

    span: int | None = None
    frames: int = 0


@dataclass
class SizedContent(PromptUpdateDetails):
    """Prompt text of an item with the item's size.

    vLLM's processor caches keep the text of an item in the API server even where its tensors are in
    another process, so the size is always known.
    """

    size: ItemSize = ItemSize()


def find_placeholders(content: PromptUpdateDetails) -> list[bool]:
    """Which tokens of an item's prompt text are placeholders of its rows."""
    if content.is_embed is None:
        return [True] * len(content.full)
    flags: list[bool] = content.is_embed(content.full).tolist()
    return flags


def get_size(content: PromptUpdateDetails) -> ItemSize:
    """Size of the item that a prompt text belongs to."""
    return content.size if isinstance(content, SizedContent) else ItemSize()


def with_size(update: ResolvedPromptUpdate, size: ItemSize) -> ResolvedPromptUpdate:
    """A prompt update whose text has the size of its item, of which visual tokens were measured."""
    content = update.content
    text = len(content.full) - sum(find_placeholders(content))
    if size.span is not None:
        size = replace(size, span=size.span + text)
    return replace(update, content=SizedContent(content.full, content.is_embed, size))


def sum_surplus(updates: MultiModalPromptUpdates, image_numbers: Sequence[int]) -> int:
    """Positions that a prompt takes beyond its number of tokens; negative where it takes fewer.

    ``updates`` are the texts that stand in the prompt. ``image_numbers`` has the image of each, as
    an image may stand there in several parts, which share its positions; empty where none does.
    """
    surplus = 0
    spans: dict[tuple[str, int], int] = {}
    for modality, items in updates.items():
        for i, updates_of_item in enumerate(items):
            number = image_numbers[i] if modality == "image" and image_numbers else i
            for update in updates_of_item:
                span = get_size(update.content).span
                if span is not None:
                    spans[modality, number] = span
                    surplus -= len(update.content.full)
    return surplus + sum(spans.values())


def limit_positions(request: EngineCoreRequest, surplus: int, max_model_len: int) -> None:
    """Keep all positions of a request below ``max_model_len``, those of generated tokens included.

    Shortens what may be generated, as vLLM does where a prompt leaves less room than was asked for.
    Raises ``VLLMValidationError``, which vLLM answers by 400, where the prompt leaves none.
    """
    from vllm.exceptions import VLLMValidationError

    if surplus <= 0:
        return
    tokens = len(request.prompt_token_ids or ())
    sampling = request.sampling_params
    room = max_model_len - tokens - surplus
    if room < (0 if sampling is None else 1):
        raise VLLMValidationError(
            f"The decoder prompt has {tokens} tokens at {tokens + surplus} positions, for which "
            f"the maximum model length of {max_model_len} has no room. A pruned image or video "
            "takes as many positions as the whole one, the longer side of its grid of tokens: send "
            "fewer, or shorter ones.",
            parameter="messages",
            value=tokens + surplus,
        )
    if sampling is None:
        return
    assert sampling.max_tokens is not None  # set by InputProcessor.process_inputs
    if sampling.min_tokens > room:
        raise VLLMValidationError(
            f"min_tokens must be less than or equal to {room}, which is how many positions the "
            f"prompt leaves, got {sampling.min_tokens}.",
            parameter="min_tokens",
            value=sampling.min_tokens,
        )
    sampling.max_tokens = min(sampling.max_tokens, room)
