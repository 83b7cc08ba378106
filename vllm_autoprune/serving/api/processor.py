"""The processor: K placeholders, cache identity, and the plan that travels to the worker.

All it decides follows from image size, state and request. What is kept of an image is found again
by its content: of the source before it is processed, of the pixels for the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import ImageEmbeddingItems

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.serving.api.engine_requests import ImageCounts, RenderedHashes
from vllm_autoprune.serving.api.feature_keys import add_feature_key
from vllm_autoprune.serving.api.instruction import extract_prompt_instruction
from vllm_autoprune.serving.api.instruction_tokens import InstructionTokenizer
from vllm_autoprune.serving.api.metrics import count_refused_request
from vllm_autoprune.serving.api.named_images import NamedImage, NamedImages
from vllm_autoprune.serving.api.pruning_choice import ImageChoice, resolve_choices, state_label
from vllm_autoprune.serving.api.request_fields import REQUEST_FIELD, SALT, CacheSalt, parse_request
from vllm_autoprune.serving.shared.metrics_setup import find_metrics_setup
from vllm_autoprune.serving.shared.placeholders import Extent, Placeholders, shorten_placeholders
from vllm_autoprune.serving.shared.plan import (
    FIELD,
    LANGUAGE_IDS,
    NO_KEY,
    ItemPlan,
    make_cache_identity,
)
from vllm_autoprune.serving.shared.served_state import ServedState, served_state

if TYPE_CHECKING:
    from transformers import BatchFeature
    from vllm.inputs import MultiModalHashes, MultiModalInput
    from vllm.multimodal.parse import ImageSize, MultiModalDataItems
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
"""Compared by identity, so that no request can say it."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Plans of a request's images and the cache identities of all its items.

    ``choices`` are what the plans were made from, under the name that ``policy`` is counted by;
    none where vLLM profiles. ``salt`` is the request's ``cache_salt``.
    """

    items: tuple[ItemPlan, ...]
    hashes: Mapping[str, list[str]]
    choices: tuple[ImageChoice, ...] = ()
    policy: str = ""
    salt: str = ""


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
    def _served(self) -> ServedState:
        served = served_state(self.info.ctx.model_config)
        assert served is not None
        return served

    @cached_property
    def _kv_bytes(self) -> int:
        accounts = find_metrics_setup(self.info.ctx.model_config)
        return 0 if accounts is None else accounts.kv_bytes

    @cached_property
    def _named(self) -> NamedImages:
        return NamedImages()

    @cached_property
    def _words(self) -> InstructionTokenizer:
        return InstructionTokenizer(
            self.info, self._served.tower, self._placeholders.token(self.info)
        )

    @cached_property
    def _suffix(self) -> str:
        """What the chat template puts after the last user turn; empty where there is none."""
        mark = "\u2402"
        try:
            shown = self.info.get_tokenizer().apply_chat_template(
                [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
            )
        except (ValueError, TypeError, AttributeError):
            return ""
        return str(shown).rpartition(mark)[2]

    # ---- vLLM's steps, in the order in which it calls them ----

    def get_dummy_inputs(self, *args: object, **kwargs: object) -> ProcessorInputs:
        """Profiling inputs, marked so that they keep their unpruned size."""
        inputs = super().get_dummy_inputs(*args, **kwargs)
        return replace(inputs, hf_processor_mm_kwargs={_PROFILE: _PROFILING})

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        """As stock, with a plan; raises BudgetError or RequestError, which vLLM answers by 400."""
        kwargs = dict(inputs.hf_processor_mm_kwargs)
        asked = kwargs.pop(REQUEST_FIELD, None)
        profile = kwargs.pop(_PROFILE, None) is _PROFILING
        salt = kwargs.pop(SALT, None)
        plain = replace(inputs, hf_processor_mm_kwargs=kwargs)
        try:
            if profile:
                plan = self._profiled(plain)
            else:
                plan = self._planned(plain, asked, salt if isinstance(salt, CacheSalt) else "")
        except AutopruneError:
            count_refused_request()
            raise
        planned = replace(inputs, hf_processor_mm_kwargs={**kwargs, _PLAN: plan})
        processed = super().apply(planned, timing_ctx)
        counts = None
        if plan.choices:
            counts = ImageCounts(plan.policy, plan.choices, self._kv_bytes)
        processed["mm_hashes"] = RenderedHashes(processed["mm_hashes"], counts)
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
        items = tuple(plan.items[i] for i in absent)
        choices = tuple(plan.choices[i] for i in absent) if plan.choices else ()
        return {**kwargs, _PLAN: replace(plan, items=items, choices=choices)}

    def _apply_hf_processor_main(
        self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        plan, plain = _taken_out(hf_kwargs)
        data = super()._apply_hf_processor_main(mm_items, plain)
        if plan.items and _prunable(mm_items):
            data[FIELD] = [item.encode() for item in self._add_keys(plan, data, plain)]
        return data

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        _, plain = _taken_out(hf_processor_mm_kwargs)
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
        plan, plain = _taken_out(hf_processor_mm_kwargs)
        updates = dict(super()._get_mm_prompt_updates(mm_items, plain, out_mm_kwargs))
        if "image" in updates and _prunable(mm_items):
            updates["image"] = [
                [_shortened(update, item) for update in of_item]
                for of_item, item in zip(updates["image"], plan.items, strict=True)
            ]
        return updates

    # ---- planning ----

    def _profiled(self, inputs: ProcessorInputs) -> RequestPlan:
        """Plans of dummy images: the server's own budget, the longest text that may be read."""
        hashes = super()._get_mm_hashes(inputs)
        policy = self._served.policy()
        said, _ = self._words.read("profile", policy.needs)
        longest = (0,) * LANGUAGE_IDS if "language" in policy.needs else ()
        items = []
        for i in range(len(hashes.get("image", []))):
            whole = self._unpruned(inputs, i)
            budget = policy.at(whole.tokens, whole.tiles).budget
            size = whole.tokens
            items.append(ItemPlan(budget, (0, 0), said, longest, profile=True, tokens=size))
        return RequestPlan(tuple(items), hashes)

    def _planned(self, inputs: ProcessorInputs, asked: object, salt: str) -> RequestPlan:
        """Plans of a request's images, and identities that say what was decided."""
        hashes = super()._get_mm_hashes(inputs)
        images = hashes.get("image", [])
        request = parse_request(asked)
        if not images or not _prunable(inputs.mm_data_items):
            return RequestPlan((), hashes)
        known = self._identify_contents(inputs, images, salt)
        extents = [self._predict_extent(inputs, size) for _, size in known]
        choices = resolve_choices(self._served, request, extents)
        texts = self._instructions(inputs, request.instructions, choices)
        told = self._words.read_each(texts, [choice.needs for choice in choices])
        items = tuple(
            ItemPlan(c.kept, NO_KEY, *ids, c.keep, state=c.state, tokens=extent.tokens)
            for ids, c, extent in zip(told, choices, extents, strict=True)
        )
        identities = [
            # Where everything is kept the image is what it is in stock vLLM, caches included.
            image
            if c.whole
            else make_cache_identity(
                content, c.identity, c.kept, c.keep, ids if c.reads_instruction else None
            )
            for image, (content, _), ids, c in zip(images, known, told, choices, strict=True)
        ]
        called = state_label(self._served, request)
        return RequestPlan(items, {**hashes, "image": identities}, choices, called, salt)

    def _identify_contents(
        self, inputs: ProcessorInputs, images: Sequence[str], salt: str
    ) -> list[NamedImage]:
        """What each image shows, as a digest under the request's salt, and its size.

        A client's ``uuid`` is no part of it: under one name two requests may send two pictures.
        An image that comes by its ``uuid`` alone is the one last sent under it.
        """
        given = (inputs.mm_uuid_items or {}).get("image")
        digests: Sequence[str] = images
        if given is not None:
            only = inputs.mm_data_items.select({"image"})
            unnamed = replace(inputs, mm_data_items=only, mm_uuid_items=None)
            digests = super()._get_mm_hashes(unnamed)["image"]
        items = inputs.mm_data_items["image"]
        found: list[NamedImage] = []
        for i, (name, digest) in enumerate(zip(images, digests, strict=True)):
            if items.get(i) is None:
                found.append(self._named.find(name, salt))
                continue
            found.append((repr((digest, salt)), items.get_image_size(i)))
            if given is not None and given[i] is not None and inputs.cache is not None:
                self._named.note(name, salt, found[i])
        return found

    def _add_keys(
        self, plan: RequestPlan, data: BatchFeature, kwargs: Mapping[str, object]
    ) -> list[ItemPlan]:
        """The plans of processed images, with the keys of the tensors that travel beside them."""
        if all(choice.whole for choice in plan.choices):
            return list(plan.items)
        fields = super()._get_mm_fields_config(data, kwargs)
        images = MultiModalKwargsItems.from_hf_inputs(data, fields)["image"]
        algorithm = self.info.ctx.get_mm_config().mm_hasher_algorithm
        return [
            # A whole image is what it is in stock vLLM, which keeps no features.
            item if choice.whole else add_feature_key(item, image, plan.salt, algorithm)
            for item, choice, image in zip(plan.items, plan.choices, images, strict=True)
        ]

    def _unpruned(self, inputs: ProcessorInputs, index: int) -> Extent:
        """N and the tiles of an image, a pure function of its size and of the request."""
        return self._predict_extent(inputs, inputs.mm_data_items["image"].get_image_size(index))

    def _predict_extent(self, inputs: ProcessorInputs, size: ImageSize | None) -> Extent:
        if size is None:  # named by a uuid that is not known: vLLM's caches will not know it either
            return self._placeholders.most(self.info)
        return self._placeholders.extent(self.info, size, inputs.hf_processor_mm_kwargs)

    def _instructions(
        self, inputs: ProcessorInputs, given: Sequence[str] | None, choices: Sequence[ImageChoice]
    ) -> list[str]:
        if not any(choice.reads_instruction for choice in choices):
            return [""] * len(choices)
        if given is not None and len(given) == len(choices):
            return list(given)
        # No messages (a raw prompt), or messages of a form in which the images were not found.
        text = extract_prompt_instruction(
            inputs.prompt,
            self._placeholders.token(self.info),
            self.info.get_tokenizer().decode,
            self._suffix,
        )
        return [text] * len(choices)


def _taken_out(kwargs: Mapping[str, object]) -> tuple[RequestPlan, dict[str, object]]:
    plan = kwargs[_PLAN]
    assert isinstance(plan, RequestPlan)
    return plan, {key: value for key, value in kwargs.items() if key != _PLAN}


def _prunable(mm_items: MultiModalDataItems) -> bool:
    """False for embeddings made elsewhere: they come without the signals that states read."""
    return "image" in mm_items and not isinstance(mm_items["image"], ImageEmbeddingItems)


def _shortened(update: ResolvedPromptUpdate, item: ItemPlan) -> ResolvedPromptUpdate:
    """A resolved prompt update whose text holds K of its N placeholders."""
    if item.profile:
        return update
    return replace(update, content=shorten_placeholders(update.content, item.budget))
