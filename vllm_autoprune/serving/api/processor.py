"""Multi-modal processor mixin: K placeholders per image, cache identities, plans for the worker.

vLLM's own steps process and cache the images of a request, each once and by its content. The plans
of :mod:`~vllm_autoprune.serving.api.planner` are added to the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from vllm.multimodal.cache import LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing import ProcessorInputs

from vllm_autoprune.serving.api.budgets import check_unpruned
from vllm_autoprune.serving.api.cells import trim_images
from vllm_autoprune.serving.api.engine_requests import RenderedHashes
from vllm_autoprune.serving.api.image_cache import RenderedItem, Rendering, Waiting
from vllm_autoprune.serving.api.image_tensors import (
    SeparateImages,
    resize_images,
    separate_images,
    with_images,
)
from vllm_autoprune.serving.api.media import PlannedItem
from vllm_autoprune.serving.api.placeholders import Placeholders, TokenCount
from vllm_autoprune.serving.api.planner import RequestPlan, RequestPlanner
from vllm_autoprune.serving.api.positions import (
    ItemFields,
    ItemSize,
    PromptItem,
    find_placeholders,
    get_size,
    pack_items,
    with_size,
)
from vllm_autoprune.serving.api.refusal import refusing_requests
from vllm_autoprune.serving.api.request import SALT, CacheSalt
from vllm_autoprune.serving.api.sized_pictures import SizedTexts
from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.identities import make_identity
from vllm_autoprune.serving.plan import FIELD, LINE, REQUEST_FIELD, Ids, ItemPlan
from vllm_autoprune.serving.served_state import served_state

if TYPE_CHECKING:
    from PIL.Image import Image
    from vllm.inputs import MultiModalHashes, MultiModalInput
    from vllm.multimodal.cache import BaseMultiModalProcessorCache
    from vllm.multimodal.processing import (
        BaseDummyInputsBuilder,
        BaseProcessingInfo,
        TimingContext,
    )
    from vllm.multimodal.processing import BaseMultiModalProcessor as _Stock
    from vllm.multimodal.processing.processor import (
        MultiModalProcessingResult,
        MultiModalPromptUpdates,
        ResolvedPromptUpdate,
    )
    from vllm.multimodal.registry import _ProcessorFactories

_PROFILE = "_autoprune_profile"
_PROFILING = object()
"""Marks profiling inputs; compared by identity, so that no request can send it."""


def make_pruned_factories(
    stock: _ProcessorFactories, placeholders: Placeholders
) -> _ProcessorFactories:
    """vLLM's ``_ProcessorFactories`` of a model, which build the pruned form of its processor."""

    def build(info: BaseProcessingInfo, dummy_inputs: BaseDummyInputsBuilder) -> _Stock:
        processor = stock.processor(info, dummy_inputs)
        if served_state(info.ctx.model_config) is None:
            return processor
        kind = type(processor)
        members = {"_placeholders": placeholders}
        pruned = type(f"Autoprune{kind.__name__}", (PrunedProcessor, kind), members)
        return pruned(info, dummy_inputs)

    return replace(stock, processor=build)


@dataclass
class _Inputs(ProcessorInputs):
    """Inputs of vLLM's steps, with results that later steps need."""

    plan: RequestPlan = field(default_factory=lambda: RequestPlan({}))

    items: dict[str, list[PlannedItem]] = field(default_factory=dict)
    """Planned items by modality; videos are added after they are processed."""

    keys: Mapping[str, list[str]] = field(default_factory=dict)
    """Keys of the tensors in vLLM's processor cache, by modality."""

    spans: dict[str, list[int | None]] = field(default_factory=dict)
    """Positions that each whole item takes, by modality, known once all items are laid out."""


@depends_on(
    "vllm.multimodal.processing:BaseMultiModalProcessor",
    "apply",
    "_cached_apply_hf_processor",
    "_get_mm_hashes",
    "_get_mm_prompt_updates",
    "_recompute_cached_prompt_update",
)
class PrunedProcessor(SeparateImages):
    """Mixin for a stock multi-modal processor, listed before it in the bases."""

    info: BaseProcessingInfo
    _placeholders: Placeholders

    @cached_property
    def _waiting(self) -> Waiting:
        return Waiting()

    @cached_property
    def _sized_texts(self) -> SizedTexts:
        return SizedTexts(self._outline)

    @cached_property
    def _marks(self) -> Ids:
        """Ids of the rows that begin and end an image, if the worker makes these."""
        find = self._placeholders.marks
        return () if find is None else find(self.info)

    @cached_property
    def recall_token(self) -> str | None:
        """Text that marks a turn which recalls; None if an image cannot be several items."""
        if self._placeholders.unsplittable:
            return None
        token = self._placeholders.token(self.info)
        return str(self.info.get_tokenizer().convert_ids_to_tokens(token))

    @cached_property
    def _planner(self) -> RequestPlanner:
        served = served_state(self.info.ctx.model_config)
        assert served is not None
        stock = super()._get_mm_hashes
        return RequestPlanner(
            self.info, served, self._placeholders, stock, self._process_alone
        )

    def measure(self, data: ItemFields, rows: int) -> ItemSize:
        """Size of a processed image or video of ``rows`` rows, by its tensors."""
        measure = self._placeholders.measure
        size = ItemSize() if measure is None else measure(self.info, data)
        return (
            replace(size, span=rows)
            if self._planner.served.capabilities.axes == LINE
            else size
        )

    # The methods below override vLLM's steps, in the order in which vLLM calls them.

    def get_dummy_inputs(self, *args: object, **kwargs: object) -> ProcessorInputs:
        """Profiling inputs, marked so that they keep their unpruned size."""
        inputs = super().get_dummy_inputs(*args, **kwargs)
        return replace(inputs, hf_processor_mm_kwargs={_PROFILE: _PROFILING})

    def apply(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext
    ) -> MultiModalInput:
        """As stock, with a plan; raises RefusedRequest, which vLLM answers by 400."""
        with refusing_requests():
            planned = self._plan(inputs)
            processed = super().apply(planned, timing_ctx)
        surplus = self._pack(processed, planned)
        counts = planned.plan.counts
        count = None
        if counts is not None:
            count = partial(counts.add, [item.plan for item in planned.items["video"]])
        rendering = planned.cache if isinstance(planned.cache, Rendering) else None
        keys = {
            item.identity: item.key
            for items in planned.items.values()
            for item in items
        }
        processed["mm_hashes"] = RenderedHashes(
            processed["mm_hashes"],
            count,
            keys,
            rendering,
            surplus,
            planned.plan.pictures,
        )
        return processed

    def _plan(self, inputs: ProcessorInputs) -> _Inputs:
        """Inputs with an item for every part of an image, and without the plugin's own fields."""
        kwargs = dict(inputs.hf_processor_mm_kwargs)
        fields = kwargs.pop(REQUEST_FIELD, None)
        is_profile = kwargs.pop(_PROFILE, None) is _PROFILING
        salt = kwargs.pop(SALT, None)
        inputs = separate_images(replace(inputs, hf_processor_mm_kwargs=kwargs))
        if is_profile:
            plan = self._planner.plan_profiling(inputs)
        else:
            salt = salt if isinstance(salt, CacheSalt) else ""
            plan = self._planner.plan_request(inputs, fields, salt)
        if not plan.pictures:
            inputs = resize_images(self.info, inputs, plan.sizes)
        items = {"image": [*plan.images], "video": []}
        planned = _Inputs(**vars(inputs), plan=plan, items=items)
        planned.mm_uuid_items = None
        if plan.prompt is not None:
            # vLLM has already checked the number of images against ``--limit-mm-per-prompt``.
            images = inputs.mm_data_items["image"]
            parts = [images.get(item.image) for item in plan.images]
            planned.mm_data_items = with_images(inputs.mm_data_items, parts)
            planned.prompt = plan.prompt
        if plan.pictures:
            planned.cache = None
        elif isinstance(inputs.cache, LruKeyReplicatedSenderCache):
            planned.cache = Rendering(inputs.cache, self._waiting)
        return planned

    def _cached_apply_hf_processor(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext
    ) -> MultiModalProcessingResult:
        """Process each image once, and give every item its plan and K of N placeholders."""
        assert isinstance(inputs, _Inputs)
        plan = inputs.plan
        videos = plan.videos
        content = _find_content(inputs)

        def process(content: _Inputs) -> MultiModalProcessingResult:
            if plan.pictures:
                return self._sized_texts.process(content, plan.processed_sizes)
            stock = super(PrunedProcessor, self)._cached_apply_hf_processor
            with trim_images(plan.trimming):
                return stock(content, timing_ctx)

        result = process(content)._replace(hashes=plan.hashes)
        if isinstance(inputs.cache, Rendering):
            # A copy without the cache, because the cache holds this function: the cycle would keep
            # the pictures and tensors of a request that is only rendered until the next garbage
            # collection.
            uncached = copy(content)
            uncached.cache = None
            inputs.cache.process_again = lambda: _index_items(process(uncached))
        if videos is not None:
            counts = _count_videos(result)
            inputs.items["video"] = self._planner.plan_videos(videos, counts)
        if plan.embeddings:
            self._check_embeddings(result, inputs.items["video"])
        for modality, items in inputs.items.items():
            if items:
                result = self._attach_plans(result, modality, items, inputs.cache)
        inputs.spans = {
            modality: [get_size(updates[0].content).span for updates in items]
            for modality, items in result.prompt_updates.items()
            if modality in inputs.items
        }
        return result

    def _outline(
        self, picture: Image, kwargs: Mapping[str, object]
    ) -> Sequence[ResolvedPromptUpdate]:
        """Prompt text of one picture."""
        items = MultiModalDataItems({"image": ImageProcessorItems([picture])})
        tensors = self._process_alone(picture, kwargs)
        fields = self._get_mm_fields_config(tensors, kwargs)
        data = MultiModalKwargsItems.from_hf_inputs(tensors, fields)
        return self._get_mm_prompt_updates(items, kwargs, data)["image"][0]

    def _attach_plans(
        self,
        result: MultiModalProcessingResult,
        modality: str,
        items: list[PlannedItem],
        cache: BaseMultiModalProcessorCache | None,
    ) -> MultiModalProcessingResult:
        """The result with all items of a modality, their plans, and K placeholders for each.

        ``result`` has every image once, however many items it has.
        """
        processed = result.kwargs[modality]
        indices = {key: i for i, key in enumerate(_find_first_items(items))}
        is_repeated = len(processed) < len(items)
        seen = set[int]()
        tensors: list[MultiModalKwargsItem] = []
        updates: list[list[ResolvedPromptUpdate]] = []
        for i, item in enumerate(items):
            index = indices[item.key] if is_repeated else i
            data = processed[index]
            if index in seen and cache is not None and cache.is_cached_item(item.key):
                # The cache may count its reads, so each image is read once.
                data, _ = cache.get_and_update_item(None, item.key)
            seen.add(index)
            plan = item.plan
            updates.append([])
            for update in result.prompt_updates[modality][index]:
                update = self._recompute_cached_prompt_update(update, i)
                content, plan = self._placeholders.lay_out(
                    update.content,
                    item.plan,
                    self._marks if modality == "image" else (),
                )
                updates[-1].append(replace(update, content=content))
            items[i] = replace(item, plan=plan)
            tensors.append(_carry_plan(data or {}, plan))
        hashes = [item.identity for item in items]
        return result._replace(
            hashes={**result.hashes, modality: hashes},
            kwargs=MultiModalKwargsItems({**result.kwargs, modality: tensors}),
            prompt_updates={**result.prompt_updates, modality: updates},
        )

    def _check_embeddings(
        self, result: MultiModalProcessingResult, videos: Sequence[PlannedItem]
    ) -> None:
        """Refuse image embeddings that have more tokens than the server lets requests keep."""
        rules = self._planner.served.rules
        limit = rules.total
        if limit is not None:
            limit -= sum(item.plan.budget for item in videos)
        sizes = [
            sum(sum(find_placeholders(update.content)) for update in of_image)
            for of_image in result.prompt_updates["image"]
        ]
        check_unpruned(rules, sizes, limit)

    def _get_mm_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> MultiModalPromptUpdates:
        """As stock, with the size of every item attached to its prompt text."""
        updates = super()._get_mm_prompt_updates(
            mm_items, hf_processor_mm_kwargs, out_mm_kwargs
        )
        sized = dict(updates)
        for modality in updates.keys() & {"image", "video"}:
            items = zip(updates[modality], out_mm_kwargs.get(modality, ()), strict=True)
            sized[modality] = [
                [with_size(update, partial(self.measure, data)) for update in of_item]
                for of_item, data in items
            ]
        return sized

    def _get_mm_hashes(self, inputs: ProcessorInputs) -> MultiModalHashes:
        """The keys by which vLLM's processor cache holds the images."""
        assert isinstance(inputs, _Inputs)
        return dict(inputs.keys)

    def _pack(self, processed: MultiModalInput, inputs: _Inputs) -> int:
        """Pack the items that have no room to keep their places; returns the surplus positions."""
        places = []
        prompt_items = []
        for modality, spans in inputs.spans.items():
            items = inputs.items[modality]
            for i, span in enumerate(spans):
                image = i
                if items:
                    image = items[i].image
                    span = None if items[i].plan.positions == "packed" else span
                position = processed["mm_placeholders"][modality][i]
                image_key = modality, image
                item = PromptItem(position.offset, position.length, span, image_key)
                places.append((modality, i))
                prompt_items.append(item)
        context = self.info.ctx.model_config.max_model_len
        packed, surplus = pack_items(prompt_items, context)
        for modality, i in [places[number] for number in packed]:
            items = inputs.items[modality]
            if items:
                plan = replace(items[i].plan, positions="packed")
                identity = make_identity("packed", items[i].identity)
                items[i] = replace(items[i], plan=plan, identity=identity)
                data = processed["mm_kwargs"][modality]
                data[i] = _carry_plan(data[i], plan)
                processed["mm_hashes"][modality][i] = identity
        return surplus


def _find_content(inputs: _Inputs) -> _Inputs:
    """The inputs with every image once, however many items it has, and the keys of its tensors."""
    images = inputs.items["image"]
    first_items = _find_first_items(images)
    keys = dict(inputs.plan.hashes)
    if images:
        keys["image"] = [*first_items]
    if inputs.plan.videos is not None:
        keys["video"] = inputs.plan.videos.keys
    content = replace(inputs, keys=keys)
    if len(first_items) < len(images):
        pictures = inputs.mm_data_items["image"]
        content.mm_data_items = with_images(
            inputs.mm_data_items, [pictures.get(i) for i in first_items.values()]
        )
    return content


def _count_videos(result: MultiModalProcessingResult) -> list[TokenCount]:
    """N and T of each processed video."""
    counts = []
    for (update,) in result.prompt_updates["video"]:
        tokens = sum(find_placeholders(update.content))
        frames = get_size(update.content).frames
        counts.append(TokenCount(tokens, frames=frames))
    return counts


def _carry_plan(data: ItemFields, plan: ItemPlan) -> MultiModalKwargsItem:
    """An item's tensors with its plan attached."""
    row = MultiModalFieldElem(plan.encode(), MultiModalBatchedField(keep_on_cpu=True))
    return MultiModalKwargsItem({**data, FIELD: row})


def _find_first_items(items: Sequence[PlannedItem]) -> dict[str, int]:
    """Index of the first item for each key of tensors."""
    first_items: dict[str, int] = {}
    for i, item in enumerate(items):
        first_items.setdefault(item.key, i)
    return first_items


def _index_items(result: MultiModalProcessingResult) -> dict[str, RenderedItem]:
    """Processed items by the key of their tensors."""
    items = {}
    for modality, keys in result.hashes.items():
        updates = result.prompt_updates[modality]
        for i, key in enumerate(keys):
            items[key] = RenderedItem(result.kwargs[modality][i], updates[i])
    return items
