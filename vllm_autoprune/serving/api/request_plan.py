"""Plans of a request's images: K, cache identity, instruction ids; before anything is processed.

All of it follows from image sizes, the state and the request. Cached data of an image is found by
content: by the digest of the source here, by that of the processed pixels in the worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy
import torch
from PIL import Image
from vllm.multimodal.parse import ImageProcessorItems

from vllm_autoprune.serving.api.image_split import Slot, SplitImage, SplitPrompt, split_images
from vllm_autoprune.serving.api.instruction import extract_prompt_instruction
from vllm_autoprune.serving.api.instruction_tokens import InstructionTokenizer
from vllm_autoprune.serving.api.item_plans import ItemPlans
from vllm_autoprune.serving.api.named_images import NamedImage, NamedImages
from vllm_autoprune.serving.api.pruning_choice import ImageChoice, resolve_choices, state_label
from vllm_autoprune.serving.api.recall import RecallItem, choose_recalls, expand_marks
from vllm_autoprune.serving.api.request_fields import (
    PruningRequest,
    parse_request,
    request_error,
)
from vllm_autoprune.serving.api.resized_images import choose_sizes
from vllm_autoprune.serving.shared.kv_blocks import kv_block_size
from vllm_autoprune.serving.shared.placeholders import Placeholders, TokenCount
from vllm_autoprune.serving.shared.plan import (
    LANGUAGE_IDS,
    NO_KEY,
    ItemPlan,
)
from vllm_autoprune.serving.shared.served_state import ServedState

if TYPE_CHECKING:
    from vllm.inputs import MultiModalHashes
    from vllm.multimodal.parse import ImageSize, MultiModalDataItems
    from vllm.multimodal.processing import BaseProcessingInfo, ProcessorInputs

    HashInputs = Callable[[ProcessorInputs], MultiModalHashes]

logger = logging.getLogger("vllm.autoprune")

_PICTURES = (Image.Image, numpy.ndarray, torch.Tensor)
"""Types of an image whose size vLLM can tell."""

_LOOKBACK = 4096
"""Token ids before the first image in which its question is looked for."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Plans of a request's images and the cache identities of all its items.

    An image that is split or recalled has several plans; ``sources`` is the image of each plan, and
    ``prompt`` the token ids with a placeholder for each, both None where every image has one.
    ``contents`` identifies what is processed for each plan: the same for all plans of an image.
    ``choices`` are what the plans were made from, and ``label`` the name that metrics count them
    under; there are none where vLLM profiles. ``salt`` is the request's ``cache_salt``.
    """

    items: tuple[ItemPlan, ...]
    hashes: Mapping[str, list[str]]
    choices: tuple[ImageChoice, ...] = ()
    label: str = ""
    salt: str = ""
    contents: tuple[str, ...] = ()
    sources: tuple[int, ...] | None = None
    prompt: list[int] | None = None

    def contents_of_pruned(self) -> dict[str, str]:
        """Contents of the images that lose tokens, by the cache identities of their items."""
        of_items = zip(self.hashes.get("image", ()), self.items, self.contents, strict=False)
        return {identity: content for identity, item, content in of_items if not item.keeps_all}


class RequestPlanner:
    """Makes the plans of one served model's requests.

    ``hash_inputs`` is the stock processor's ``_get_mm_hashes``.
    """

    def __init__(
        self,
        info: BaseProcessingInfo,
        served: ServedState,
        placeholders: Placeholders,
        hash_inputs: HashInputs,
    ) -> None:
        self._info = info
        self._served = served
        self._placeholders = placeholders
        self._hash_inputs = hash_inputs
        self._named = NamedImages()
        if served.state.core is not None and placeholders.unsplittable:
            logger.warning(
                "Questions about one image do not share the core of state %r: this model %s.",
                served.state.name,
                placeholders.unsplittable,
            )

    @cached_property
    def _tokenizer(self) -> InstructionTokenizer:
        image_token = self._placeholders.token(self._info)
        return InstructionTokenizer(self._info, self._served.tower, image_token)

    @cached_property
    def _suffix(self) -> str:
        """What the chat template puts after the last user turn; empty where there is none."""
        mark = "\u2402"
        try:
            rendered = self._info.get_tokenizer().apply_chat_template(
                [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
            )
        except (ValueError, TypeError, AttributeError):
            return ""
        return str(rendered).rpartition(mark)[2]

    def plan_profiling(self, inputs: ProcessorInputs) -> RequestPlan:
        """Plans of dummy images: the server's own budget, the longest text that may be read."""
        hashes = self._hash_inputs(inputs)
        policy = self._served.policy()
        instruction, _ = self._tokenizer.tokenize("profile", policy.needs)
        reads = not policy.needs.isdisjoint({"language", "words"})
        longest = (0,) * LANGUAGE_IDS if reads else ()
        plans = []
        for i in range(len(hashes.get("image", []))):
            whole = self._count_tokens(inputs, inputs.mm_data_items["image"].get_image_size(i))
            budget, size = policy.at(whole.tokens, whole.tiles).budget, whole.tokens
            plans.append(ItemPlan(budget, NO_KEY, instruction, longest, profile=True, tokens=size))
        return RequestPlan(tuple(plans), hashes)

    def plan_request(self, inputs: ProcessorInputs, fields: object, salt: str) -> RequestPlan:
        """Plans and cache identities of a request's images; ``fields`` is its pruning entry.

        Raises BudgetError or RequestError.
        """
        hashes = self._hash_inputs(inputs)
        images = hashes.get("image", [])
        request = parse_request(fields)
        if not images or not prunable(inputs.mm_data_items):
            return RequestPlan((), hashes)
        images_seen = self._identify_contents(inputs, images, salt)
        counts = [self._count_tokens(inputs, size) for _, size in images_seen]
        choices = resolve_choices(self._served, request, counts)
        sizes = [size for _, size in images_seen]
        choices = choose_sizes(self._info, self._placeholders, inputs, sizes, choices)
        texts = self._instructions(inputs, request.instructions, choices)
        ids = self._tokenizer.tokenize_each(texts, [choice.needs for choice in choices])
        known = [content for content, _ in images_seen]
        prompt, entries = self._recall(inputs, request, choices, known)
        split = self._split(inputs, prompt, entries, choices, texts)
        slots = tuple(map(Slot, range(len(entries)))) if split is None else split.slots
        items = ItemPlans(images, known, choices, ids)
        for slot in slots:
            entry = entries[slot.image]
            if isinstance(entry, RecallItem):
                needs = choices[entry.image].needs
                turn = (request.recall_turns or [])[entry.turn]
                items.add_recall(entry, self._tokenizer.tokenize(turn.text, needs))
            else:
                items.add(replace(slot, image=entry))
        hashes = {**hashes, "image": items.identities}
        label = state_label(self._served, request)
        contents = tuple(items.contents)
        plan = RequestPlan(tuple(items.plans), hashes, items.served(), label, salt, contents)
        if prompt is inputs.prompt and split is None:
            return plan
        ids_of_items = prompt if split is None else split.ids
        return replace(plan, sources=tuple(items.sources), prompt=list(ids_of_items))

    def _recall(
        self,
        inputs: ProcessorInputs,
        request: PruningRequest,
        choices: Sequence[ImageChoice],
        contents: Sequence[str],
    ) -> tuple[Sequence[int], Sequence[int | RecallItem]]:
        """Token ids of the prompt, and what its image tokens stand for: images, or recalls.

        Raises RequestError where a request asks for recall of a model that cannot.
        """
        if request.recall and self._placeholders.unsplittable:
            what = f"later turns cannot recall tokens: this model {self._placeholders.unsplittable}"
            raise request_error("recall", what, "leave it out")
        turns = request.recall_turns
        if not turns:
            return inputs.prompt, range(len(choices))
        recall = self._served.rules.recall if request.recall is None else request.recall
        items = choose_recalls(turns, recall, choices, contents)
        token = self._placeholders.token(self._info)
        return expand_marks(inputs.prompt, token, len(choices), turns, items)

    def _split(
        self,
        inputs: ProcessorInputs,
        prompt: Sequence[int],
        entries: Sequence[int | RecallItem],
        choices: Sequence[ImageChoice],
        texts: Sequence[str],
    ) -> SplitPrompt | None:
        """The prompt with cores and deltas, or None where a split would share nothing.

        Nothing is shared without a prefix cache, and nothing is gained where the question stands
        before the image, for it is part of the prefix then.
        """
        block = kv_block_size(self._info.ctx.model_config)
        may_split = [choice.core > 0 and choice.reads_instruction for choice in choices]
        if block is None or self._placeholders.unsplittable or not any(may_split):
            return None
        if set(inputs.mm_data_items) != {"image"}:
            return None
        token = self._placeholders.token(self._info)
        before = self._text_before_image(inputs.prompt, token)
        images = [
            SplitImage(choice.kept, choice.core if may and text not in before else 0, text)
            for choice, may, text in zip(choices, may_split, texts, strict=True)
        ]
        split = [
            SplitImage(entry.budget, 0, entry) if isinstance(entry, RecallItem) else images[entry]
            for entry in entries
        ]
        return split_images(prompt, token, split, block)

    def _text_before_image(self, prompt: Sequence[int], token: int) -> str:
        first = prompt.index(token) if token in prompt else 0
        text: str = self._info.get_tokenizer().decode(prompt[max(0, first - _LOOKBACK) : first])
        return text

    def _identify_contents(
        self, inputs: ProcessorInputs, images: Sequence[str], salt: str
    ) -> list[NamedImage]:
        """Digest of each image's content under the request's salt, and its size.

        A client's ``uuid`` is no part of it: under one name two requests may send two pictures.
        An image that comes by its ``uuid`` alone is the one last sent under it.
        """
        names = (inputs.mm_uuid_items or {}).get("image")
        digests: Sequence[str] = images
        if names is not None:
            only = inputs.mm_data_items.select({"image"})
            unnamed = replace(inputs, mm_data_items=only, mm_uuid_items=None)
            digests = self._hash_inputs(unnamed)["image"]
        items = inputs.mm_data_items["image"]
        contents: list[NamedImage] = []
        for i, (name, digest) in enumerate(zip(images, digests, strict=True)):
            if items.get(i) is None:
                contents.append(self._named.find(name, salt))
                continue
            contents.append((repr((digest, salt)), items.get_image_size(i)))
            if names is not None and names[i] is not None and inputs.cache is not None:
                self._named.remember(name, salt, contents[i])
        return contents

    def _count_tokens(self, inputs: ProcessorInputs, size: ImageSize | None) -> TokenCount:
        """Count an image's tokens and tiles: a pure function of its size and of the request."""
        if size is None:  # an unknown uuid, which vLLM's caches will not know either
            return self._placeholders.count_largest(self._info)
        return self._placeholders.count(self._info, size, inputs.hf_processor_mm_kwargs)

    def _instructions(
        self, inputs: ProcessorInputs, texts: Sequence[str] | None, choices: Sequence[ImageChoice]
    ) -> list[str]:
        """One text an image: the request's, else what the prompt holds after its last image."""
        if not any(choice.reads_instruction for choice in choices):
            return [""] * len(choices)
        if texts is not None and len(texts) == len(choices):
            return list(texts)
        # No messages (a raw prompt), or messages of a form in which the images were not found.
        text = extract_prompt_instruction(
            inputs.prompt,
            self._placeholders.token(self._info),
            self._info.get_tokenizer().decode,
            self._suffix,
        )
        return [text] * len(choices)


def prunable(mm_items: MultiModalDataItems) -> bool:
    """False for embeddings made elsewhere: they come without the signals that states read.

    Also for what is no picture, which vLLM's own processor refuses.
    """
    images = mm_items.get("image")
    if not isinstance(images, ImageProcessorItems):
        return False
    return all(one is None or isinstance(one, _PICTURES) for one in images.get_all())
