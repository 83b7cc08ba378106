"""Hooks on requests that the engine is handed: forged plans are refused, images are counted.

A prompt that is only rendered (``/tokenize``, ``/v1/messages/count_tokens``), or refused after
rendering (too long for the model, too large for the encoder cache), is not handed over and so is
neither counted nor taken for one whose images the engine has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from vllm_autoprune.errors import AutopruneError
from vllm_autoprune.serving.api.feature_keys import add_feature_key
from vllm_autoprune.serving.api.metrics import count_refused_request, count_request
from vllm_autoprune.serving.api.misplaced_fields import OFFLINE_FIX, refuse_misplaced
from vllm_autoprune.serving.api.pruning_choice import ImageChoice
from vllm_autoprune.serving.api.unsent_items import UnsentItems
from vllm_autoprune.serving.compat import wrap
from vllm_autoprune.serving.shared.plan import FIELD, ItemPlan, plan_error
from vllm_autoprune.serving.shared.plan_rules import PlanRules
from vllm_autoprune.serving.shared.repeated_images import drop_repeated_tensors
from vllm_autoprune.serving.shared.served_state import served_state

if TYPE_CHECKING:
    from vllm.config.multimodal import MMHasherAlgorithm
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    from vllm_autoprune.serving.api.unsent_items import Tensors


@dataclass(frozen=True, slots=True)
class ImageCounts:
    """What metrics count of one request: its state's label, its images, KV bytes of a token."""

    label: str
    choices: tuple[ImageChoice, ...]
    kv_bytes: int


class RenderedHashes(dict[str, list[str]]):
    """Cache identities of a rendered request, with what metrics are to count of it.

    vLLM passes this object on as it is. No client can send one, so its type also shows that the
    plans of the request were made by this server.
    """

    def __init__(
        self,
        hashes: Mapping[str, list[str]],
        counts: ImageCounts | None,
        unsent: UnsentItems,
        tensors: Tensors,
        contents: Mapping[str, str],
    ) -> None:
        super().__init__(hashes)
        self._counts = counts
        self._unsent = unsent
        self._tensors = tensors
        self._contents = contents
        """Content of pruned images by identity, where the engine restores repeated tensors."""
        self._features: Sequence[MultiModalFeatureSpec] = ()

    def await_hand_over(self, features: Sequence[MultiModalFeatureSpec]) -> None:
        """Expect the request's features, and keep them so that no other list gets their id."""
        self._features = features
        _waiting[id(features)] = self

    def hand_over(self, features: Sequence[MultiModalFeatureSpec]) -> None:
        """Complete the request's features and count it, once.

        Beam search hands over the same request for every token.
        """
        self._features = ()
        counts, self._counts = self._counts, None
        if counts is not None:
            count_request(counts.label, counts.choices, counts.kv_bytes)
        tensors, self._tensors = self._tensors, {}
        self._unsent.hand_over(features, tensors)
        drop_repeated_tensors(features, self._contents)


_waiting: WeakValueDictionary[int, RenderedHashes] = WeakValueDictionary()
"""Requests between the two hooks, by their list of features, which samples of one request share.

A request that is refused in between takes its entry with it.
"""


def watch_requests() -> None:
    """Install the hooks on every request that API servers, or `LLM`, hand to the engine."""
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    wrap(InputProcessor, "process_inputs", wrap_process_inputs)
    wrap(OutputProcessor, "add_request", wrap_add_request)


def wrap_process_inputs(
    stock: Callable[..., EngineCoreRequest],
) -> Callable[..., EngineCoreRequest]:
    """``InputProcessor.process_inputs``: the last step that may refuse a request by 400."""

    from vllm.exceptions import VLLMValidationError

    def process_inputs(
        self: InputProcessor, request_id: str, prompt: object, *args: object, **named: object
    ) -> EngineCoreRequest:
        request = stock(self, request_id, prompt, *args, **named)
        served = served_state(self.model_config)
        if served is None:
            return request
        params = args[0] if args else named.get("params")
        refuse_misplaced({"extra_args": getattr(params, "extra_args", None)}, {}, OFFLINE_FIX)
        if not request.mm_features:
            return request
        hashes = prompt.get("mm_hashes") if isinstance(prompt, Mapping) else None
        if isinstance(hashes, RenderedHashes):
            hashes.await_hand_over(request.mm_features)
            return request
        try:
            served = replace(served, rules=served.rules.for_processed_inputs())
            rules = PlanRules(served, self.model_config.get_vocab_size())
            algorithm = self.model_config.get_multimodal_config().mm_hasher_algorithm
            _check(rules, request.mm_features, request.cache_salt or "", algorithm)
        except AutopruneError as error:
            count_refused_request()
            # Of all errors of this step vLLM answers only its own by 400.
            raise VLLMValidationError(str(error), parameter=FIELD) from None
        return request

    return process_inputs


def wrap_add_request(stock: Callable[..., None]) -> Callable[..., None]:
    """``OutputProcessor.add_request``: a request that gets here goes to the engine next."""

    def add_request(
        self: OutputProcessor, request: EngineCoreRequest, *args: object, **named: object
    ) -> None:
        stock(self, request, *args, **named)
        # Several samples of one request (n > 1) share the list; the first of them counts.
        hashes = _waiting.pop(id(request.mm_features), None)
        if hashes is not None:
            hashes.hand_over(request.mm_features or ())

    return add_request


def _check(
    rules: PlanRules,
    features: Sequence[MultiModalFeatureSpec],
    salt: str,
    algorithm: MMHasherAlgorithm,
) -> None:
    """Raise for plans that are not allowed, and recompute the feature key of the others.

    Under the key of another image, this image's features would be cached for everybody who sends
    the other.
    """
    from vllm.multimodal.inputs import MultiModalBatchedField

    for feature in features:
        field = None if feature.data is None else feature.data.get(FIELD)
        if field is None or field.data is None:
            if feature.modality == "image" and _has_pixels(feature.data):
                raise plan_error("is missing: the image was processed without the plugin")
            continue  # another kind of input, or one that the engine has already
        if not isinstance(field.field, MultiModalBatchedField) or not field.field.keep_on_cpu:
            raise plan_error("is not batched on the CPU")
        if set(feature.data) == {FIELD}:
            raise plan_error("comes without the tensors of an image")
        plan = ItemPlan.decode(field.data)
        rules.check(plan, feature.mm_position.get_num_embeds())
        field.data = add_feature_key(plan, feature.data, salt, algorithm).encode()


def _has_pixels(item: MultiModalKwargsItem | None) -> bool:
    """False for embeddings made elsewhere, and where the engine or shared memory has the image."""
    pixels = None if item is None else item.get("pixel_values")
    return pixels is not None and pixels.data is not None
