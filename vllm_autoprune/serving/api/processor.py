"""Multi-modal processor mixin: K placeholders an image, cache identities, plans for the worker.

vLLM's own steps process and cache the images of a request, each once and by its content; the plans
of :mod:`~vllm_autoprune.serving.api.planner` are added to what they make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from transformers import BatchFeature
from vllm.multimodal.cache import LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing import ProcessorInputs

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.serving.api.choices import Placeholders, resize_images, shorten_placeholders
from vllm_autoprune.serving.api.engine_requests import ImageCounts, RenderedHashes
from vllm_autoprune.serving.api.image_store import RenderedItem, Rendering, Waiting
from vllm_autoprune.serving.api.planner import RequestPlan, RequestPlanner, prunable
from vllm_autoprune.serving.api.request import REQUEST_FIELD, SALT, CacheSalt, count_refused_request
from vllm_autoprune.serving.hooks import depends_on
from vllm_autoprune.serving.plan import FIELD, ItemPlan
from vllm_autoprune.serving.served_state import find_metrics_setup, served_state

if TYPE_CHECKING:
    from vllm.inputs import MultiModalHashes, MultiModalInput
    from vllm.multimodal.processing import (
        BaseDummyInputsBuilder,
        BaseProcessingInfo,
        TimingContext,
    )
    from vllm.multimodal.processing import BaseMultiModalProcessor as _Stock
    from vllm.multimodal.processing.processor import (
        MultiModalProcessingResult,
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
        pruned = type(
            f"Autoprune{kind.__name__}", (PrunedProcessor, kind), {"_placeholders": placeholders}
        )
        return pruned(info, dummy_inputs)

    return replace(stock, processor=build)


@dataclass
class _PlannedInputs(ProcessorInputs):
    """Inputs with an item for every plan."""

    plan: RequestPlan = field(default_factory=lambda: RequestPlan((), {}))


@dataclass
class _ContentInputs(ProcessorInputs):
    """Inputs with every image once, and the keys that they are cached by."""

    keys: Mapping[str, list[str]] = field(default_factory=dict)


@depends_on(
    "vllm.multimodal.processing:BaseMultiModalProcessor",
    "apply",
    "_cached_apply_hf_processor",
    "_apply_hf_processor_main",
    "_get_mm_fields_config",
    "_get_mm_hashes",
    "_recompute_cached_prompt_update",
)
@depends_on("vllm.multimodal.inputs:MultiModalKwargsItems", "from_hf_inputs")
@depends_on("vllm.multimodal.parse:MultiModalDataItems", "select")
class PrunedProcessor(_Stock):
    """Mixin before a stock multi-modal processor."""

    info: BaseProcessingInfo
    _placeholders: Placeholders

    @cached_property
    def _kv_bytes(self) -> int:
        setup = find_metrics_setup(self.info.ctx.model_config)
        return 0 if setup is None else setup.kv_bytes

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
            shown = resize_images(self.info, plain, [choice.resized for choice in plan.choices])
        except AutopruneError:
            count_refused_request()
            raise
        rendering = None
        if isinstance(inputs.cache, LruKeyReplicatedSenderCache):
            rendering = Rendering(inputs.cache, self._waiting)
            shown = replace(shown, cache=rendering)
        processed = super().apply(_split_items(shown, plan), timing_ctx)
        counts = None
        if plan.choices:
            counts = ImageCounts(plan.label, plan.choices, self._kv_bytes)
        keys = dict(zip(plan.hashes.get("image", ()), plan.keys, strict=False))
        processed["mm_hashes"] = RenderedHashes(processed["mm_hashes"], counts, keys, rendering)
        return processed

    def _cached_apply_hf_processor(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext
    ) -> MultiModalProcessingResult:
        """Process each image once, and give every item its plan and K of N placeholders."""
        assert isinstance(inputs, _PlannedInputs)
        plan, cache = inputs.plan, inputs.cache
        contents = _join_items(inputs, plan)
        result = super()._cached_apply_hf_processor(contents, timing_ctx)
        if isinstance(cache, Rendering):

            def process_again() -> dict[str, RenderedItem]:
                uncached = _ContentInputs(**{**vars(contents), "cache": None})
                made = super(PrunedProcessor, self)._cached_apply_hf_processor(uncached, timing_ctx)
                return {
                    key: RenderedItem(item, updates)
                    for modality, keys in made.hashes.items()
                    for key, item, updates in zip(
                        keys, made.kwargs[modality], made.prompt_updates[modality], strict=True
                    )
                }

            cache.process_again = process_again
        result = result._replace(hashes=plan.hashes)
        if not plan.items:
            return result
        places = {key: at for at, key in enumerate(dict.fromkeys(plan.keys))}
        tensors, updates = [], []
        seen: set[str] = set()
        for at, (key, item) in enumerate(zip(plan.keys, plan.items, strict=True)):
            image = result.kwargs["image"][places[key]]
            if key in seen and cache is not None and cache.is_cached_item(key):
                # The cache may count how often it is read.
                image, _ = cache.get_and_update_item(None, key)
            seen.add(key)
            row = MultiModalFieldElem(item.encode(), MultiModalBatchedField(keep_on_cpu=True))
            tensors.append(MultiModalKwargsItem({**(image or {}), FIELD: row}))
            updates.append(
                [
                    self._shorten(self._recompute_cached_prompt_update(update, at), item)
                    for update in result.prompt_updates["image"][places[key]]
                ]
            )
        return result._replace(
            kwargs=MultiModalKwargsItems({**result.kwargs, "image": tensors}),
            prompt_updates={**result.prompt_updates, "image": updates},
        )

    def _apply_hf_processor_main(
        self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        """As stock, of every image by itself.

        Hugging Face processors pad a batch to its largest image, so the tensors of an image would
        depend on those beside it.
        """
        images = mm_items.get("image")
        if images is None or len(images) < 2 or not prunable(mm_items):
            return super()._apply_hf_processor_main(mm_items, hf_kwargs)
        each = []
        for at in range(len(images)):
            alone = self.info.parse_mm_data({"image": [images.get(at)]}, validate=False)
            data = super()._apply_hf_processor_main(alone, hf_kwargs)
            fields = self._get_mm_fields_config(data, hf_kwargs)
            each += MultiModalKwargsItems.from_hf_inputs(data, fields)["image"]
        joined = {
            name: element.field.reduce_data([tensors[name] for tensors in each])
            for name, element in each[0].items()
        }
        others = {name: items for name, items in mm_items.items() if name != "image"}
        if others:
            joined |= super()._apply_hf_processor_main(MultiModalDataItems(others), hf_kwargs)
        return BatchFeature(joined)

    def _get_mm_hashes(self, inputs: ProcessorInputs) -> MultiModalHashes:
        """The keys by which vLLM's processor cache holds the images."""
        assert isinstance(inputs, _ContentInputs)
        return dict(inputs.keys)

    def _shorten(self, update: ResolvedPromptUpdate, item: ItemPlan) -> ResolvedPromptUpdate:
        """A resolved prompt update whose text holds K of its N placeholders."""
        if item.profile:
            return update
        content = shorten_placeholders(update.content, item.budget, self._placeholders.rest_at)
        return replace(update, content=content)


def _split_items(inputs: ProcessorInputs, plan: RequestPlan) -> _PlannedInputs:
    """Inputs with an item for every part of an image.

    That is after vLLM has counted images against ``--limit-mm-per-prompt``.
    """
    fields = {**vars(inputs), "plan": plan, "mm_uuid_items": None}
    if plan.prompt is not None:
        fields["prompt"] = plan.prompt
        fields["mm_data_items"] = _pick_images(inputs, plan.sources)
    return _PlannedInputs(**fields)


def _join_items(inputs: _PlannedInputs, plan: RequestPlan) -> _ContentInputs:
    """Inputs with the first of the items that have the same tensors."""
    fields = {name: value for name, value in vars(inputs).items() if name != "plan"}
    keys = dict.fromkeys(plan.keys)
    fields["keys"] = {**plan.hashes, "image": list(keys)} if plan.items else plan.hashes
    if len(keys) < len(plan.items):
        fields["mm_data_items"] = _pick_images(inputs, [plan.keys.index(key) for key in keys])
    return _ContentInputs(**fields)


def _pick_images(inputs: ProcessorInputs, which: Sequence[int]) -> MultiModalDataItems:
    images = inputs.mm_data_items["image"]
    picked = ImageProcessorItems([images.get(at) for at in which])
    return MultiModalDataItems({**inputs.mm_data_items, "image": picked})
