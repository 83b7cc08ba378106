"""Plans of a request's images: K, cache identity, instruction ids; before any is processed.

All of it follows from image sizes, the state and the request. Cached data of an image is found by
the digest of its content.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from hashlib import sha256
from threading import Lock
from typing import TYPE_CHECKING

import numpy
import torch
from cachetools import LRUCache
from PIL import Image
from vllm.multimodal.parse import ImageProcessorItems

from vllm_autoprune.serving.api.choices import find_needs, resolve_plans, state_label
from vllm_autoprune.serving.api.engine_requests import RequestCounts
from vllm_autoprune.serving.api.instruction import (
    InstructionTokenizer,
    extract_prompt_instruction,
    find_question_turns,
)
from vllm_autoprune.serving.api.layout import (
    MAX_ITEMS,
    Placeholders,
    Slot,
    choose_recalls,
    expand_marks,
    limit_recalls,
    split_slots,
)
from vllm_autoprune.serving.api.request import PruningRequest, parse_request, request_error
from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.plan import (
    LANGUAGE_IDS,
    NO_KEY,
    ItemPlan,
    decode_state,
    hash_picture,
    make_cache_identity,
    make_core_identity,
    make_feature_key,
    make_name_identity,
    make_pixels_key,
    make_recall_identity,
)
from vllm_autoprune.serving.served_state import ServedState, kv_block_size
from vllm_autoprune.tpdsl.base_policy import INSTRUCTION_NEEDS
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET

if TYPE_CHECKING:
    from vllm.inputs import MultiModalHashes
    from vllm.multimodal.parse import ImageSize, MultiModalDataItems
    from vllm.multimodal.processing import BaseProcessingInfo, ProcessorInputs

    HashInputs = Callable[[ProcessorInputs], MultiModalHashes]

logger = logging.getLogger("vllm.autoprune")

_PICTURES = (Image.Image, numpy.ndarray, torch.Tensor)
"""Types of an image whose size vLLM can tell."""

_LOOKBACK = 4096
"""Token ids before an image in which its question is looked for."""

Size = tuple[int, int]
"""Width and height of an image."""


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """An item of a request: its image and plan, and what caches hold it by.

    ``identity`` is that of its tokens, ``key`` that of its processed tensors, which all items of an
    image have in common.
    """

    image: int
    plan: ItemPlan
    identity: str
    key: str


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Planned items of a request's images, and the cache identities of all its inputs.

    An image that is split or recalled has several items; ``prompt`` has a placeholder for each, and
    is None where every image has one. ``sizes`` are those that images are given before they are
    processed, None for their own. ``counts`` is None where vLLM profiles.
    """

    items: tuple[PlannedItem, ...]
    hashes: Mapping[str, list[str]]
    prompt: list[int] | None = None
    sizes: tuple[Size | None, ...] = ()
    counts: RequestCounts | None = None


_MAX_NAMES = 1 << 15
"""Names that a process remembers, the least recently used dropped first: about 15 MB."""

_NamedImage = tuple[str, "ImageSize | None"]
"""Digest of an image's content, and its size; no size where the name is not known."""


class NamedImages:
    """LRU map from ``uuid`` to content and size; names of one cache salt are unknown under another.

    A later request may send the name alone (``"image_url": null``). Cache identities are made of
    content, so the name has to be resolved before a cache is looked up.
    """

    def __init__(self) -> None:
        self._images: LRUCache[bytes, _NamedImage] = LRUCache(_MAX_NAMES)
        self._lock = Lock()  # several renderer threads may share one processor

    def remember(self, name: str, salt: str, image: _NamedImage) -> None:
        """Store the image sent under a name, replacing the one sent before."""
        with self._lock:
            self._images[_hash_name(name, salt)] = image

    def find(self, name: str, salt: str) -> _NamedImage:
        """The image last sent under a name; unknown names get a content that no image has."""
        key = _hash_name(name, salt)
        with self._lock:
            return self._images.get(key) or (f"unknown {key.hex()}", None)


def _hash_name(name: str, salt: str) -> bytes:
    """Fixed-length key of a name, because a client may send one of megabytes."""
    return sha256(repr((name, salt)).encode()).digest()


@depends_on("vllm.multimodal.parse:ImageProcessorItems", "get_image_size")
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
        longest = () if policy.needs.isdisjoint({"language", "words"}) else (0,) * LANGUAGE_IDS
        items = []
        for i, identity in enumerate(hashes.get("image", [])):
            size = inputs.mm_data_items["image"].get_image_size(i)
            count = self._placeholders.count(self._info, size, inputs.hf_processor_mm_kwargs)
            budget = policy.at(count.tokens, count.tiles).budget
            plan = ItemPlan(budget, NO_KEY, instruction, longest, profile=True, tokens=count.tokens)
            items.append(PlannedItem(i, plan, identity, identity))
        return RequestPlan(tuple(items), hashes)

    def plan_request(self, inputs: ProcessorInputs, fields: object, salt: str) -> RequestPlan:
        """Plans and cache identities of a request's images; ``fields`` is its pruning entry.

        Raises BudgetError or RequestError.
        """
        hashes = self._identify_contents(inputs)
        request = parse_request(fields)
        if not hashes.get("image") or not prunable(inputs.mm_data_items):
            return RequestPlan((), hashes)
        digests, image_sizes = self._resolve_names(inputs, hashes["image"], salt)
        counts = [
            # An unknown uuid has no size; vLLM's caches will not know it either.
            self._placeholders.count_largest(self._info)
            if size is None
            else self._placeholders.count(self._info, size, inputs.hf_processor_mm_kwargs)
            for size in image_sizes
        ]
        # K of each image, and a new size where the resize control shrinks it.
        plans = resolve_plans(self._served, request, counts)
        resized = [self._resize(inputs, *image) for image in zip(plans, image_sizes, strict=True)]
        plans, sizes = [plan for plan, _ in resized], tuple(size for _, size in resized)
        # The question of each image as token ids, where its policy reads it, and its features' key.
        needs = [find_needs(self._served, plan) for plan in plans]
        reads = [not needs_of_plan.isdisjoint(INSTRUCTION_NEEDS) for needs_of_plan in needs]
        texts = [""] * len(plans)
        if any(reads):
            texts = self._instructions(inputs, request.instructions, len(plans))
        tokenize = cache(self._tokenizer.tokenize)  # each text once, however often it is read
        for i, plan in enumerate(plans):
            plans[i] = plan.ask(*tokenize(texts[i], needs[i]))
            if not plan.keeps_all:  # features are kept of images whose tokens are chosen
                key = make_feature_key(digests[i], salt, _seed(inputs, i, plan))
                plans[i] = replace(plans[i], key=key)
        # Items of the prompt: what later turns recall, then cores and deltas.
        prompt, slots = self._add_recalls(inputs, request, plans, digests)
        prompt, slots = self._split(inputs, prompt, slots, plans, reads, texts, request.turns)
        # Plan and identity of each item; those of a recall follow from the item before it.
        items: list[PlannedItem] = []
        latest: dict[int, PlannedItem] = {}
        for slot in slots:
            i = slot.image
            content = repr((digests[i], salt))
            tensors_key = make_pixels_key(content, sizes[i])
            if slot.part == "recall":
                assert request.recall_turns is not None and slot.turn is not None
                text = request.recall_turns[slot.turn].text
                plan = latest[i].plan.recall(slot.budget)
                plan = plan.ask(*tokenize(text, find_needs(self._served, plan)))
                identity = make_recall_identity(latest[i].identity, slot.budget, plan.read)
            elif plans[i].keeps_all and sizes[i] is None:
                # The image is then what it is in stock vLLM, caches included.
                plan, identity, tensors_key = plans[i], digests[i], digests[i]
            else:
                core, delta = plans[i].split(slot.core)
                plan = {"whole": plans[i], "core": core, "delta": delta}[slot.part]
                identity = self._identify(plan, content, sizes[i], reads[i])
            latest[i] = PlannedItem(i, plan, identity, tensors_key)
            items.append(latest[i])
        before_pruning = sum(count.tokens for count in counts)
        after = sum(item.plan.budget for item in items)
        request_counts = RequestCounts(
            state=state_label(self._served, request),
            chooser=request.keep,
            images=len(plans),
            tokens_before=before_pruning,
            tokens_after=after,
            core=sum(item.plan.budget for item in items if item.plan.part == "core"),
            recalled=sum(item.plan.budget for item in items if item.plan.part == "recall"),
            kv_bytes=(before_pruning - after) * self._served.kv_bytes,
        )
        identities = {**hashes, "image": [item.identity for item in items]}
        new_prompt = None if prompt is inputs.prompt else list(prompt)
        return RequestPlan(tuple(items), identities, new_prompt, sizes, request_counts)

    def _resize(
        self, inputs: ProcessorInputs, plan: ItemPlan, size: ImageSize | None
    ) -> tuple[ItemPlan, Size | None]:
        """The plan of an image, and its new size where the resize control shrinks it.

        Where the number of tokens follows an image's size, the rival of pruning is a smaller image:
        what a client has by shrinking its pictures, or an operator by ``max_pixels``. Raises
        :class:`RequestError` where the processor makes more than K tokens of any image.
        """
        resize = self._placeholders.resize
        if plan.keep != "resized" or plan.keeps_all or size is None or resize is None:
            return plan, None
        smaller = resize(self._info, size, plan.budget)
        kwargs = inputs.hf_processor_mm_kwargs
        tokens = self._placeholders.count(self._info, smaller, kwargs).tokens
        if tokens > plan.budget:
            what = f"K = {plan.budget}, and the image processor makes at least {tokens} tokens"
            fix = f"ask for {tokens} or more, or lower min_pixels in --mm-processor-kwargs"
            raise request_error("budget", what, fix)
        # All tokens of the smaller image are kept.
        return replace(plan, budget=tokens, tokens=tokens), (smaller.width, smaller.height)

    def _identify(self, plan: ItemPlan, content: str, size: Size | None, reads: bool) -> str:
        """Cache identity of a pruned image, or of one of its two parts."""
        state = self._served.state_for_plan(plan)
        if plan.part == "core":
            return make_core_identity(content, state.core_digest, plan.core)
        chosen_by = self._served.selection_identity(state)
        # Two budgets may give one number of tokens, and then another size is another image.
        chosen_by += "" if size is None else f"|{size}"
        read = plan.read if reads else None
        return make_cache_identity(
            content, chosen_by, plan.image_budget, plan.keep, read, plan.core
        )

    def _add_recalls(
        self,
        inputs: ProcessorInputs,
        request: PruningRequest,
        plans: Sequence[ItemPlan],
        digests: Sequence[str],
    ) -> tuple[Sequence[int], list[Slot]]:
        """Token ids and items of the prompt, with an item for what each turn recalls.

        Raises RequestError where a request asks for recall of a model that cannot.
        """
        if request.recall and self._placeholders.unsplittable:
            what = f"later turns cannot recall tokens: this model {self._placeholders.unsplittable}"
            raise request_error("recall", what, "leave it out")
        images = [Slot(i, plan.budget) for i, plan in enumerate(plans)]
        turns, rules, limit = request.recall_turns, self._served.rules, MAX_ITEMS
        if not turns:
            return inputs.prompt, images
        if encoded := next((plan.state for plan in plans if plan.state), b""):
            limit = limit_recalls(decode_state(encoded), rules.cost)
        recall, most = rules.recall, MAX_BUDGET
        if request.recall is not None:  # what requests ask for, they get within their range
            recall, most = request.recall, rules.maximum
        recalls = choose_recalls(turns, recall, plans, digests, most, limit)
        token = self._placeholders.token(self._info)
        return expand_marks(inputs.prompt, token, images, turns, recalls)

    def _split(
        self,
        inputs: ProcessorInputs,
        prompt: Sequence[int],
        slots: list[Slot],
        plans: Sequence[ItemPlan],
        reads: Sequence[bool],
        texts: Sequence[str],
        turns: Sequence[int | None] | None,
    ) -> tuple[Sequence[int], list[Slot]]:
        """The prompt and its items, images split into core and delta where that shares anything.

        Nothing is shared without a prefix cache, and nothing is gained where the question stands
        before the image, for it is part of the prefix then.
        """
        cores = [
            self._served.policy_for_plan(plan).core if reads_it else 0
            for plan, reads_it in zip(plans, reads, strict=True)
        ]
        block = kv_block_size(self._info.ctx.model_config)
        token = self._placeholders.token(self._info)
        if block is None or self._placeholders.unsplittable or not any(cores):
            return prompt, slots
        if set(inputs.mm_data_items) != {"image"} or prompt.count(token) != len(slots):
            return prompt, slots
        if turns is not None and len(turns) != len(plans):
            turns = None  # as in _instructions
        between = self._texts_before_images(prompt, token, slots)
        question_turns = find_question_turns(between, texts, turns)
        images = [
            slot
            if slot.part == "recall" or (turn := question_turns[slot.image]) is None
            else replace(slot, core=cores[slot.image], turn=turn)
            for slot in slots
        ]
        return split_slots(prompt, token, images, block) or (prompt, slots)

    def _texts_before_images(
        self, prompt: Sequence[int], token: int, slots: Sequence[Slot]
    ) -> list[str]:
        """What the prompt holds between each image and the one before it, without image markup."""
        tokenizer = self._info.get_tokenizer()
        texts: list[str] = []
        start = 0
        places = (at for at, token_id in enumerate(prompt) if token_id == token)
        for at, slot in zip(places, slots, strict=True):
            if slot.part == "recall":
                continue
            between = list(prompt[max(start, at - _LOOKBACK) : at])
            while between and not tokenizer.decode(between[-1:], skip_special_tokens=True):
                between.pop()
            texts.append(tokenizer.decode(between))
            start = at + 1
        return texts

    def _identify_contents(self, inputs: ProcessorInputs) -> dict[str, list[str]]:
        """Identities as in stock vLLM, but that a client's ``uuid`` is none.

        Images are identified by content: under one name two requests may send two pictures. Other
        inputs have names in a domain of their own, so that no name is the identity of an image.
        """
        by_content = prunable(inputs.mm_data_items)
        names = {
            modality: [
                None
                if name is None or (by_content and modality == "image")
                else make_name_identity(modality, name)
                for name in of_modality
            ]
            for modality, of_modality in (inputs.mm_uuid_items or {}).items()
        }
        return dict(self._hash_inputs(replace(inputs, mm_uuid_items=names or None)))

    def _resolve_names(
        self, inputs: ProcessorInputs, digests: Sequence[str], salt: str
    ) -> tuple[list[str], list[ImageSize | None]]:
        """Digest and size of each image; one that comes by its name alone is the last sent so."""
        names = (inputs.mm_uuid_items or {}).get("image") or [None] * len(digests)
        items = inputs.mm_data_items["image"]
        images = []
        for i, (name, digest) in enumerate(zip(names, digests, strict=True)):
            if items.get(i) is None:
                images.append(self._named.find(name or "", salt))
                continue
            images.append((digest, items.get_image_size(i)))
            if name is not None and inputs.cache is not None:
                self._named.remember(name, salt, images[i])
        return [digest for digest, _ in images], [size for _, size in images]

    def _instructions(
        self, inputs: ProcessorInputs, texts: Sequence[str] | None, images: int
    ) -> list[str]:
        """One text an image: the request's, else what the prompt holds after its last image."""
        if texts is not None and len(texts) == images:
            return list(texts)
        # No messages (a raw prompt), or messages of a form in which the images were not found.
        token, decode = self._placeholders.token(self._info), self._info.get_tokenizer().decode
        return [extract_prompt_instruction(inputs.prompt, token, decode, self._suffix)] * images


def _seed(inputs: ProcessorInputs, i: int, plan: ItemPlan) -> str:
    """What a random keep of an image is drawn from: its pixels; empty for other choosers."""
    if plan.keep != "random":
        return ""
    image = inputs.mm_data_items["image"].get(i)
    if image is None:
        what = '"random" is drawn from pixels, and this image comes by its name alone'
        raise request_error("keep", what, "send the picture")
    return hash_picture(image)


def prunable(mm_items: MultiModalDataItems) -> bool:
    """False for embeddings made elsewhere: they come without the signals that states read.

    Also for what is no picture, which vLLM's own processor refuses.
    """
    images = mm_items.get("image")
    if not isinstance(images, ImageProcessorItems):
        return False
    return all(image is None or isinstance(image, _PICTURES) for image in images.get_all())
