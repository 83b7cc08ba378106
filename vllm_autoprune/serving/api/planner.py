"""Plans of a request's images and videos: K, cache identity, instruction ids.

Images are planned before any of them is processed, because everything follows from image sizes, the
state and the request. Videos are planned after processing, because processors sample frames and
resize them together. Cached data of an item is found by the digest of its content.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from vllm.multimodal.parse import (
    ImageProcessorItems,
    ImageSize,
    VideoProcessorItems,
)

from vllm_autoprune.errors import Refusal, RequestError
from vllm_autoprune.serving.api.budgets import RequestBudgets, check_fields
from vllm_autoprune.serving.api.cells import (
    EncodedImages,
    Process,
    SentImage,
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
from vllm_autoprune.serving.api.sized_pictures import SizedPicture
from vllm_autoprune.serving.identities import (
    hash_pixels,
    identify_encoded,
    make_feature_key,
    make_identity,
)
from vllm_autoprune.serving.plan import ENTRY, LANGUAGE_IDS, NO_KEY, Ids, ItemPlan
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.tpdsl.base_policy import INSTRUCTION_NEEDS
from vllm_autoprune.tpdsl.materialize import materialize

if TYPE_CHECKING:
    from vllm.inputs import MultiModalHashes
    from vllm.multimodal.processing import BaseProcessingInfo, ProcessorInputs

logger = logging.getLogger("vllm.autoprune")


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The plan of a request, made before its inputs are processed."""

    hashes: Mapping[str, list[str]]
    """Cache identities of all inputs, by modality; those of pruned videos are made later."""

    images: Sequence[PlannedItem] = ()
    """Items of the images, in the prompt's order; a split or recalled image has several."""

    prompt: list[int] | None = None
    """Token ids with a placeholder for each item; None if every image has exactly one item."""

    videos: Media | None = None
    """Videos to be planned after processing; None if all are left whole."""

    embeddings: bool = False
    """Whether the images are embeddings, which stock vLLM handles; their sizes are checked after
    that."""

    sizes: Sequence[Size | None] = ()
    """Size to which each image is resized before it is processed; None for no change."""

    pictures: Sequence[SizedPicture] = ()
    """The images of a request that is planned alone; empty for others."""

    trimming: Trimming | None = None
    """The trimming that drops cells of the images."""

    counts: RequestCounts | None = None
    """What is counted of the request; None while vLLM profiles, or if nothing is pruned."""

    @property
    def processed_sizes(self) -> list[ImageSize]:
        """Sizes of the :attr:`pictures` as they would be processed, each picture once."""
        sizes = []
        for image in {item.key: item.image for item in self.images}.values():
            size = self.sizes[image]
            sizes.append(
                self.pictures[image].size if size is None else ImageSize(*size)
            )
        return sizes


class RequestPlanner:
    """Makes the plans of one served model's requests.

    ``hash_inputs`` is the stock processor's ``_get_mm_hashes``, and ``process`` processes one
    picture as that processor does.
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
        """What the chat template appends after the last user turn; empty without a template."""
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
        """Plans of dummy images: the server's own budget, and the longest text that may be read."""
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

    # Planning of a request, stage by stage.

    def plan_request(
        self, inputs: ProcessorInputs, fields: object, salt: str
    ) -> RequestPlan:
        """Plans and cache identities of a request's inputs; ``fields`` is its pruning entry.

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
        """``plan`` completed with the items of the request's images."""
        assert plan.counts is not None
        pictures = images.pictures if images.planned else ()
        images, counts, trimming = self._count_images(inputs, images)
        # Resolve K of each image, and the new size of images that the resize control shrinks.
        total = self.served.rules.total
        videos = plan.videos
        limit = total
        if total is not None and videos is not None:
            limit = total * len(counts) // (len(counts) + len(videos.digests))
        plans = images.budgets.plan_images(counts, limit)
        if total is not None and videos is not None:
            # Videos get what remains of the request's total.
            budget = sum(plan.budget for plan in plans)
            videos = replace(videos, limit=total - budget)
        sizes: list[Size | None] = [None] * len(plans)
        for i, size in enumerate(images.sizes):
            plans[i], sizes[i] = self._shrink(plans[i], size, inputs)
        # Tokenize the question of each image whose policy reads it.
        reads = self._find_readers(plans)
        texts: Sequence[str] = [""] * len(plans)
        if any(reads):
            request = images.budgets.request
            texts = self._find_questions(
                inputs, images, request.instructions, self._layout.token
            )
        images = replace(images, texts=texts)
        plans = self._ask(images, plans)
        prompt, slots, recomputed = self._layout.arrange(inputs, images, plans, reads)
        items = self._make_items(images, plans, reads, sizes, slots)
        return replace(
            plan,
            images=tuple(items),
            hashes={**plan.hashes, "image": [item.identity for item in items]},
            prompt=None if prompt is inputs.prompt else list(prompt),
            videos=videos,
            sizes=tuple(sizes),
            pictures=pictures,
            trimming=trimming,
            counts=replace(
                plan.counts,
                images=counts,
                plans=[item.plan for item in items],
                recomputed=recomputed,
            ),
        )

    def plan_videos(
        self, videos: Media, counts: Sequence[TokenCount]
    ) -> list[PlannedItem]:
        """Planned items of videos whose token counts are known; raises BudgetError or RequestError.

        The tokens of a video that keeps all are identified by its content alone.
        """
        plans = videos.budgets.plan_videos(counts, videos.limit)
        reads = self._find_readers(plans)
        items = []
        for i, plan in enumerate(self._ask(videos, plans)):
            item = videos.plan_item(i, plan, reads[i])
            if plan.keeps_all:
                identity = make_identity("clip", videos.content(i))
                item = replace(item, plan=plan.unpruned, identity=identity)
            items.append(item)
        return items

    def _count_images(
        self, inputs: ProcessorInputs, images: Media
    ) -> tuple[Media, list[TokenCount], Trimming | None]:
        """The images as they are encoded, their N and M, and the trimming if cells are dropped."""
        kwargs = inputs.hf_processor_mm_kwargs
        counts = [
            # The size of an unknown uuid is not known, but vLLM's caches will not know it either.
            self._placeholders.count_largest(self._info)
            if size is None
            else self._placeholders.count(self._info, size, kwargs)
            for size in images.sizes
        ]
        trimming = find_trimming(images.budgets)
        if trimming is None:
            return images, counts, None
        sent = [
            SentImage(digest, images.items.get(i))
            for i, digest in enumerate(images.digests)
        ]
        digests = []
        for i, (before, image) in enumerate(pairwise([None, *sent])):
            assert image is not None
            encoded = self._encoded.find(trimming, image, before, kwargs)
            if images.planned and not encoded.is_known:
                what = "which of its cells are dropped is decided by pixels"
                raise RequestError.of("image_url", what, "send the picture")
            digests.append(encoded.digest)
            counts[i] = replace(counts[i], remaining=encoded.tokens)
        return replace(images, digests=digests), counts, trimming

    def _shrink(
        self, plan: ItemPlan, size: ImageSize | None, inputs: ProcessorInputs
    ) -> tuple[ItemPlan, Size | None]:
        """The plan of an image, and its new size if the resize control shrinks it.

        If the number of tokens follows an image's size, the alternative to pruning is a smaller
        image: a client gets it by shrinking its pictures, and an operator by ``max_pixels``. Raises
        :class:`RequestError` if the processor makes more than K tokens of an image of any size.
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

    # Questions, for the policies that read them.

    def _find_readers(self, plans: Sequence[ItemPlan]) -> list[bool]:
        """Whether the policy of each plan reads the instruction."""
        needs = map(self.served.find_needs, plans)
        return [not of_plan.isdisjoint(INSTRUCTION_NEEDS) for of_plan in needs]

    def _find_questions(
        self,
        inputs: ProcessorInputs,
        media: Media,
        texts: Sequence[str] | None,
        token: int,
    ) -> Sequence[str]:
        """The text about each item, from the messages or from the prompt.

        It is taken from the prompt if there are no messages, or if their images were not found.
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
        """The plans with their questions, and with keys where features are cached.

        Features are cached for images and videos of which a policy chooses tokens, or would if they
        had more than K.
        """
        asked_plans = []
        for i, plan in enumerate(plans):
            plan = media.ask(plan, media.texts[i])
            if plan.runs_policy or not plan.keeps_all:
                seed = ""
                if plan.keep == "random":
                    seed = hash_pixels(media.items.get(i), media.modality)
                encoded = identify_encoded(media.digests[i], plan)
                key = make_feature_key(encoded, media.salt, seed)
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
        """Planned items, one per slot; a recall's identity follows from the item before it."""
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
                # The previous identity covers all earlier choices and the pixels.
                identity = make_identity(
                    "recall", item.identity, slot.budget, plan.read
                )
                item = replace(item, plan=plan, identity=identity)
            elif slot.part == "whole" and plan.keeps_all and sizes[i] is None:
                # The image is then the same as in stock vLLM, including its cache entries.
                digest = images.digests[i]
                item = PlannedItem(i, plan.unpruned, digest, digest)
            else:
                if slot.part != "whole":
                    core, delta = plan.split(slot.core)
                    plan = core if slot.part == "core" else delta
                item = images.plan_item(i, plan, reads[i], sizes[i])
            latest[i] = item
            items.append(item)
        return items
