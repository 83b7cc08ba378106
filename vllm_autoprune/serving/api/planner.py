"""Plans of a request's images and videos: K, cache identity, instruction ids.

Those of images are made before any is processed, as all of it follows from image sizes, the state
and the request; those of videos after, because processors sample frames and resize them together.
Cached data of an item is found by the digest of its content.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from vllm.multimodal.parse import ImageProcessorItems, VideoProcessorItems

from vllm_autoprune.errors import Refusal, RequestError
from vllm_autoprune.serving.api.budgets import RequestBudgets, check_fields
from vllm_autoprune.serving.api.cells import (
    EncodedImages,
    Process,
    Trimming,
    find_trimming,
)
from vllm_autoprune.serving.api.engine_requests import RequestCounts
from vllm_autoprune.serving.api.instruction import (
    InstructionTokenizer,
    extract_prompt_instruction,
)
from vllm_autoprune.serving.api.layout import PromptLayout, Slot
from vllm_autoprune.serving.api.media import (
    MAX_NAMES,
    Media,
    MediaReader,
    Modality,
    PlannedItem,
    Size,
    can_prune,
)
from vllm_autoprune.serving.api.placeholders import Placeholders, TokenCount
from vllm_autoprune.serving.api.request import PruningRequest
from vllm_autoprune.serving.identities import (
    hash_pixels,
    make_feature_key,
    make_identity,
)
from vllm_autoprune.serving.plan import ENTRY, LANGUAGE_IDS, NO_KEY, Ids, ItemPlan
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.tpdsl.base_policy import INSTRUCTION_NEEDS
from vllm_autoprune.tpdsl.materialize import materialize

if TYPE_CHECKING:
    from vllm.inputs import MultiModalHashes
    from vllm.multimodal.parse import ImageSize
    from vllm.multimodal.processing import BaseProcessingInfo, ProcessorInputs

logger = logging.getLogger("vllm.autoprune")


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What is planned of a request before its inputs are processed."""

    hashes: Mapping[str, list[str]]
    """Cache identities of all its inputs, by modality; those of pruned videos are made later."""

    images: Sequence[PlannedItem] = ()
    """Items of its images, in the prompt's order; one that is split or recalled has several."""

    prompt: list[int] | None = None
    """Token ids with a placeholder for each item; None where every image has one item."""

    videos: Media | None = None
    """Videos to be planned once they are processed; None where all are left whole."""

    embeddings: bool = False
    """Whether its images are embeddings, left to stock vLLM, whose sizes are checked then."""

    sizes: Sequence[Size | None] = ()
    """Sizes that images are given before they are processed, None for their own."""

    trimming: Trimming | None = None
    """What drops cells of the images."""

    counts: RequestCounts | None = None
    """What is counted of it; None where vLLM profiles, or nothing is pruned."""


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
        self._media = MediaReader(hash_inputs)
        self._hash_inputs = hash_inputs
        self._encoded = EncodedImages(process, MAX_NAMES)
        self._layout = PromptLayout(info, placeholders, served)
        if served.state.core is not None and placeholders.unsplittable:
            logger.warning(
                "Questions about one image do not share the core of state %r: this model %s.",
                served.state.name,
                placeholders.unsplittable,
            )

    @cached_property
    def _tokenizer(self) -> InstructionTokenizer:
        return InstructionTokenizer(
            self._info, self.served.text_tower, self._layout.token
        )

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

    def plan_profiling(self, inputs: ProcessorInputs) -> RequestPlan:
        """Plans of dummy images: the server's own budget, the longest text that may be read."""
        hashes = self._hash_inputs(inputs)
        policy = materialize(self.served.state, self.served.budget)
        instruction, _ = self._tokenizer.tokenize("profile", policy.needs)
        longest: Ids = ()
        if not policy.needs.isdisjoint({"language", "words"}):
            longest = (0,) * LANGUAGE_IDS
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
        return RequestPlan(hashes, tuple(items))

    # A request, stage by stage.

    def plan_request(
        self, inputs: ProcessorInputs, fields: object, salt: str
    ) -> RequestPlan:
        """Plans and cache identities of a request's images; ``fields`` is its pruning entry.

        Raises BudgetError or RequestError.
        """
        served = self.served
        request = PruningRequest.parse(fields)
        budgets = RequestBudgets(served, request, check_fields(served, request))
        prunes_images = can_prune(inputs.mm_data_items)
        prunes_videos = budgets.prunes_videos and isinstance(
            inputs.mm_data_items.get("video"), VideoProcessorItems
        )
        hashes = self._media.identify(inputs, prunes_images, prunes_videos)

        tokenize = cache(self._tokenizer.tokenize)

        def read(modality: Modality) -> Media:
            digests = hashes[modality]
            return self._media.read(inputs, modality, digests, salt, budgets, tokenize)

        videos = None
        if prunes_videos:
            token = self._placeholders.video_token
            assert token is not None
            videos = read("video")
            texts = self._find_questions(
                inputs, videos, request.video_instructions, token(self._info)
            )
            videos = replace(videos, texts=texts, limit=served.rules.total)
        label = request.state_label(served.state.name)
        counts = RequestCounts(label, request.keep, served.kv_bytes)
        if not hashes.get("image"):
            return RequestPlan(
                hashes, videos=videos, counts=None if videos is None else counts
            )
        if prunes_images:
            plan = RequestPlan(hashes, videos=videos, counts=counts)
            return self._plan_images(plan, inputs, read("image"))
        are_pictures = isinstance(inputs.mm_data_items["image"], ImageProcessorItems)
        if not are_pictures and request.enabled:
            what = "come without the signals that states read, and are not served beside a state"
            raise RequestError.of("image_embeds", what, "send the picture")
        return RequestPlan(hashes, videos=videos, embeddings=not are_pictures)

    def _plan_images(
        self, plan: RequestPlan, inputs: ProcessorInputs, images: Media
    ) -> RequestPlan:
        """The plan of a request with the items of its images."""
        assert plan.counts is not None
        images, counts, trimming = self._count_images(inputs, images)
        # K of each image, and a new size where the resize control shrinks it.
        total = self.served.rules.total
        videos = plan.videos
        limit = total
        if total is not None and videos is not None:
            limit = total * len(counts) // (len(counts) + len(videos.digests))
        plans = images.budgets.plan_images(counts, limit)
        if total is not None and videos is not None:
            # Videos have what the images leave.
            budget = sum(plan.budget for plan in plans)
            videos = replace(videos, limit=total - budget)
        sizes: list[Size | None] = [None] * len(plans)
        for i, size in enumerate(images.sizes):
            plans[i], sizes[i] = self._shrink(plans[i], size, inputs)
        # The question of each image as token ids, where its policy reads it.
        reads = self._find_readers(plans)
        texts: Sequence[str] = [""] * len(plans)
        if any(reads):
            request = images.budgets.request
            texts = self._find_questions(
                inputs, images, request.instructions, self._layout.token
            )
        images = replace(images, texts=texts)
        plans = self._ask(images, plans)
        prompt, slots = self._layout.arrange(inputs, images, plans, reads)
        items = self._make_items(images, plans, reads, sizes, slots)
        return replace(
            plan,
            images=tuple(items),
            hashes={**plan.hashes, "image": [item.identity for item in items]},
            prompt=None if prompt is inputs.prompt else list(prompt),
            videos=videos,
            sizes=tuple(sizes),
            trimming=trimming,
            counts=replace(
                plan.counts, images=counts, plans=[item.plan for item in items]
            ),
        )

    def plan_videos(
        self, videos: Media, counts: Sequence[TokenCount]
    ) -> list[PlannedItem]:
        """Items of processed videos; raises BudgetError or RequestError."""
        plans = videos.budgets.plan_videos(counts, videos.limit)
        reads = self._find_readers(plans)
        items = []
        for i, plan in enumerate(self._ask(videos, plans)):
            item = videos.plan_item(i, plan, reads[i])
            if plan.keeps_all:
                identity = make_identity("clip", videos.content(i))
                item = replace(item, identity=identity)
            items.append(item)
        return items

    def _count_images(
        self, inputs: ProcessorInputs, images: Media
    ) -> tuple[Media, list[TokenCount], Trimming | None]:
        """N of each image, with M and the digest of what is left where cells are dropped."""
        kwargs = inputs.hf_processor_mm_kwargs
        counts = [
            # An unknown uuid has no size; vLLM's caches will not know it either.
            self._placeholders.count_largest(self._info)
            if size is None
            else self._placeholders.count(self._info, size, kwargs)
            for size in images.sizes
        ]
        trimming = find_trimming(images.budgets)
        if trimming is None:
            return images, counts, None
        digests = []
        for i, digest in enumerate(images.digests):
            picture = images.items.get(i)
            encoded = self._encoded.find(trimming, digest, picture, kwargs)
            digests.append(encoded.digest)
            counts[i] = replace(counts[i], remaining=encoded.tokens)
        return replace(images, digests=digests), counts, trimming

    def _shrink(
        self, plan: ItemPlan, size: ImageSize | None, inputs: ProcessorInputs
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
            raise RequestError.of(
                f"{ENTRY}/budget", what, fix, kind=Refusal.OUT_OF_RANGE
            )
        # All tokens of the smaller image are kept.
        plan = replace(plan, budget=tokens, tokens=tokens)
        return plan, (smaller.width, smaller.height)

    # Questions, as far as policies read them.

    def _find_readers(self, plans: Sequence[ItemPlan]) -> list[bool]:
        """Which plans have a policy that reads the instruction."""
        needs = map(self.served.find_needs, plans)
        return [not of_plan.isdisjoint(INSTRUCTION_NEEDS) for of_plan in needs]

    def _find_questions(
        self,
        inputs: ProcessorInputs,
        media: Media,
        texts: Sequence[str] | None,
        token: int,
    ) -> Sequence[str]:
        """The text about each item: of its messages, or of the prompt.

        The prompt has it where there are no messages, or some whose images were not found.
        """
        if texts is not None and len(texts) == len(media.digests):
            return texts
        text = extract_prompt_instruction(
            inputs.prompt,
            token,
            self._info.get_tokenizer().decode,
            self._suffix,
            self._placeholders.text.replace("image", media.modality),
        )
        return [text] * len(media.digests)

    def _ask(self, media: Media, plans: Sequence[ItemPlan]) -> list[ItemPlan]:
        """The plans with their questions, and with the key of the features that are kept.

        Those of images and videos whose tokens are chosen are.
        """
        asked_plans = []
        for i, plan in enumerate(plans):
            plan = media.ask(plan, media.texts[i])
            if not plan.keeps_all:
                seed = ""
                if plan.keep == "random":
                    seed = hash_pixels(media.items.get(i), media.modality)
                key = make_feature_key(media.digests[i], media.salt, seed)
                plan = replace(plan, key=key)
            asked_plans.append(plan)
        return asked_plans

    def _make_items(
        self,
        images: Media,
        plans: Sequence[ItemPlan],
        reads: Sequence[bool],
        sizes: Sequence[Size | None],
        slots: Sequence[Slot],
    ) -> list[PlannedItem]:
        """Plan and identity of each item; those of a recall follow from the item before it."""
        turns = images.budgets.request.recall_turns or []
        items: list[PlannedItem] = []
        latest: dict[int, PlannedItem] = {}
        for slot in slots:
            i = slot.image
            plan = plans[i]
            if slot.part == "recall":
                assert slot.turn is not None
                item = latest[i]
                plan = item.plan.recall(slot.budget)
                plan = images.ask(plan, turns[slot.turn].text)
                # All earlier choices, down to the pixels, are part of the identity before it.
                identity = make_identity(
                    "recall", item.identity, slot.budget, plan.read
                )
                item = replace(item, plan=plan, identity=identity)
            elif plan.keeps_all and sizes[i] is None:
                # The image is then what it is in stock vLLM, caches included.
                item = PlannedItem(i, plan, images.digests[i], images.digests[i])
            else:
                if slot.part != "whole":
                    core, delta = plan.split(slot.core)
                    plan = core if slot.part == "core" else delta
                item = images.plan_item(i, plan, reads[i], sizes[i])
            latest[i] = item
            items.append(item)
        return items
