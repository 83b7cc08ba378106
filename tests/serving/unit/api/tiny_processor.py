"""A tiny model's processor without an engine, and what it makes of requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast
from unittest.mock import patch

import numpy
from PIL import Image

from tests.serving.unit.samples import served
from vllm_autoprune.serving.api.request_fields import REQUEST_FIELD, SALT, CacheSalt
from vllm_autoprune.serving.compat import attach
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.shared.kv_blocks import ATTRIBUTE as KV_CACHE
from vllm_autoprune.serving.shared.plan import FIELD, ItemPlan
from vllm_autoprune.serving.shared.request_rules import DEFAULT_RULES, RequestRules
from vllm_autoprune.serving.shared.served_state import ATTRIBUTE

QWEN = "Qwen2_5_VLForConditionalGeneration"


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = numpy.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(noise)


SMALL, LARGE, OTHER = picture(56, 56), picture(224, 224, 1), picture(224, 224, 2)


@dataclass(frozen=True)
class Processed:
    """What one request became: identities, plans, placeholders, token ids.

    ``data`` has a digest of the tensors of each item that went to the engine with some.
    """

    identities: list[str]
    plans: list[ItemPlan]
    lengths: list[int]
    prompt: list[int]
    data: list[str | None]

    @property
    def keys(self) -> list[tuple[int, int]]:
        return [plan.key for plan in self.plans]

    @property
    def sent(self) -> list[bool]:
        return [digest is not None for digest in self.data]


class Sender:
    """A tiny model's processor, with vLLM's cache before an engine or without one.

    Of a Qwen2.5-VL unless ``architecture`` and the ``placeholder`` of its images are given, which
    is the model's own where it is empty; ``options`` are the server's ``--mm-processor-kwargs``.
    """

    def __init__(
        self,
        folder: Any,
        budget: int,
        rules: RequestRules = DEFAULT_RULES,
        architecture: str = QWEN,
        placeholder: str = "<|image_pad|>",
        options: Mapping[str, object] = MappingProxyType({}),
        **changes: object,
    ) -> None:
        from vllm.config import ModelConfig
        from vllm.multimodal.processing import InputProcessingContext
        from vllm.tokenizers import get_tokenizer

        config = ModelConfig(
            model=str(folder),
            max_model_len=1024,
            dtype="float32",
            mm_processor_kwargs=dict(options),
        )
        edits = {f"/{field}": value for field, value in changes.items()}
        attach(config, ATTRIBUTE, replace(served(edits, budget=budget), rules=rules))
        module, _, name = BACKBONES[architecture].model.partition(":")
        model: Any = vars(import_module(module))[name]
        factories = model._processor_factory
        context = InputProcessingContext(config, get_tokenizer(str(folder)))
        self._processor = factories.build_processor(context)
        self._config = config
        self._placeholder = placeholder or model.get_placeholder_str("image", 1)
        self.info: Any = self._processor.info
        self.cache: Any = None

    def with_cache(self) -> Sender:
        from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache

        self.cache = LruKeyReplicatedSenderCache(self._config)
        return self

    def with_blocks(self, size: int) -> Sender:
        from vllm.config import CacheConfig

        attach(self._config, KV_CACHE, CacheConfig(block_size=size))
        return self

    def send(
        self,
        images: Sequence[Image.Image | None],
        uuids: Sequence[str | None] | None = None,
        salt: str = "",
        hands_over: bool = True,
        **entry: object,
    ) -> Processed:
        from vllm.multimodal.hasher import MultiModalHasher
        from vllm.multimodal.inputs import MultiModalFeatureSpec
        from vllm.multimodal.processing import ProcessorInputs
        from vllm.multimodal.processing.context import TimingContext

        info = self.info
        marks = len(images) + len(cast("list[object]", entry.get("recall_turns", [])))
        prompt = info.get_tokenizer().encode(f"user {f'{self._placeholder} ' * marks}what")
        kwargs = {REQUEST_FIELD: {"instructions": ["what"] * len(images), **entry}}
        inputs = ProcessorInputs(
            prompt,
            info.parse_mm_data({"image": list(images)}),
            None if uuids is None else {"image": list(uuids)},
            hf_processor_mm_kwargs={**kwargs, **({SALT: CacheSalt(salt)} if salt else {})},
            cache=self.cache,
        )
        made = self._processor.apply(inputs, TimingContext(enabled=False))
        identities = made["mm_hashes"]["image"]
        items, places = made["mm_kwargs"]["image"], made["mm_placeholders"]["image"]
        features = [
            MultiModalFeatureSpec(item, "image", identity, place, identity)
            for item, identity, place in zip(items, identities, places, strict=True)
        ]
        if hands_over:
            made["mm_hashes"].hand_over(features)
        return Processed(
            list(identities),
            [ItemPlan.decode(item[FIELD].data) for item in items],
            [place.get_num_embeds() for place in places],
            list(made["prompt_token_ids"]),
            [
                MultiModalHasher.hash_kwargs("sha256", **tensors) if tensors else None
                for feature in features
                for tensors in [{k: v.data for k, v in (feature.data or {}).items() if k != FIELD}]
            ],
        )


@contextmanager
def processing(sender: Sender) -> Iterator[list[int]]:
    """How many images each run of the model's processor gets."""
    kind: Any = type(sender._processor).__mro__[2]  # vLLM's own class, below the mixin
    stock, runs = kind._apply_hf_processor_main, list[int]()

    def noted(self: Any, mm_items: Any, hf_kwargs: Any) -> Any:
        runs.append(len(mm_items["image"]) if "image" in mm_items else 0)
        return stock(self, mm_items, hf_kwargs)

    with patch.object(kind, "_apply_hf_processor_main", noted):
        yield runs
