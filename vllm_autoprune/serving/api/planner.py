"""Plans of a request's images: K, cache identity, instruction ids; before any is processed.

All of it follows from image sizes, the state and the request. Cached data of an image is found by
the digest of its content.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy
import torch
from PIL import Image
from vllm.multimodal.parse import ImageProcessorItems

from vllm_autoprune.serving.api.choices import (
    ImageChoice,
    Placeholders,
    TokenCount,
    choose_sizes,
    recall_needs,
    resolve_choices,
    state_label,
)
from vllm_autoprune.serving.api.image_store import NamedImage, NamedImages
from vllm_autoprune.serving.api.instruction import (
    InstructionTokenizer,
    extract_prompt_instruction,
    find_question_turns,
)
from vllm_autoprune.serving.api.request import PruningRequest, parse_request, request_error
from vllm_autoprune.serving.api.split import (
    MAX_ITEMS,
    RecallItem,
    Slot,
    SplitImage,
    SplitPrompt,
    choose_recalls,
    expand_marks,
    limit_recalls,
    split_images,
)
from vllm_autoprune.serving.hooks import depends_on
from vllm_autoprune.serving.plan import (
    LANGUAGE_IDS,
    NO_KEY,
    Choice,
    Ids,
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
from vllm_autoprune.tpdsl.materialize import MAX_BUDGET

# Plans and cache identities of a request's items: an image, its parts, what later turns recall.


class _ItemPlans:
    """Items of a request in the order of its prompt, with their plans and cache identities.

    ``digests`` are those of the contents of its images, ``salt`` its ``cache_salt``; ``seeds`` has
    what a random keep of an image is drawn from.
    """

    def __init__(
        self,
        digests: Sequence[str],
        salt: str,
        choices: Sequence[ImageChoice],
        ids: Sequence[tuple[Ids, Ids]],
        seeds: Mapping[int, str],
    ) -> None:
        self.plans: list[ItemPlan] = []
        self.identities: list[str] = []
        self.sources: list[int] = []
        self.keys: list[str] = []
        """Of each item's processed tensors; items of one image have the same."""
        self._digests = digests
        self._salt = salt
        self._choices = choices
        self._ids = ids
        self._seeds = seeds
        self._last: dict[int, tuple[ItemPlan, str]] = {}
        """Plan and identity of the item of each image that was chosen last."""

    def add(self, slot: Slot) -> None:
        """Add an image, or one part of it."""
        choice, ids = self._choices[slot.image], self._ids[slot.image]
        # Features are kept of images whose tokens are chosen.
        chosen = not choice.keeps_all and choice.resized is None
        parts = self._digests[slot.image], self._salt, self._seeds.get(slot.image, "")
        key = make_feature_key(*parts) if chosen else NO_KEY
        of_image = ItemPlan(choice.kept, key, *ids, choice.keep, state=choice.state)
        # A resized image has no more tokens than those that are kept.
        tokens = choice.tokens if choice.resized is None else choice.kept
        plan = replace(of_image, tokens=tokens, core=slot.core)
        if slot.part == "core":
            plan = plan.of_part("core", Choice(slot.core))
        elif slot.part == "delta":
            plan = plan.of_part("delta", Choice(choice.kept - slot.core, *ids))
        # Where everything is kept the image is what it is in stock vLLM, caches included.
        identity = self._digests[slot.image]
        if not choice.keeps_all:
            identity = _identify_slot(slot, self._content(slot.image), choice, ids)
        self._append(slot.image, plan, identity)

    def add_recall(self, item: RecallItem, ids: tuple[Ids, Ids]) -> None:
        """Add tokens that a later turn recalls of an image, by the ids that they are chosen by."""
        last, before = self._last[item.image]
        choice = Choice(last.image_budget if not last.earlier else last.budget, *last.read)
        plan = last.of_part("recall", Choice(item.budget, *ids))
        identity = make_recall_identity(before, item.budget, ids)
        self._append(item.image, replace(plan, earlier=(*last.earlier, choice)), identity)

    def _append(self, image: int, plan: ItemPlan, identity: str) -> None:
        self.plans.append(plan)
        self.identities.append(identity)
        self.sources.append(image)
        choice = self._choices[image]
        key = make_pixels_key(self._content(image), choice.resized)
        self.keys.append(identity if choice.keeps_all else key)
        self._last[image] = plan, identity

    def _content(self, image: int) -> str:
        return repr((self._digests[image], self._salt))

    def served(self) -> tuple[ImageChoice, ...]:
        """The choices with the cores and recalls of their images."""
        cores, recalled = dict[int, int](), dict[int, int]()
        for image, plan in zip(self.sources, self.plans, strict=True):
            if plan.part == "recall":
                recalled[image] = recalled.get(image, 0) + plan.budget
            else:
                cores[image] = plan.core
        return tuple(
            replace(choice, core=cores[i], recalled=recalled.get(i, 0))
            for i, choice in enumerate(self._choices)
        )


def _identify_slot(slot: Slot, content: str, choice: ImageChoice, ids: tuple[Ids, Ids]) -> str:
    if slot.part == "core":
        return make_core_identity(content, choice.core_identity, slot.core)
    read = ids if choice.reads_instruction else None
    return make_cache_identity(content, choice.identity, choice.kept, choice.keep, read, slot.core)


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


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Plans of a request's images and the cache identities of all its items.

    An image that is split or recalled has several plans; ``sources`` is the image of each plan, and
    ``prompt`` the token ids with a placeholder for each, None where every image has one. ``keys``
    are those of the processed tensors of each plan: the same for all plans of an image.
    ``choices`` are what the plans were made from, and ``label`` the name that metrics count them
    under; there are none where vLLM profiles.
    """

    items: tuple[ItemPlan, ...]
    hashes: Mapping[str, list[str]]
    keys: tuple[str, ...] = ()
    sources: tuple[int, ...] = ()
    prompt: list[int] | None = None
    choices: tuple[ImageChoice, ...] = ()
    label: str = ""


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
        reads = not policy.needs.isdisjoint({"language", "words"})
        longest = (0,) * LANGUAGE_IDS if reads else ()
        plans = []
        for i in range(len(hashes.get("image", []))):
            count = self._count_tokens(inputs, inputs.mm_data_items["image"].get_image_size(i))
            budget, size = policy.at(count.tokens, count.tiles).budget, count.tokens
            plans.append(ItemPlan(budget, NO_KEY, instruction, longest, profile=True, tokens=size))
        return RequestPlan(tuple(plans), hashes, tuple(hashes.get("image", ())))

    def plan_request(self, inputs: ProcessorInputs, fields: object, salt: str) -> RequestPlan:
        """Plans and cache identities of a request's images; ``fields`` is its pruning entry.

        Raises BudgetError or RequestError.
        """
        hashes = self._identify_contents(inputs)
        request = parse_request(fields)
        if not hashes.get("image") or not prunable(inputs.mm_data_items):
            return RequestPlan((), hashes)
        images_seen = self._resolve_names(inputs, hashes["image"], salt)
        counts = [self._count_tokens(inputs, size) for _, size in images_seen]
        choices = resolve_choices(self._served, request, counts)
        sizes = [size for _, size in images_seen]
        choices = choose_sizes(self._info, self._placeholders, inputs, sizes, choices)
        texts = self._instructions(inputs, request.instructions, choices)
        tokenize = cache(self._tokenizer.tokenize)  # each text once, however often it is read
        ids = [tokenize(text, choice.needs) for text, choice in zip(texts, choices, strict=True)]
        digests = [digest for digest, _ in images_seen]
        prompt, entries = self._recall(inputs, request, choices, digests)
        split = self._split(inputs, prompt, entries, choices, texts, request.turns)
        slots = tuple(map(Slot, range(len(entries)))) if split is None else split.slots
        items = _ItemPlans(digests, salt, choices, ids, _seeds(inputs, choices))
        for slot in slots:
            entry = entries[slot.image]
            if isinstance(entry, RecallItem):
                needs = recall_needs(self._served, choices[entry.image], entry.budget)
                turn = (request.recall_turns or [])[entry.turn]
                items.add_recall(entry, tokenize(turn.text, needs))
            else:
                items.add(replace(slot, image=entry))
        in_parts = prompt is not inputs.prompt or split is not None
        return RequestPlan(
            tuple(items.plans),
            {**hashes, "image": items.identities},
            tuple(items.keys),
            tuple(items.sources),
            list(prompt if split is None else split.ids) if in_parts else None,
            items.served(),
            state_label(self._served, request),
        )

    def _recall(
        self,
        inputs: ProcessorInputs,
        request: PruningRequest,
        choices: Sequence[ImageChoice],
        digests: Sequence[str],
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
        rules, limit = self._served.rules, MAX_ITEMS
        if encoded := next((choice.state for choice in choices if choice.state), b""):
            limit = limit_recalls(decode_state(encoded), rules.cost)
        recall, most = rules.recall, MAX_BUDGET
        if request.recall is not None:  # what requests ask for, they get within their range
            recall, most = request.recall, rules.maximum
        items = choose_recalls(turns, recall, choices, digests, most, limit)
        token = self._placeholders.token(self._info)
        return expand_marks(inputs.prompt, token, len(choices), turns, items)

    def _split(
        self,
        inputs: ProcessorInputs,
        prompt: Sequence[int],
        entries: Sequence[int | RecallItem],
        choices: Sequence[ImageChoice],
        texts: Sequence[str],
        turns: Sequence[int | None] | None,
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
        if prompt.count(token) != len(entries):
            return None
        if turns is not None and len(turns) != len(choices):
            turns = None  # as in _instructions
        before = self._texts_before_images(prompt, token, entries)
        found = find_question_turns(before, texts, turns)
        images = [
            SplitImage(choice.kept, choice.core if may and turn is not None else 0, turn)
            for choice, may, turn in zip(choices, may_split, found, strict=True)
        ]
        split = [
            SplitImage(entry.budget, 0, entry) if isinstance(entry, RecallItem) else images[entry]
            for entry in entries
        ]
        return split_images(prompt, token, split, block)

    def _texts_before_images(
        self, prompt: Sequence[int], token: int, entries: Sequence[int | RecallItem]
    ) -> list[str]:
        """What the prompt holds between each image and the one before it, without image markup."""
        tokenizer = self._info.get_tokenizer()
        texts: list[str] = []
        start = 0
        places = (at for at, token_id in enumerate(prompt) if token_id == token)
        for at, entry in zip(places, entries, strict=True):
            if isinstance(entry, RecallItem):
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
    ) -> list[NamedImage]:
        """Digest and size of each image; one that comes by its name alone is the last sent so."""
        names = (inputs.mm_uuid_items or {}).get("image") or [None] * len(digests)
        items = inputs.mm_data_items["image"]
        images: list[NamedImage] = []
        for i, (name, digest) in enumerate(zip(names, digests, strict=True)):
            if items.get(i) is None:
                images.append(self._named.find(name or "", salt))
                continue
            images.append((digest, items.get_image_size(i)))
            if name is not None and inputs.cache is not None:
                self._named.remember(name, salt, images[i])
        return images

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


def _seeds(inputs: ProcessorInputs, choices: Sequence[ImageChoice]) -> dict[int, str]:
    """What random keeps are drawn from: the pixels of their images, by index."""
    seeds = {}
    for i, choice in enumerate(choices):
        if choice.keep == "random" and not choice.keeps_all:
            image = inputs.mm_data_items["image"].get(i)
            if image is None:
                what = '"random" is drawn from pixels, and this image comes by its name alone'
                raise request_error("keep", what, "send the picture")
            seeds[i] = hash_picture(image)
    return seeds


def prunable(mm_items: MultiModalDataItems) -> bool:
    """False for embeddings made elsewhere: they come without the signals that states read.

    Also for what is no picture, which vLLM's own processor refuses.
    """
    images = mm_items.get("image")
    if not isinstance(images, ImageProcessorItems):
        return False
    return all(image is None or isinstance(image, _PICTURES) for image in images.get_all())
