"""Plans of a request's images: K, cache identity, instruction ids; before any is processed.

All of it follows from image sizes, the state and the request. Cached data of an image is found by
the digest of its content.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from hashlib import sha256
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy
import torch
from cachetools import LRUCache
from PIL import Image
from vllm.multimodal.parse import ImageProcessorItems, VideoProcessorItems

from vllm_autoprune.errors import Refusal
from vllm_autoprune.serving.api.cells import EncodedImage, Process, Trimming
from vllm_autoprune.serving.api.clips import Clips, prunes_clips
from vllm_autoprune.serving.api.engine_requests import count_request
from vllm_autoprune.serving.api.instruction import (
    InstructionTokenizer,
    extract_prompt_instruction,
    find_question_turns,
)
from vllm_autoprune.serving.api.layout import (
    MAX_ITEMS,
    Placeholders,
    PlannedItem,
    Slot,
    choose_recalls,
    expand_marks,
    limit_recalls,
    split_slots,
)
from vllm_autoprune.serving.api.request import PruningRequest
from vllm_autoprune.serving.api.resolve import (
    check_fields,
    find_trimming,
    resolve_plans,
)
from vllm_autoprune.serving.compat import depends_on, get_attachment
from vllm_autoprune.serving.identities import (
    hash_pixels,
    make_cache_identity,
    make_feature_key,
    make_identity,
)
from vllm_autoprune.serving.plan import ENTRY, LANGUAGE_IDS, NO_KEY, ItemPlan, refuse
from vllm_autoprune.serving.served_state import (
    KV_CACHE,
    ServedState,
)
from vllm_autoprune.serving.state_codec import decode_state
from vllm_autoprune.tpdsl.atoms.source import MAX_BUDGET
from vllm_autoprune.tpdsl.base_policy import INSTRUCTION_NEEDS
from vllm_autoprune.tpdsl.cells import Cells
from vllm_autoprune.tpdsl.materialize import materialize

if TYPE_CHECKING:
    from vllm.inputs import MultiModalHashes
    from vllm.multimodal.parse import ImageSize, MultiModalDataItems
    from vllm.multimodal.processing import BaseProcessingInfo, ProcessorInputs

logger = logging.getLogger("vllm.autoprune")

_PICTURES = (Image.Image, numpy.ndarray, torch.Tensor)
"""Types of an image whose size vLLM can tell."""

_LOOKBACK = 4096
"""Token ids before an image in which its question is looked for."""

_MAX_NAMES = 1 << 15
"""Names that a process remembers, the least recently used dropped first: about 15 MB."""

Size = tuple[int, int]
"""Width and height of an image."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Planned items of a request's images, and the cache identities of all its inputs.

    An image that is split or recalled has several items; ``prompt`` has a placeholder for each, and
    is None where every image has one. ``clips`` are planned once they are processed, which tells
    their sizes; None where all are left whole. ``embeddings`` are images that are left to stock
    vLLM, whose sizes are checked then. ``sizes`` are those that images are given before
    they are processed, None for their own; ``trimming`` drops cells of them. ``count`` counts the
    request, given the plans of its clips; None where vLLM profiles, or nothing is pruned.
    """

    items: tuple[PlannedItem, ...]
    hashes: Mapping[str, list[str]]
    prompt: list[int] | None = None
    clips: Clips | None = None
    embeddings: bool = False
    sizes: tuple[Size | None, ...] = ()
    trimming: Trimming | None = None
    count: Callable[[Sequence[ItemPlan]], None] | None = None


@depends_on("vllm.multimodal.parse:ImageProcessorItems", "get_image_size")
class RequestPlanner:
    """Makes the plans of one served model's requests.

    ``hash_inputs`` is the stock processor's ``_get_mm_hashes``; ``process`` its processing of one
    picture.
    """

    def __init__(
        self,
        info: BaseProcessingInfo,
        served: ServedState,
        placeholders: Placeholders,
        hash_inputs: Callable[[ProcessorInputs], MultiModalHashes],
        process: Process,
    ) -> None:
        self._info = info
        self.served = served
        self._placeholders = placeholders
        self._hash_inputs = hash_inputs
        self._process = process
        self._seen: LRUCache[tuple[str, Cells], EncodedImage] = LRUCache(_MAX_NAMES)
        """What is encoded of the images seen last, by content and rule."""
        self._named: LRUCache[bytes, tuple[str, ImageSize | None]] = LRUCache(
            _MAX_NAMES
        )
        """Content and size of the image last sent under a name, by the name and its cache salt."""
        self._lock = Lock()  # several renderer threads may share one processor
        if served.state.core is not None and placeholders.unsplittable:
            logger.warning(
                "Questions about one image do not share the core of state %r: this model %s.",
                served.state.name,
                placeholders.unsplittable,
            )

    @cached_property
    def _token(self) -> int:
        return self._placeholders.token(self._info)

    @cached_property
    def tokenizer(self) -> InstructionTokenizer:
        """That of questions about images and clips."""
        return InstructionTokenizer(self._info, self.served.text_tower, self._token)

    @cached_property
    def _suffix(self) -> str:
        """What the chat template puts after the last user turn; empty where there is none."""
        mark = "\u2402"
        try:
            rendered = self._info.get_tokenizer().apply_chat_template(
                [{"role": "user", "content": mark}],
                add_generation_prompt=True,
                tokenize=False,
            )
        except (ValueError, TypeError, AttributeError):
            return ""
        return str(rendered).rpartition(mark)[2]

    @staticmethod
    def can_prune(mm_items: MultiModalDataItems) -> bool:
        """False for embeddings, and what is no picture, which vLLM's own processor refuses."""
        images = mm_items.get("image")
        if not isinstance(images, ImageProcessorItems):
            return False
        return all(
            image is None or isinstance(image, _PICTURES) for image in images.get_all()
        )

    def plan_profiling(self, inputs: ProcessorInputs) -> RequestPlan:
        """Plans of dummy images: the server's own budget, the longest text that may be read."""
        hashes = self._hash_inputs(inputs)
        policy = materialize(self.served.state, self.served.budget)
        instruction, _ = self.tokenizer.tokenize("profile", policy.needs)
        longest = (
            ()
            if policy.needs.isdisjoint({"language", "words"})
            else (0,) * LANGUAGE_IDS
        )
        items = []
        for i, identity in enumerate(hashes.get("image", [])):
            size = inputs.mm_data_items["image"].get_image_size(i)
            count = self._placeholders.count(
                self._info, size, inputs.hf_processor_mm_kwargs
            )
            budget = policy.at(count.tokens, count.tiles).budget
            plan = ItemPlan(
                budget, NO_KEY, instruction, longest, profile=True, tokens=count.tokens
            )
            items.append(PlannedItem(i, plan, identity, identity))
        return RequestPlan(tuple(items), hashes)

    def plan_request(  # noqa: C901, PLR0915
        self, inputs: ProcessorInputs, fields: object, salt: str
    ) -> RequestPlan:
        """Plans and cache identities of a request's images; ``fields`` is its pruning entry.

        Raises BudgetError or RequestError.
        """
        served = self.served
        kwargs = inputs.hf_processor_mm_kwargs
        request = PruningRequest.parse(fields)
        state = check_fields(served, request)
        # Identities as in stock vLLM, but that a client's ``uuid`` is none: under one name two
        # requests may send two pictures. Other inputs than those that are pruned have names in a
        # domain of their own, so that no name is the identity of an image.
        images_pruned = self.can_prune(inputs.mm_data_items)
        clips_pruned = prunes_clips(served, request, state) and isinstance(
            inputs.mm_data_items.get("video"), VideoProcessorItems
        )
        by_content = {"image": images_pruned, "video": clips_pruned}
        names = {
            modality: [
                None
                if name is None or by_content.get(modality)
                else make_identity("name", modality, name)
                for name in of_modality
            ]
            for modality, of_modality in (inputs.mm_uuid_items or {}).items()
        }
        hashes = dict(self._hash_inputs(replace(inputs, mm_uuid_items=names or None)))
        clips = None
        if clips_pruned:
            digests, _ = self._resolve_names(inputs, hashes["video"], salt, "video")
            texts = request.video_instructions or []
            if len(texts) != len(digests):
                assert self._placeholders.video_token is not None
                token = self._placeholders.video_token(self._info)
                texts = [self._read_prompt(inputs, token, "video")] * len(digests)
            videos = inputs.mm_data_items["video"]
            clips = Clips(
                videos, digests, salt, texts, request, state, served.rules.total
            )
        label = request.state_label(served.state.name)
        if not hashes.get("image"):
            count = partial(
                count_request, label, request.keep, (), (), (), served.kv_bytes
            )
            return RequestPlan((), hashes, clips=clips, count=count if clips else None)
        are_embeddings = not isinstance(
            inputs.mm_data_items["image"], ImageProcessorItems
        )
        if are_embeddings and request.enabled:
            what = "come without the signals that states read, and are not served beside a state"
            raise refuse("image_embeds", what, "send the picture")
        if not images_pruned:
            return RequestPlan((), hashes, clips=clips, embeddings=are_embeddings)
        digests, image_sizes = self._resolve_names(inputs, hashes["image"], salt)
        counts = [
            # An unknown uuid has no size; vLLM's caches will not know it either.
            self._placeholders.count_largest(self._info)
            if size is None
            else self._placeholders.count(self._info, size, kwargs)
            for size in image_sizes
        ]
        trimming = find_trimming(served, request, state)
        if trimming is not None:
            pictures = inputs.mm_data_items["image"]
            for i, digest in enumerate(digests):
                seen = self._encoded(digest, pictures.get(i), kwargs, trimming)
                digests[i], counts[i] = seen.digest, replace(counts[i], left=seen.left)
        # K of each image, and a new size where the resize control shrinks it.
        total = limit = served.rules.total
        if limit is not None and clips is not None:
            limit = limit * len(counts) // (len(counts) + len(clips.digests))
        plans = resolve_plans(served, request, state, counts, limit)
        if total is not None and clips is not None:  # clips have what the images leave
            clips = replace(clips, limit=total - sum(plan.budget for plan in plans))
        sizes: list[Size | None] = [None] * len(plans)
        for i, (plan, size) in enumerate(zip(plans, image_sizes, strict=True)):
            if plan.keep == "resized" and not plan.keeps_all and size is not None:
                plans[i], sizes[i] = self._shrink(plan, size, kwargs)
        # The question of each image as token ids, where its policy reads it, and its features' key.
        needs = [served.find_needs(plan) for plan in plans]
        reads = [
            not needs_of_plan.isdisjoint(INSTRUCTION_NEEDS) for needs_of_plan in needs
        ]
        texts = request.instructions or []
        if not any(reads):
            texts = [""] * len(plans)
        elif len(texts) != len(plans):
            texts = [self._read_prompt(inputs, self._token)] * len(plans)
        tokenize = cache(
            self.tokenizer.tokenize
        )  # each text once, however often it is read
        for i, plan in enumerate(plans):
            plans[i] = plan.ask(*tokenize(texts[i], needs[i]))
            if (
                not plan.keeps_all
            ):  # features are kept of images whose tokens are chosen
                picture = inputs.mm_data_items["image"].get(i)
                seed = hash_pixels(picture, "image") if plan.keep == "random" else ""
                plans[i] = replace(
                    plans[i], key=make_feature_key(digests[i], salt, seed)
                )
        # Items of the prompt: what later turns recall, then cores and deltas.
        prompt, slots = self._add_recalls(inputs.prompt, request, plans, digests)
        if set(inputs.mm_data_items) == {"image"}:
            prompt, slots = self._split(
                prompt, slots, plans, reads, texts, request.turns
            )
        # Plan and identity of each item; those of a recall follow from the item before it.
        items: list[PlannedItem] = []
        latest: dict[int, PlannedItem] = {}
        for slot in slots:
            i = slot.image
            content = repr((digests[i], salt))
            # Neither a question nor a state nor K is part of it: all of them share the tensors.
            tensors_key = make_identity("pixels", content, sizes[i])
            if slot.part == "recall":
                assert request.recall_turns is not None and slot.turn is not None
                plan = latest[i].plan.recall(slot.budget)
                text = request.recall_turns[slot.turn].text
                plan = plan.ask(*tokenize(text, served.find_needs(plan)))
                # All earlier choices, down to the pixels, are part of the identity before it.
                identity = make_identity(
                    "recall", latest[i].identity, slot.budget, plan.read
                )
            elif plans[i].keeps_all and sizes[i] is None:
                # The image is then what it is in stock vLLM, caches included.
                plan = plans[i]
                identity = digests[i]
                tensors_key = digests[i]
            else:
                core, delta = plans[i].split(slot.core)
                plan = {"whole": plans[i], "core": core, "delta": delta}[slot.part]
                state = served.state_for_plan(plan)
                if plan.part == "core":
                    # Shared by all questions, K and states that choose it alike.
                    core_of = state.core_digest, plan.core, plan.positions
                    identity = make_identity("core", content, *core_of)
                else:
                    chosen_by = served.selection_identity(state)
                    # Budgets may give one number of tokens; another size is another image.
                    chosen_by += "" if sizes[i] is None else f"|{sizes[i]}"
                    kept = plan.image_budget, plan.keep, plan.read if reads[i] else None
                    identity = make_cache_identity(
                        content, chosen_by, *kept, plan.core, plan.positions
                    )
            latest[i] = PlannedItem(i, plan, identity, tensors_key)
            items.append(latest[i])
        return RequestPlan(
            tuple(items),
            {**hashes, "image": [item.identity for item in items]},
            prompt=None if prompt is inputs.prompt else list(prompt),
            clips=clips,
            sizes=tuple(sizes),
            trimming=trimming,
            count=partial(
                count_request,
                label,
                request.keep,
                [count.tokens for count in counts],
                [count.encoded for count in counts],
                [item.plan for item in items],
                served.kv_bytes,
            ),
        )

    def _read_prompt(
        self, inputs: ProcessorInputs, token: int, modality: str = "image"
    ) -> str:
        """The question of a prompt without messages, or of messages whose images were not found."""
        decode = self._info.get_tokenizer().decode
        text = self._placeholders.text.replace("image", modality)
        return extract_prompt_instruction(
            inputs.prompt, token, decode, self._suffix, text
        )

    def _resolve_names(
        self,
        inputs: ProcessorInputs,
        digests: Sequence[str],
        salt: str,
        modality: str = "image",
    ) -> tuple[list[str], list[ImageSize | None]]:
        """Digest and size of each image; one that comes by its name alone is the last sent so.

        A later request may send the name alone (``"image_url": null``). Cache identities are made
        of content, so the name has to be resolved before a cache is looked up. An unknown name gets
        a content that no image has.
        """
        names = (inputs.mm_uuid_items or {}).get(modality) or [None] * len(digests)
        items = inputs.mm_data_items[modality]
        images: list[tuple[str, ImageSize | None]] = []
        for i, (name, digest) in enumerate(zip(names, digests, strict=True)):
            # A name may have megabytes.
            key = sha256(repr((modality, name or "", salt)).encode()).digest()
            with self._lock:
                if items.get(i) is None:
                    images.append(
                        self._named.get(key) or (f"unknown {key.hex()}", None)
                    )
                    continue
                is_image = isinstance(items, ImageProcessorItems)
                images.append((digest, items.get_image_size(i) if is_image else None))
                if name is not None and inputs.cache is not None:
                    self._named[key] = images[i]
        return [digest for digest, _ in images], [size for _, size in images]

    def _encoded(
        self,
        digest: str,
        picture: object,
        kwargs: Mapping[str, object],
        trimming: Trimming,
    ) -> EncodedImage:
        """What is encoded of a picture, which is processed for that unless it was seen before."""
        key = digest, trimming.rule
        with self._lock:
            seen = self._seen.get(key)
        if seen is None:
            if (
                picture is None
            ):  # its cells are forgotten, so its tensors cannot be looked up
                return EncodedImage(f"unknown {digest}")
            seen = trimming.find_encoded(
                digest, trimming.process(picture, kwargs, self._process)
            )
            with self._lock:
                self._seen[key] = seen
        return seen

    def _shrink(
        self, plan: ItemPlan, size: ImageSize, kwargs: Mapping[str, object]
    ) -> tuple[ItemPlan, Size | None]:
        """The plan of an image that the resize control shrinks, and its new size.

        Where the number of tokens follows an image's size, the rival of pruning is a smaller image:
        what a client has by shrinking its pictures, or an operator by ``max_pixels``. Raises
        :class:`RequestError` where the processor makes more than K tokens of any image.
        """
        if self._placeholders.resize is None:
            return plan, None
        smaller = self._placeholders.resize(self._info, size, plan.budget)
        tokens = self._placeholders.count(self._info, smaller, kwargs).tokens
        if tokens > plan.budget:
            what = f"K = {plan.budget}, and the image processor makes at least {tokens} tokens"
            fix = f"ask for {tokens} or more, or lower min_pixels in --mm-processor-kwargs"
            raise refuse(f"{ENTRY}/budget", what, fix, Refusal.OUT_OF_RANGE)
        # All tokens of the smaller image are kept.
        return replace(plan, budget=tokens, tokens=tokens), (
            smaller.width,
            smaller.height,
        )

    def _add_recalls(
        self,
        prompt: Sequence[int],
        request: PruningRequest,
        plans: Sequence[ItemPlan],
        digests: Sequence[str],
    ) -> tuple[Sequence[int], list[Slot]]:
        """Token ids and items of the prompt, with an item for what each turn recalls.

        Raises RequestError where a request asks for recall of a model that cannot.
        """
        if request.enabled and request.recall and self._placeholders.unsplittable:
            what = f"later turns cannot recall tokens: this model {self._placeholders.unsplittable}"
            where = f"{ENTRY}/recall"
            raise refuse(where, what, "leave it out", Refusal.UNSUPPORTED)
        images = [Slot(i, plan.budget) for i, plan in enumerate(plans)]
        turns = request.recall_turns
        rules = self.served.rules
        limit = MAX_ITEMS
        if not turns:
            return prompt, images
        if encoded := next((plan.state for plan in plans if plan.state), b""):
            limit = limit_recalls(decode_state(encoded), rules.cost)
        recall = rules.recall
        most = MAX_BUDGET
        if (
            request.recall is not None
        ):  # what requests ask for, they get within their range
            recall = request.recall
            most = rules.maximum
        recalls = choose_recalls(turns, recall, plans, digests, most, limit)
        return expand_marks(prompt, self._token, images, turns, recalls)

    @depends_on("vllm.config:CacheConfig", "block_size")
    def _split(
        self,
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
            self.served.policy_for_plan(plan).core if reads_it else 0
            for plan, reads_it in zip(plans, reads, strict=True)
        ]
        config: Any = get_attachment(self._info.ctx.model_config, KV_CACHE)
        block = config.block_size if config and config.enable_prefix_caching else None
        places = [at for at, token_id in enumerate(prompt) if token_id == self._token]
        unsplittable = self._placeholders.unsplittable or len(places) != len(slots)
        if block is None or unsplittable or not any(cores):
            return prompt, slots
        # What the prompt holds between each image and the one before it, without image markup.
        tokenizer = self._info.get_tokenizer()
        before: list[str] = []
        start = 0
        for at, slot in zip(places, slots, strict=True):
            if slot.part == "recall":
                continue
            between = list(prompt[max(start, at - _LOOKBACK) : at])
            while between and not tokenizer.decode(
                between[-1:], skip_special_tokens=True
            ):
                between.pop()
            before.append(tokenizer.decode(between))
            start = at + 1
        if turns is not None and len(turns) != len(plans):
            turns = None  # of messages in which the images were not found
        question_turns = find_question_turns(before, texts, turns)
        images = [
            slot
            if slot.part == "recall" or (turn := question_turns[slot.image]) is None
            else replace(slot, core=cores[slot.image], turn=turn)
            for slot in slots
        ]
        return split_slots(prompt, self._token, images, block) or (prompt, slots)
