"""Multi-modal processor mixin: K placeholders an image, cache identities, plans for the worker.

vLLM's own steps process and cache the images of a request, each once and by its content; the plans
of :mod:`~vllm_autoprune.serving.api.planner` are added to what they make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from PIL import Image
from transformers import BatchFeature
from vllm.multimodal.cache import LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing import ProcessorInputs

from vllm_autoprune.serving.api.cells import (
    TRIMMING,
    join_images,
    trim_images,
    trimmed_fields,
)
from vllm_autoprune.serving.api.clips import Clips
from vllm_autoprune.serving.api.engine_requests import (
    RenderedHashes,
    RenderedItem,
    Rendering,
    Waiting,
)
from vllm_autoprune.serving.api.layout import Placeholders, PlannedItem
from vllm_autoprune.serving.api.planner import RequestPlan, RequestPlanner, Size
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
from vllm_autoprune.serving.api.resolve import check_unpruned
from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.identities import make_identity
from vllm_autoprune.serving.plan import (
    ENTRY,
    FIELD,
    LINE,
    REQUEST_FIELD,
    ItemPlan,
    refuse,
)
from vllm_autoprune.serving.served_state import served_state

if TYPE_CHECKING:
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

else:
    _Stock = object

_PROFILE = "_autoprune_profile"
_PROFILING = object()
"""Marks profiling; compared by identity, so that no request can send it."""


def make_pruned_factories(
    stock: _ProcessorFactories, placeholders: Placeholders
) -> _ProcessorFactories:
    """vLLM's ``_ProcessorFactories`` of a model, building the pruned form of its processor."""

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
    """Inputs with an item for every plan; or with every image once, and the ``keys`` of caches.

    ``clips`` are filled when they are planned, and ``spans`` when all items are laid out: the
    positions that each takes as a whole, by modality.
    """

    plan: RequestPlan = field(default_factory=lambda: RequestPlan((), {}))
    clips: list[PlannedItem] = field(default_factory=list)
    keys: Mapping[str, list[str]] = field(default_factory=dict)
    spans: dict[str, list[int | None]] = field(default_factory=dict)


@depends_on(
    "vllm.multimodal.processing:BaseMultiModalProcessor",
    "apply",
    "_cached_apply_hf_processor",
    "_apply_hf_processor_main",
    "_get_cache_missing_items",
    "_get_mm_fields_config",
    "_get_mm_hashes",
    "_get_mm_prompt_updates",
    "_recompute_cached_prompt_update",
)
@depends_on("vllm.multimodal.inputs:MultiModalKwargsItems", "from_hf_inputs")
@depends_on("vllm.multimodal.parse:MultiModalDataItems", "select")
class PrunedProcessor(_Stock):
    """Mixin before a stock multi-modal processor."""

    info: BaseProcessingInfo
    _placeholders: Placeholders

    @cached_property
    def _waiting(self) -> Waiting:
        return Waiting()

    @cached_property
    def recall_token(self) -> str | None:
        """Text that marks a turn which recalls; None where an image cannot be several items."""
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
        """Size of a processed image or video of so many rows, by its tensors."""
        measure = self._placeholders.measure
        size = ItemSize() if measure is None else measure(self.info, data)
        return (
            replace(size, span=rows)
            if self._planner.served.capabilities.axes == LINE
            else size
        )

    def _process_alone(
        self, picture: object, hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        alone = MultiModalDataItems({"image": ImageProcessorItems([picture])})
        return super()._apply_hf_processor_main(alone, hf_kwargs)

    # The methods below override vLLM's steps, in the order in which vLLM calls them.

    def get_dummy_inputs(self, *args: object, **kwargs: object) -> ProcessorInputs:
        """Profiling inputs, marked so that they keep their unpruned size."""
        inputs = super().get_dummy_inputs(*args, **kwargs)
        return replace(inputs, hf_processor_mm_kwargs={_PROFILE: _PROFILING})

    def apply(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext
    ) -> MultiModalInput:
        """As stock, with a plan; raises RefusedRequest, which vLLM answers by 400."""
        kwargs = dict(inputs.hf_processor_mm_kwargs)
        fields = kwargs.pop(REQUEST_FIELD, None)
        profile = kwargs.pop(_PROFILE, None) is _PROFILING
        salt = kwargs.pop(SALT, None)
        plain = replace(inputs, hf_processor_mm_kwargs=kwargs)
        with refusing_requests():
            if profile:
                plan = self._planner.plan_profiling(plain)
            else:
                salt = salt if isinstance(salt, CacheSalt) else ""
                plan = self._planner.plan_request(plain, fields, salt)
            resized = _resize_images(self.info, plain, plan.sizes)
        # An item for every part of an image, now that vLLM has counted the images against
        # ``--limit-mm-per-prompt``.
        planned = {**vars(resized), "plan": plan, "mm_uuid_items": None}
        if plan.prompt is not None:
            images = [
                resized.mm_data_items["image"].get(item.image) for item in plan.items
            ]
            planned |= {
                "prompt": plan.prompt,
                "mm_data_items": _with_images(resized, images),
            }
        rendering = None
        if isinstance(inputs.cache, LruKeyReplicatedSenderCache):
            planned["cache"] = rendering = Rendering(inputs.cache, self._waiting)
        planned_inputs = _Inputs(**planned)
        with refusing_requests():  # a clip or embeddings, whose size is known now
            processed = super().apply(planned_inputs, timing_ctx)
        clips = planned_inputs.clips
        count = plan.count and partial(plan.count, [clip.plan for clip in clips])
        surplus, items = self._pack(processed, planned_inputs)
        keys = {item.identity: item.key for item in items}
        hashes = RenderedHashes(processed["mm_hashes"], count, keys, rendering, surplus)
        processed["mm_hashes"] = hashes
        return processed

    def _pack(
        self, processed: MultiModalInput, inputs: _Inputs
    ) -> tuple[int, Sequence[PlannedItem]]:
        """Pack items that have no room for their places; positions beyond tokens, and all items."""
        planned = {"image": [*inputs.plan.items], "video": [*inputs.clips]}
        numbers = [
            (modality, i)
            for modality, spans in inputs.spans.items()
            for i in range(len(spans))
        ]
        items = []
        for modality, i in numbers:
            of_modality = planned[modality]
            span = inputs.spans[modality][i]
            item = of_modality[i] if of_modality else None
            if item is not None and item.plan.positions == "packed":
                span = None
            place = processed["mm_placeholders"][modality][i]
            image = i if item is None else item.image
            items.append(
                PromptItem(place.offset, place.length, span, (modality, image))
            )
        packed, surplus = pack_items(items, self.info.ctx.model_config.max_model_len)
        for modality, i in (numbers[at] for at in packed if planned[numbers[at][0]]):
            item = planned[modality][i]
            data = processed["mm_kwargs"][modality][i]
            plan = replace(ItemPlan.decode(data[FIELD].data), positions="packed")
            item = replace(
                item, plan=plan, identity=make_identity("packed", item.identity)
            )
            planned[modality][i] = item
            processed["mm_hashes"][modality][i] = item.identity
            processed["mm_kwargs"][modality][i] = _carry_plan(data, plan)
        return surplus, [*planned["image"], *planned["video"]]

    def _cached_apply_hf_processor(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext
    ) -> MultiModalProcessingResult:
        """Process each image once, and give every item its plan and K of N placeholders."""
        assert isinstance(inputs, _Inputs)
        plan = inputs.plan
        cache = inputs.cache
        at_key = _find_first_items(plan.items)
        keys = {**plan.hashes, "image": [*at_key]} if plan.items else dict(plan.hashes)
        if plan.clips is not None:
            keys["video"] = plan.clips.keys
        content = {**vars(inputs), "keys": keys}
        if len(at_key) < len(plan.items):
            images = [inputs.mm_data_items["image"].get(at) for at in at_key.values()]
            content["mm_data_items"] = _with_images(inputs, images)
        with trim_images(plan.trimming):
            result = super()._cached_apply_hf_processor(_Inputs(**content), timing_ctx)
        if isinstance(cache, Rendering):
            # Without the cache, which holds the function: of a request that is only rendered, the
            # cycle would keep pictures and tensors until the next garbage collection.
            uncached = _Inputs(**{**content, "cache": None})

            def process_again() -> dict[str, RenderedItem]:
                stock = super(PrunedProcessor, self)._cached_apply_hf_processor
                with trim_images(plan.trimming):
                    data = stock(uncached, timing_ctx)
                return {
                    key: RenderedItem(tensors, updates)
                    for modality, keys in data.hashes.items()
                    for key, tensors, updates in zip(
                        keys,
                        data.kwargs[modality],
                        data.prompt_updates[modality],
                        strict=True,
                    )
                }

            cache.process_again = process_again
        result = result._replace(hashes=plan.hashes)
        if plan.clips is not None:
            result = self._plan_clips(plan.clips, result, inputs)
        if plan.embeddings:
            self._check_embeddings(result, inputs.clips)
        if plan.items:
            result = self._plan_images(plan.items, result, cache)
        inputs.spans = {
            modality: [get_size(updates[0].content).span for updates in items]
            for modality, items in result.prompt_updates.items()
            if modality in ("image", "video")
        }
        return result

    def _plan_images(
        self,
        items: Sequence[PlannedItem],
        result: MultiModalProcessingResult,
        cache: BaseMultiModalProcessorCache | None,
    ) -> MultiModalProcessingResult:
        """The result, which has every image once, with all items: their plans, K placeholders."""
        at_key = _find_first_items(items)
        places = {key: place for place, key in enumerate(at_key)}
        tensors: list[MultiModalKwargsItem] = []
        updates: list[list[ResolvedPromptUpdate]] = []
        for at, item in enumerate(items):
            place = places[item.key]
            image = result.kwargs["image"][place]
            if (
                at_key[item.key] < at
                and cache is not None
                and cache.is_cached_item(item.key)
            ):
                # The cache may count how often it is read.
                image, _ = cache.get_and_update_item(None, item.key)
            updates.append([])
            item_plan = item.plan
            for update in result.prompt_updates["image"][place]:
                update = self._recompute_cached_prompt_update(update, at)
                content, item_plan = self._placeholders.lay_out(
                    update.content, item.plan
                )
                updates[-1].append(replace(update, content=content))
            tensors.append(_carry_plan(image or {}, item_plan))
        return result._replace(
            kwargs=MultiModalKwargsItems({**result.kwargs, "image": tensors}),
            prompt_updates={**result.prompt_updates, "image": updates},
        )

    def _check_embeddings(
        self, result: MultiModalProcessingResult, clips: Sequence[PlannedItem]
    ) -> None:
        """Refuse embeddings of images that are larger than the server lets requests keep."""
        rules = self._planner.served.rules
        limit = rules.total
        if limit is not None:
            limit -= sum(clip.plan.budget for clip in clips)
        sizes = [
            sum(sum(find_placeholders(update.content)) for update in of_image)
            for of_image in result.prompt_updates["image"]
        ]
        check_unpruned(rules, sizes, limit)

    def _plan_clips(
        self,
        clips: Clips,
        result: MultiModalProcessingResult,
        inputs: _Inputs,
    ) -> MultiModalProcessingResult:
        """The result with a plan, an identity and K placeholders for every clip."""
        contents = [update.content for (update,) in result.prompt_updates["video"]]
        sizes = [
            (sum(find_placeholders(content)), get_size(content).frames)
            for content in contents
        ]
        inputs.clips[:] = clips.plan(
            self._planner.served, self._planner.tokenizer, sizes
        )
        tensors = []
        updates = []
        for item, data, (update,) in zip(
            inputs.clips,
            result.kwargs["video"],
            result.prompt_updates["video"],
            strict=True,
        ):
            content, plan = self._placeholders.lay_out(update.content, item.plan)
            updates.append([replace(update, content=content)])
            tensors.append(_carry_plan(data or {}, plan))
        return result._replace(
            hashes={**result.hashes, "video": [item.identity for item in inputs.clips]},
            kwargs=MultiModalKwargsItems({**result.kwargs, "video": tensors}),
            prompt_updates={**result.prompt_updates, "video": updates},
        )

    def _get_mm_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> MultiModalPromptUpdates:
        """As stock, with the size of every item beside its prompt text."""
        updates = super()._get_mm_prompt_updates(
            mm_items, hf_processor_mm_kwargs, out_mm_kwargs
        )
        sized = {
            modality: [
                [
                    with_size(update, partial(self.measure, data))
                    for update in updates_of_item
                ]
                for updates_of_item, data in zip(
                    updates[modality], out_mm_kwargs.get(modality, ()), strict=True
                )
            ]
            for modality in ("image", "video")
            if modality in updates
        }
        return {**updates, **sized}

    def _get_cache_missing_items(
        self,
        cache: BaseMultiModalProcessorCache,
        mm_data_items: MultiModalDataItems,
        mm_hashes: MultiModalHashes,
    ) -> tuple[Mapping[str, list[bool]], MultiModalDataItems]:
        """As stock, with the pictures themselves, not copies: trimming knows them."""
        cached, missing = super()._get_cache_missing_items(
            cache, mm_data_items, mm_hashes
        )
        if TRIMMING.get() is None or "image" not in missing:
            return cached, missing
        images = zip(mm_data_items["image"].get_all(), cached["image"], strict=True)
        same = ImageProcessorItems(
            [image for image, is_cached in images if not is_cached]
        )
        return cached, MultiModalDataItems({**missing, "image": same})

    def _apply_hf_processor_main(
        self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        """As stock, of every image by itself.

        Hugging Face processors pad a batch to its largest image, so the tensors of an image would
        depend on those beside it.
        """
        images = mm_items.get("image")
        trimming = TRIMMING.get()
        if images is None or not RequestPlanner.can_prune(mm_items):
            return super()._apply_hf_processor_main(mm_items, hf_kwargs)
        if len(images) < 2 and trimming is None:
            return super()._apply_hf_processor_main(mm_items, hf_kwargs)
        pictures = [images.get(at) for at in range(len(images))]
        process = self._process_alone
        if trimming is not None:
            made = [
                trimming.process(picture, hf_kwargs, process) for picture in pictures
            ]
        else:
            made = [process(picture, hf_kwargs) for picture in pictures]
        each = []
        for data in join_images(made):
            fields = self._get_mm_fields_config(data, hf_kwargs)
            each += MultiModalKwargsItems.from_hf_inputs(data, fields)["image"]
        joined = {
            name: element.field.reduce_data([tensors[name] for tensors in each])
            for name, element in each[0].items()
        }
        other_items = {
            name: items for name, items in mm_items.items() if name != "image"
        }
        if other_items:
            joined |= super()._apply_hf_processor_main(
                MultiModalDataItems(other_items), hf_kwargs
            )
        return BatchFeature(joined)

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        """As stock, with rows of pixels for kept cells only."""
        fields = super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)
        return trimmed_fields(fields, hf_inputs)

    def _get_mm_hashes(self, inputs: ProcessorInputs) -> MultiModalHashes:
        """The keys by which vLLM's processor cache holds the images."""
        assert isinstance(inputs, _Inputs)
        return dict(inputs.keys)


def _carry_plan(data: ItemFields, plan: ItemPlan) -> MultiModalKwargsItem:
    """An item's tensors with its plan."""
    row = MultiModalFieldElem(plan.encode(), MultiModalBatchedField(keep_on_cpu=True))
    return MultiModalKwargsItem({**data, FIELD: row})


def _find_first_items(items: Sequence[PlannedItem]) -> dict[str, int]:
    """The first of the items that have the same tensors, by their key."""
    first_items: dict[str, int] = {}
    for i, item in enumerate(items):
        first_items.setdefault(item.key, i)
    return first_items


def _with_images(
    inputs: ProcessorInputs, images: Sequence[object]
) -> MultiModalDataItems:
    return MultiModalDataItems(
        {**inputs.mm_data_items, "image": ImageProcessorItems(images)}
    )


def _resize_images(
    info: BaseProcessingInfo, inputs: ProcessorInputs, sizes: Sequence[Size | None]
) -> ProcessorInputs:
    """Inputs with the images of these sizes; None leaves an image as it is.

    Resized with the processor's own interpolation. An image that was sent by its name is None.
    """
    if not any(sizes):
        return inputs
    items = inputs.mm_data_items["image"]
    images = [
        items.data[i] if size is None else items.get(i) for i, size in enumerate(sizes)
    ]
    for i, (image, size) in enumerate(zip(images, sizes, strict=True)):
        if size is None or image is None:
            continue
        if not isinstance(image, Image.Image):
            what = "can resize pictures, and this image is an array"
            fix = "send it as a picture"
            raise refuse(f"{ENTRY}/keep", what, fix)
        method = Image.Resampling(int(info.get_hf_processor().image_processor.resample))
        images[i] = image.convert("RGB").resize(size, method)
    return replace(inputs, mm_data_items=_with_images(inputs, images))
