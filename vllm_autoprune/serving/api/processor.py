"""Multi-modal processor mixin: K placeholders an image, cache identities, plans for the worker.

The plans are made by :mod:`~vllm_autoprune.serving.api.request_plan`; this module carries them
through vLLM's steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from transformers import BatchFeature
from vllm.multimodal.cache import LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.serving.api.engine_requests import ImageCounts, RenderedHashes
from vllm_autoprune.serving.api.feature_keys import hash_pixels
from vllm_autoprune.serving.api.metrics import count_refused_request
from vllm_autoprune.serving.api.processed_images import (
    MAX_BYTES,
    ProcessedImage,
    ProcessedImages,
)
from vllm_autoprune.serving.api.request_fields import REQUEST_FIELD, SALT, CacheSalt
from vllm_autoprune.serving.api.request_plan import RequestPlan, RequestPlanner, prunable
from vllm_autoprune.serving.api.resized_images import resize_images
from vllm_autoprune.serving.api.unsent_items import UnsentItems, collect_tensors
from vllm_autoprune.serving.shared.identities import make_feature_key
from vllm_autoprune.serving.shared.metrics_setup import find_metrics_setup
from vllm_autoprune.serving.shared.placeholders import Placeholders, shorten_placeholders
from vllm_autoprune.serving.shared.plan import (
    FIELD,
    ItemPlan,
)
from vllm_autoprune.serving.shared.served_state import served_state

if TYPE_CHECKING:
    from vllm.inputs import MultiModalHashes, MultiModalInput
    from vllm.multimodal.processing import (
        BaseDummyInputsBuilder,
        BaseProcessingInfo,
        ProcessorInputs,
        TimingContext,
    )
    from vllm.multimodal.processing import BaseMultiModalProcessor as _Stock
    from vllm.multimodal.processing.processor import (
        MultiModalPromptUpdates,
        ResolvedPromptUpdate,
    )
    from vllm.multimodal.registry import _ProcessorFactories

else:
    _Stock = object

_PLAN = "_autoprune_plan"
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
        pruned = type(
            f"Autoprune{kind.__name__}", (PrunedProcessor, kind), {"_placeholders": placeholders}
        )
        return pruned(info, dummy_inputs)

    return replace(stock, processor=build)


class PrunedProcessor(_Stock):
    """Mixin before a stock multi-modal processor.

    A plan is made once, in :meth:`apply`, and then goes through vLLM's own steps as one entry
    of the processor arguments, which each override takes out before stock code sees them.
    """

    info: BaseProcessingInfo
    _placeholders: Placeholders

    @cached_property
    def _kv_bytes(self) -> int:
        setup = find_metrics_setup(self.info.ctx.model_config)
        return 0 if setup is None else setup.kv_bytes

    @cached_property
    def _unsent(self) -> UnsentItems:
        return UnsentItems()

    @cached_property
    def _processed(self) -> ProcessedImages:
        """Empty forever where the operator has turned vLLM's own cache of processed images off."""
        gigabytes: float = self.info.ctx.get_mm_config().mm_processor_cache_gb
        return ProcessedImages(min(MAX_BYTES, int(gigabytes * (1 << 30))))

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
        return RequestPlanner(self.info, served, self._placeholders, super()._get_mm_hashes)

    # The methods below override vLLM's steps, in the order in which vLLM calls them.

    def get_dummy_inputs(self, *args: object, **kwargs: object) -> ProcessorInputs:
        """Profiling inputs, marked so that they keep their unpruned size."""
        inputs = super().get_dummy_inputs(*args, **kwargs)
        return replace(inputs, hf_processor_mm_kwargs={_PROFILE: _PROFILING})

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        """As stock, with a plan; raises BudgetError or RequestError, which vLLM answers by 400."""
        kwargs = dict(inputs.hf_processor_mm_kwargs)
        fields = kwargs.pop(REQUEST_FIELD, None)
        profile = kwargs.pop(_PROFILE, None) is _PROFILING
        salt = kwargs.pop(SALT, None)
        plain = replace(inputs, hf_processor_mm_kwargs=kwargs)
        try:
            if profile:
                plan = self._planner.plan_profiling(plain)
            else:
                salt = salt if isinstance(salt, CacheSalt) else ""
                plan = self._planner.plan_request(plain, fields, salt)
            shown = resize_images(self.info, inputs, [one.resized for one in plan.choices])
        except AutopruneError:
            count_refused_request()
            raise
        planned = replace(_split_items(shown, plan), hf_processor_mm_kwargs={**kwargs, _PLAN: plan})
        keys = [key for of_modality in plan.hashes.values() for key in of_modality]
        with self._unsent.rendering(inputs.cache, keys) as tensors:
            processed = super().apply(planned, timing_ctx)
            tensors |= collect_tensors(processed["mm_hashes"], processed["mm_kwargs"])
        counts = None
        if plan.choices:
            counts = ImageCounts(plan.label, plan.choices, self._kv_bytes)
        contents = {}
        if isinstance(inputs.cache, LruKeyReplicatedSenderCache):
            contents = plan.contents_of_pruned()
        hashes = RenderedHashes(processed["mm_hashes"], counts, self._unsent, tensors, contents)
        processed["mm_hashes"] = hashes
        return processed

    def _get_mm_hashes(self, inputs: ProcessorInputs) -> MultiModalHashes:
        plan = inputs.hf_processor_mm_kwargs[_PLAN]
        return {modality: list(hashes) for modality, hashes in plan.hashes.items()}

    def _get_cache_missing_processor_kwargs(
        self, inputs: ProcessorInputs, mm_is_cached: Mapping[str, list[bool]]
    ) -> Mapping[str, object]:
        kwargs = dict(super()._get_cache_missing_processor_kwargs(inputs, mm_is_cached))
        plan: RequestPlan = kwargs[_PLAN]
        cached = mm_is_cached.get("image", [])
        absent = [i for i, hit in enumerate(cached) if not hit]
        items = tuple(plan.items[i] for i in absent) if plan.items else ()
        contents = tuple(plan.contents[i] for i in absent) if plan.contents else ()
        return {**kwargs, _PLAN: replace(plan, items=items, contents=contents)}

    def _apply_hf_processor_main(
        self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        plan, plain = _split_plan(hf_kwargs)
        if not plan.items or not prunable(mm_items):
            return super()._apply_hf_processor_main(mm_items, plain)
        plans = list(plan.items)
        if all(item.profile or item.keeps_all for item in plans):
            data = super()._apply_hf_processor_main(mm_items, plain)
        else:
            data, digests = self._process_each_once(mm_items, plain, plan.contents)
            plans = [_add_key(*pair, plan.salt) for pair in zip(plans, digests, strict=True)]
        data[FIELD] = [item.encode() for item in plans]
        return data

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        # vLLM asks for embeddings in chat messages before there is a plan.
        plain = {name: value for name, value in hf_processor_mm_kwargs.items() if name != _PLAN}
        fields = dict(super()._get_mm_fields_config(hf_inputs, plain))
        if FIELD in hf_inputs:
            fields[FIELD] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        return fields

    def _get_mm_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> MultiModalPromptUpdates:
        plan, plain = _split_plan(hf_processor_mm_kwargs)
        updates = dict(super()._get_mm_prompt_updates(mm_items, plain, out_mm_kwargs))
        if "image" in updates and prunable(mm_items):
            updates["image"] = [
                [_shorten(update, item, self._placeholders.first) for update in of_item]
                for of_item, item in zip(updates["image"], plan.items, strict=True)
            ]
        return updates

    def _process_each_once(
        self, mm_items: MultiModalDataItems, kwargs: Mapping[str, object], contents: Sequence[str]
    ) -> tuple[BatchFeature, list[str]]:
        """As stock, with each image's digest; what is known by its content is not processed."""
        if set(mm_items) != {"image"}:
            data = super()._apply_hf_processor_main(mm_items, kwargs)
            return data, [image.digest for image in self._digest(data, kwargs)]
        known = {content: self._processed.find(content) for content in contents}
        absent = [content for content, image in known.items() if image is None]
        fresh = None
        if absent:
            fresh = self._process(mm_items, kwargs, [contents.index(one) for one in absent])
            for content, image in zip(absent, self._digest(fresh, kwargs), strict=True):
                known[content] = image
                self._processed.remember(content, image)
        images = [known[content] for content in contents]
        digests = [image.digest for image in images if image is not None]
        if fresh is not None and len(absent) == len(contents):
            return fresh, digests
        each = [image.tensors for image in images if image is not None]
        fields = {name: element.field for name, element in each[0].items()}
        data = {name: fields[name].reduce_data([item[name] for item in each]) for name in fields}
        return BatchFeature(data), digests

    def _process(
        self, mm_items: MultiModalDataItems, kwargs: Mapping[str, object], which: Sequence[int]
    ) -> BatchFeature:
        if len(which) < len(mm_items["image"]):
            images = [mm_items["image"].get(i) for i in which]
            mm_items = self.info.parse_mm_data({"image": images}, validate=False)
        return super()._apply_hf_processor_main(mm_items, kwargs)

    def _digest(self, data: BatchFeature, kwargs: Mapping[str, object]) -> list[ProcessedImage]:
        fields = super()._get_mm_fields_config(data, kwargs)
        algorithm = self.info.ctx.get_mm_config().mm_hasher_algorithm
        images = MultiModalKwargsItems.from_hf_inputs(data, fields)["image"]
        return [ProcessedImage(image, hash_pixels(image, algorithm)) for image in images]


def _add_key(item: ItemPlan, digest: str, salt: str) -> ItemPlan:
    """The plan with the key of the tensors that travel beside it.

    A whole image is what it is in stock vLLM, which keeps no features.
    """
    return item if item.keeps_all else replace(item, key=make_feature_key(digest, salt))


def _split_items(inputs: ProcessorInputs, plan: RequestPlan) -> ProcessorInputs:
    """Inputs with an item for every part of an image.

    That is after vLLM has counted images against ``--limit-mm-per-prompt``.
    """
    if plan.sources is None or plan.prompt is None:
        return inputs
    images = inputs.mm_data_items["image"]
    parts = ImageProcessorItems([images.get(source) for source in plan.sources])
    uuids = inputs.mm_uuid_items
    if uuids is not None and "image" in uuids:
        uuids = {**uuids, "image": [uuids["image"][source] for source in plan.sources]}
    return replace(
        inputs,
        prompt=plan.prompt,
        mm_data_items=MultiModalDataItems({**inputs.mm_data_items, "image": parts}),
        mm_uuid_items=uuids,
    )


def _split_plan(kwargs: Mapping[str, object]) -> tuple[RequestPlan, dict[str, object]]:
    """The plan, and the other processor arguments."""
    plan = kwargs[_PLAN]
    assert isinstance(plan, RequestPlan)
    return plan, {key: value for key, value in kwargs.items() if key != _PLAN}


def _shorten(update: ResolvedPromptUpdate, item: ItemPlan, first: int) -> ResolvedPromptUpdate:
    """A resolved prompt update whose text holds K of its N placeholders."""
    if item.profile:
        return update
    return replace(update, content=shorten_placeholders(update.content, item.budget, first))
