"""Requests through a tiny model's processor, and the small pictures that they are about."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import numpy
from PIL import Image

from tests.pins.table import digest
from tests.serving.unit.samples import served
from vllm_autoprune import load_state
from vllm_autoprune.serving.api.foreign_items import check_features
from vllm_autoprune.serving.api.headers import handling
from vllm_autoprune.serving.api.refusal import REFUSED
from vllm_autoprune.serving.api.request import SALT, CacheSalt
from vllm_autoprune.serving.api.request_checks import check_request
from vllm_autoprune.serving.compat import attach
from vllm_autoprune.serving.models import BACKBONES, find_packed_reason
from vllm_autoprune.serving.plan import FIELD, LINE, MROPE, REQUEST_FIELD, ItemPlan
from vllm_autoprune.serving.plan_rules import PlanRules
from vllm_autoprune.serving.request_rules import DEFAULT_RULES, RequestRules
from vllm_autoprune.serving.served_state import (
    ATTRIBUTE,
    KV_CACHE,
    Capabilities,
)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = numpy.random.default_rng(seed).integers(
        0, 255, (height, width, 3), dtype=numpy.uint8
    )
    return Image.fromarray(noise)


SMALL = picture(56, 56)
LARGE = picture(224, 224, 1)
OTHER = picture(224, 224, 2)
IMAGES = {"large": LARGE, "other": OTHER, "small": SMALL}


@dataclass(frozen=True)
class Processed:
    """What one request became: identities, plans, placeholders, token ids.

    ``data`` has a digest of the tensors of each item that went to the engine with some; ``surplus``
    are the positions beyond the tokens of the prompt.
    """

    identities: list[str]
    plans: list[ItemPlan]
    lengths: list[int]
    prompt: list[int]
    data: list[str | None]
    surplus: int = 0

    @property
    def sent(self) -> list[bool]:
        return [digest is not None for digest in self.data]


@cache
def _read_config(folder: str, options: str) -> Any:
    """Configuration of a model, of which readers take copies: reading it takes 0.1 to 0.3 s."""
    from vllm.config import ModelConfig

    return ModelConfig(
        model=folder,
        max_model_len=1024,
        dtype="float32",
        mm_processor_kwargs=json.loads(options),
    )


class Sender:
    """A tiny model's processor, with vLLM's cache before an engine or without one.

    ``placeholder`` stands for an image in prompts, the model's own where it is empty; ``options``
    are the server's ``--mm-processor-kwargs``.
    """

    def __init__(
        self,
        folder: Any,
        budget: int | str,
        rules: RequestRules = DEFAULT_RULES,
        placeholder: str = "<|image_pad|>",
        options: Mapping[str, object] = MappingProxyType({}),
        **changes: object,
    ) -> None:
        from vllm.multimodal.processing import InputProcessingContext
        from vllm.tokenizers import get_tokenizer

        config = copy.deepcopy(_read_config(str(folder), json.dumps(dict(options))))
        edits = {f"/{field}": value for field, value in changes.items()}
        backbone = BACKBONES[config.architecture]
        state = served(edits, budget)
        packed_only = find_packed_reason(backbone, config.hf_config)
        axes = MROPE if backbone.mrope else LINE
        capabilities = Capabilities(
            whole_only=backbone.whole_only,
            whole_tower=backbone.whole_tower,
            packed_only=packed_only,
            axes=0 if packed_only else axes,
            prunes_videos=backbone.videos,
            frame=backbone.frame(config.hf_config) if backbone.frame else None,
        )
        state = replace(state, capabilities=capabilities, rules=rules)
        attach(config, ATTRIBUTE, state)
        self._rules = PlanRules(state, config.get_vocab_size())
        module, _, name = BACKBONES[config.architecture].model.partition(":")
        model: Any = vars(import_module(module))[name]
        factories = model._processor_factory
        context = InputProcessingContext(config, get_tokenizer(str(folder)))
        self._processor = factories.build_processor(context)
        self._config = config
        self.info: Any = self._processor.info
        token = self._processor._placeholders.token(self.info)
        self._placeholder = (
            placeholder
            or self._processor._placeholders.text
            or model.get_placeholder_str("image", 1)
            or self.info.get_tokenizer().convert_ids_to_tokens(token)
        )
        self._model = model
        self.cache: Any = None

    def with_cache(self, kind: str = "lru") -> Sender:
        """With one of vLLM's caches of processed items, before one engine unless ``several``."""
        from vllm.multimodal.cache.factories import processor_cache_from_config

        multimodal = self._config.get_multimodal_config()
        if kind == "shm":  # of which all bytes are reserved at once
            multimodal.mm_processor_cache_type = "shm"
            multimodal.mm_processor_cache_gb = 1 / 64
            multimodal.mm_shm_cache_max_object_size_mb = 1
        parallel = SimpleNamespace(
            _api_process_count=2 if kind == "several" else 1,
            data_parallel_size=1,
            world_size=1,
        )
        config: Any = SimpleNamespace(
            model_config=self._config, parallel_config=parallel
        )
        self.cache = processor_cache_from_config(config)
        return self

    def with_blocks(self, size: int) -> Sender:
        from vllm.config import CacheConfig

        attach(self._config, KV_CACHE, CacheConfig(block_size=size))
        return self

    def process(
        self,
        images: Sequence[Any],
        uuids: Sequence[str | None] | None = None,
        salt: str = "",
        modality: str = "image",
        beside: Sequence[Any] = (),
        **entry: object,
    ) -> Any:
        """What vLLM's processor makes of a request with these images, or videos behind images."""
        from vllm.multimodal.processing import ProcessorInputs
        from vllm.multimodal.processing.context import TimingContext

        info = self.info
        marks = len(images) + len(cast("list[object]", entry.get("recall_turns", [])))
        mark = self._placeholder
        if modality == "video":
            mark = self._model.get_placeholder_str(modality, 1)
        before = f"{self._placeholder} " * len(beside)
        prompt = info.get_tokenizer().encode(f"user {before}{f'{mark} ' * marks}what")
        data = {modality: list(images), **({"image": list(beside)} if beside else {})}
        asked = "instructions" if modality == "image" else "video_instructions"
        kwargs = {REQUEST_FIELD: {asked: ["what"] * len(images), **entry}}
        inputs = ProcessorInputs(
            prompt,
            info.parse_mm_data(data),
            None if uuids is None else {modality: list(uuids)},
            hf_processor_mm_kwargs={
                **kwargs,
                **({SALT: CacheSalt(salt)} if salt else {}),
            },
            cache=self.cache,
        )
        return self._processor.apply(inputs, TimingContext(enabled=False))

    def send(
        self, images: Sequence[Any], *args: Any, hands_over: bool = True, **named: Any
    ) -> Processed:
        """A request of :meth:`process`, handed over to the engine.

        An engine that is sent what was made of it without a cache has to accept it.
        """
        from vllm.multimodal.hasher import MultiModalHasher
        from vllm.multimodal.inputs import MultiModalFeatureSpec

        modality = named.get("modality", "image")
        made = self.process(images, *args, **named)
        features = {
            kind: [
                MultiModalFeatureSpec(item, kind, identity, place, identity)
                for identity, item, place in zip(
                    identities,
                    made["mm_kwargs"][kind],
                    made["mm_placeholders"][kind],
                    strict=True,
                )
            ]
            for kind, identities in made["mm_hashes"].items()
        }
        every = [feature for of_kind in features.values() for feature in of_kind]
        if hands_over:
            made["mm_hashes"].hand_over(every)
        processed = Processed(
            list(made["mm_hashes"][modality]),
            [ItemPlan.decode(item[FIELD].data) for item in made["mm_kwargs"][modality]],
            [place.get_num_embeds() for place in made["mm_placeholders"][modality]],
            list(made["prompt_token_ids"]),
            [
                MultiModalHasher.hash_kwargs("sha256", **tensors) if tensors else None
                for feature in features[modality]
                for tensors in [
                    {k: v.data for k, v in (feature.data or {}).items() if k != FIELD}
                ]
            ],
            made["mm_hashes"].surplus,
        )
        if self.cache is None:  # else tensors are missing
            check_features(
                self._rules,
                every,
                named.get("salt", ""),
                self._config.get_multimodal_config(),
            )
        return processed


def answer_by(receiver: Sender, request: Mapping[str, Any]) -> list[str] | str:
    """Identity, feature key and plan of each item that a request becomes, or its refusal.

    ``entry`` has its pruning fields, ``brings`` names a state that it holds in full; ``kwargs`` and
    ``body`` are what stands around the entry.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    entry = request.get("entry", {})
    if "brings" in request:
        entry = {**entry, "state": json.loads(load_state(request["brings"]).dumps())}
    kwargs = request.get("kwargs", {"autoprune": entry})
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "?"}],
        **request.get("body", {}),
    }
    try:
        sent = ChatCompletionRequest.model_validate(
            {**body, "mm_processor_kwargs": kwargs}
        )
        with handling([*request.get("headers", {}).items()]):
            check_request(receiver._config, sent, trusted=False)
        images = [IMAGES[name] for name in request.get("images", ("large", "other"))]
        entry = (sent.mm_processor_kwargs or {}).get("autoprune") or {}
        made = receiver.send(images, salt=request.get("salt", ""), **entry)
    except ValueError as error:
        return str(error)
    items = zip(made.identities, made.plans, made.lengths, strict=True)
    return [
        f"{length} tokens, identity {identity[:8]}, key {digest(plan.key)}, "
        f"plan {digest({**asdict(plan), 'state': plan.state.decode()})}"
        for identity, plan, length in items
    ]


def read_refused() -> dict[str, float]:
    """How many requests were refused so far, by the metric's reason."""
    (family,) = REFUSED.collect()
    totals = [sample for sample in family.samples if sample.name.endswith("_total")]
    return {sample.labels["reason"]: sample.value for sample in totals}
