"""Positions that a request takes: which items keep their places, and a bound on all of them.

An image whose kept tokens keep their places takes as many positions as the whole image, however few
tokens are kept: one for each of its N tokens and its text, or under M-RoPE its longer side in
tokens. So a prompt may have fewer tokens than positions::

    tokens     [text][ K kept ][text]                 bounded by vLLM: max_model_len
    positions  [text][     the whole image     ][text]   bounded here, by the same number

Stock vLLM needs no such bound for images, because a whole image has at least as many tokens as
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.multimodal.processing.processor import PromptUpdateDetails

from vllm_autoprune.errors import Refusal
from vllm_autoprune.serving.plan import MAX_SPAN

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFieldElem
    from vllm.multimodal.processing.processor import ResolvedPromptUpdate
    from vllm.v1.engine import EngineCoreRequest


_SHARE = 0.75
"""Share of the context within which items keep their places."""

ItemFields = Mapping[str, "MultiModalFieldElem"]
"""Processed tensors of an image or video, by name."""


@dataclass(frozen=True, slots=True)
class ItemSize:
    """Size of one processed image or video.

    ``span`` is the number of positions that the whole item takes; None if its rows take one each,
    in order. ``frames`` is T of a video, and 0 for an image.
    """

    span: int | None = None
    frames: int = 0


@dataclass
class SizedContent(PromptUpdateDetails):
    """Prompt text of an item, with the item's size attached.

    vLLM's processor caches keep the text of an item in the API server even if its tensors are in
    another process, so the size is always available.
    """

    size: ItemSize = ItemSize()


def find_placeholders(content: PromptUpdateDetails) -> list[bool]:
    """Mask of the tokens of an item's prompt text that are placeholders of its rows."""
    if content.is_embed is None:
        return [True] * len(content.full)
    flags: list[bool] = content.is_embed(content.full).tolist()
    return flags


def get_size(content: PromptUpdateDetails) -> ItemSize:
    """Size of the item that a prompt text belongs to."""
    return content.size if isinstance(content, SizedContent) else ItemSize()


def with_size(
    update: ResolvedPromptUpdate, measure: Callable[[int], ItemSize]
) -> ResolvedPromptUpdate:
    """The prompt update with the size of its item attached, measured by its number of rows."""
    content = update.content
    rows = sum(find_placeholders(content))
    size = measure(rows)
    text = len(content.full) - rows
    if size.span is not None:
        size = replace(size, span=size.span + text)
    return replace(update, content=SizedContent(content.full, content.is_embed, size))


@dataclass(frozen=True, slots=True)
class PromptItem:
    """An item of a prompt: ``length`` placeholders from token ``offset`` on.

    ``span`` is the number of positions of the whole item; None if each token takes one. ``image``
    is the same for all parts of one image, which share its positions.
    """

    offset: int
    length: int
    span: int | None
    image: Hashable


class PositionCounter:
    """Counts the positions that a prompt takes beyond its tokens, by its items in order."""

    def __init__(self) -> None:
        self.surplus = 0
        """Positions minus tokens so far; negative if the prompt takes fewer positions than tokens.
        """
        self._images = set[Hashable]()

    def add(self, item: PromptItem) -> None:
        """Count an item that keeps its places: an image's first part takes all its positions."""
        if item.span is not None:
            span = 0 if item.image in self._images else item.span
            self._images.add(item.image)
            self.surplus += span - item.length


def pack_items(items: Sequence[PromptItem], context: int) -> tuple[set[int], int]:
    """Indices of the items to pack, and the positions that the prompt takes beyond its tokens.

    An item keeps its places if it ends within three quarters of the ``context``. From there on,
    tokens stand one after the other, so that text and later items have room. This depends only on
    what comes before the item, so prompts with a common prefix share its KV.
    """
    packed = set[int]()
    keeps = dict[Hashable, bool]()
    counter = PositionCounter()
    for i in sorted(range(len(items)), key=lambda i: items[i].offset):
        item = items[i]
        if item.span is None:
            continue
        if item.image not in keeps:
            end = item.offset + counter.surplus + item.span
            fits = end <= _SHARE * context and item.span <= MAX_SPAN
            keeps[item.image] = fits or item.span <= item.length
        if keeps[item.image]:
            counter.add(item)
        else:
            packed.add(i)
    return packed, counter.surplus


def limit_positions(
    request: EngineCoreRequest, surplus: int, max_model_len: int
) -> None:
    """Keep all positions of a request, also of generated tokens, below ``max_model_len``.

    Shortens the generation, as vLLM does if a prompt leaves less room than requested. Raises
    ``VLLMValidationError``, which vLLM answers by 400, if the prompt leaves no room.
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
            "takes as many positions as the whole one: send fewer, or shorter ones.",
            parameter=f"messages#{Refusal.TOO_LONG}",
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
