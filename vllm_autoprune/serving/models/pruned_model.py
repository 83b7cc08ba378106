"""Mixin that prunes the images of a stock model class, the same for all backbones.

It encodes the images of a call with the model's vision side and selects their tokens. An image that
cannot be encoded does not affect the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import StageMissingLayer
from vllm.multimodal.inputs import MultiModalFlatField
from vllm.multimodal.utils import group_and_batch_mm_items
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

from vllm_autoprune.ops.compilation import compile_for
from vllm_autoprune.serving.api.placeholders import Placeholders
from vllm_autoprune.serving.api.processor import make_pruned_factories
from vllm_autoprune.serving.compat import declare_model, find_runner
from vllm_autoprune.serving.compat.runner_v1 import bound_encoder_calls, profile_images
from vllm_autoprune.serving.compat.worker import (
    clear_with_worker_caches,
    is_rank_zero,
    leaves_ranks_apart,
)
from vllm_autoprune.serving.inputs import CELLS_FIELD, PIXELS
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.models.model_state import prune_state
from vllm_autoprune.serving.models.vision import (
    EncoderInputs,
    ModelImage,
    Vision,
    find_entries,
)
from vllm_autoprune.serving.plan import FIELD, ItemPlan
from vllm_autoprune.serving.plan_rules import PlanRules
from vllm_autoprune.serving.served_state import served_state
from vllm_autoprune.serving.worker.batch import SelectionContext, prune_images
from vllm_autoprune.serving.worker.features import ImageFeatures
from vllm_autoprune.serving.worker.metrics import Stopwatch, WorkerMetrics
from vllm_autoprune.serving.worker.selection import FallbackReporter, PlanReader

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.interfaces import MultiModalEmbeddings
    from vllm.model_executor.models.interfaces import SupportsMultiModal as _Stock
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.worker.gpu.model_states.interface import ModelState
else:
    _Stock = object


class PrunedModel(_Stock):
    """Mixin for a stock model class that keeps K of N visual tokens if a state is served.

    Without a state on the model config it is the stock model.
    """

    autoprune_vision: ClassVar[type[Vision]]
    autoprune_overrides: ClassVar[tuple[str, ...]] = ()
    """Methods of a stock class that are overridden, beyond those of every model."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        served = served_state(vllm_config.model_config)
        self.autoprune: Vision | None = None
        # `--limit-mm-per-prompt '{"image": 0}'` leaves the tower's weights out.
        if served is None or isinstance(
            self.autoprune_vision.tower(self), StageMissingLayer
        ):
            return
        self.autoprune = self.autoprune_vision(self, served)
        self.autoprune_reporter = FallbackReporter()
        model = vllm_config.model_config
        rules = PlanRules(served, model.get_vocab_size())
        device = self.autoprune.sample_weight.device
        self.autoprune_plan_reader = PlanReader(
            rules, self.autoprune_reporter, device, model.max_model_len
        )
        self.autoprune_watch = Stopwatch(device)
        folder = served.metrics_folder
        self.autoprune_metrics = WorkerMetrics(folder) if folder else None
        self.autoprune_budget: int = (
            vllm_config.scheduler_config.max_num_encoder_input_tokens
        )
        self.autoprune_profiled = 0
        clear_with_worker_caches(_clear_features)
        if find_runner(vllm_config) == "v1":
            bound_encoder_calls()
            profile_images(_hold_feature_cache)

    def get_model_state_cls(self) -> type[ModelState]:
        """The class of this model's state, for which model runner V2 asks."""
        stock = resolve_model_state_cls(
            get_current_vllm_config(), self.get_language_model()
        )
        return stock if self.autoprune is None else prune_state(stock)

    def autoprune_split(
        self, items: Sequence[MultiModalKwargsItem | None]
    ) -> list[slice]:
        """Runs of neighbouring items with at most the tokens that memory profiling measured.

        That number is vLLM's own encoder budget, rounded down to whole images of the largest size.
        An image with more tokens is a run of its own. Tokens are counted from the pixels, while
        these are on the CPU, because a count sent with the request could be forged. An item that
        cannot be split off, or that vLLM cannot batch with its neighbours, is also a run of its
        own.
        """
        vision = self.autoprune
        if vision is None:
            return [slice(0, len(items))]
        bound = self.autoprune_profiled or self.autoprune_budget
        sizes = [0] * len(
            items
        )  # 0 for inputs without a plan, which vLLM counts itself
        kinds: list[Hashable] = [None] * len(items)
        for i, item in enumerate(items):
            if item is not None and FIELD in item:
                kinds[i] = _describe_fields(item)
                try:
                    ((_, inputs),) = group_and_batch_mm_items([item])
                    sizes[i] = vision.images(_tensor_fields(inputs))[0].tokens
                except Exception:  # reported when it is to be encoded  # noqa: BLE001
                    sizes[i] = bound + 1
        return list(_group_by_tokens(sizes, bound, kinds))

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Rows of every image: ``[(K_i, D)]`` (``SupportsMultiModal.embed_multimodal``).

        vLLM calls it for one modality at a time; inputs without a plan go to the stock model.
        """
        rows = kwargs.pop(FIELD, None)
        if self.autoprune is None or rows is None:
            return super().embed_multimodal(**kwargs)
        assert isinstance(rows, Tensor | list)
        plans = self.autoprune_plan_reader.read(rows)
        try:
            return self.autoprune_rows(plans, kwargs)
        except Exception as error:  # the engine must survive any tensors
            # In profiling vLLM has to see that the largest images do not fit.
            if any(plan.profile for plan in plans) or leaves_ranks_apart(error):
                raise
            return [self.autoprune_blank(plan, error) for plan in plans]

    def autoprune_blank(self, plan: ItemPlan, error: Exception) -> Tensor:
        """Rows ``(K, D + E)`` of zeros for an image that cannot be encoded, which is counted.

        vLLM has no way to end a single request from a worker, and without rows the engine ends.
        """
        assert self.autoprune is not None
        self.autoprune_reporter.report_lost(error, self.autoprune.sample_weight.device)
        count = plan.budget + len(plan.text)
        return self.autoprune.sample_weight.new_zeros(count, self.autoprune.row_width)

    def autoprune_rows(
        self, plans: list[ItemPlan], inputs: Mapping[str, object]
    ) -> list[Tensor]:
        """Encode the images and select their tokens: rows ``(K_i, D)`` for each image."""
        vision = self.autoprune
        reporter = self.autoprune_reporter
        assert vision is not None
        images = vision.images(_tensor_fields(inputs))
        if any(plan.profile for plan in plans):
            tokens = sum(image.tokens for image in images)
            self.autoprune_profiled = max(self.autoprune_profiled, tokens)
            # For the largest image; vLLM warns of compilations once it serves.
            compile_for(
                max(image.tokens for image in images), vision.sample_weight.device
            )
            # All dummy images are equal, so caching them would measure too little memory.
            features = vision.encode([image.inputs for image in images])
            return self._autoprune_select(plans, features)
        images = [
            vision.cut_tower(image, plan)
            for image, plan in zip(images, plans, strict=True)
        ]
        # Times that are not published would accumulate.
        metrics = self.autoprune_metrics if is_rank_zero() else None
        try:
            rows = self._autoprune_encode(plans, images, metrics)
        except Exception as error:  # for one image, mostly because memory runs out
            if leaves_ranks_apart(error):
                raise
            reporter.report_error(error, "encoding the images of its step one by one")
            rows = []
        # Outside the handler, because the exception keeps alive what was allocated.
        if len(rows) < len(images):
            vision.cache.clear()
            pairs = zip(plans, images, strict=True)
            rows = [
                self._autoprune_encode_alone(plan, image, metrics)
                for plan, image in pairs
            ]
        if metrics is not None:
            metrics.publish(self.autoprune_watch, reporter, vision.cache)
        return rows

    def _autoprune_encode(
        self,
        plans: Sequence[ItemPlan],
        images: Sequence[ModelImage],
        metrics: WorkerMetrics | None,
    ) -> list[Tensor]:
        """Rows of images that are encoded in one pass and whose features are cached."""
        vision = self.autoprune
        assert vision is not None
        inputs = [image.inputs for image in images]
        entries = find_entries([plan.key for plan in plans], inputs)
        features = vision.features(entries, inputs)
        with nullcontext() if metrics is None else self.autoprune_watch.measure():
            rows = self._autoprune_select(plans, features)
        vision.keep(entries, features)
        return rows

    def _autoprune_encode_alone(
        self, plan: ItemPlan, image: ModelImage, metrics: WorkerMetrics | None
    ) -> Tensor:
        """Rows of one image, which are zeros if it cannot be encoded alone either."""
        try:
            (rows,) = self._autoprune_encode([plan], [image], metrics)
        except Exception as error:
            if leaves_ranks_apart(error):
                raise
            return self.autoprune_blank(plan, error)
        return rows

    def _autoprune_select(
        self, plans: Sequence[ItemPlan], features: Sequence[ImageFeatures]
    ) -> list[Tensor]:
        """Select the tokens of encoded images."""
        vision = self.autoprune
        assert vision is not None
        parts = vision.model_parts()
        context = SelectionContext(
            vision.served, parts, self.autoprune_reporter, vision.indices
        )
        return prune_images(context, plans, features)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As stock; also loads other weights that the state reads, so that vLLM counts them.

        When a running engine gets new weights (``reload_weights``), features of the old ones are
        dropped.
        """
        if self.autoprune is None:
            return super().load_weights(weights)
        loaded = super().load_weights(self.autoprune.capture_weights(weights))
        self.autoprune.finish_loading()
        return loaded


def _group_by_tokens(
    sizes: Sequence[int], bound: int, kinds: Sequence[Hashable] = ()
) -> Iterator[slice]:
    """Slices of neighbouring images that have at most ``bound`` tokens and are of one kind.

    An image with more tokens is a slice of its own. ``sizes`` and ``kinds`` are those of each
    image; without ``kinds``, all are of one kind.
    """
    start = 0
    total = 0
    for number, size in enumerate(sizes):
        changes = bool(kinds) and kinds[number] != kinds[number - 1]
        if number > start and (changes or total + size > bound):
            yield slice(start, number)
            start = number
            total = 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def _describe_fields(item: MultiModalKwargsItem) -> Hashable:
    """What all items that vLLM batches have in common: types, and most of their shapes."""
    described: list[Hashable] = []
    for name, element in sorted(item.items()):
        kind = type(element.field).__name__
        data = element.data
        if not isinstance(data, Tensor):
            described.append((name, kind, type(data).__name__))
            continue
        shape: Sequence[int] = data.shape
        if isinstance(element.field, MultiModalFlatField):
            shape = data.shape[1:]
        elif name.startswith(PIXELS) or name in (FIELD, CELLS_FIELD):
            shape = ()
        described.append((name, kind, data.dtype, data.dim(), tuple(shape)))
    return tuple(described)


def prune_class(
    stock: Any,
    placeholders: Placeholders,
    vision: type[Vision],
    mixin: type[PrunedModel],
    *,
    methods: Sequence[str] = ("_parse_and_validate_image_input",),
    merger: str = "",
) -> type[PrunedModel]:
    """The pruned form of one of vLLM's model classes, which keeps K of N visual tokens.

    The plugin depends on ``methods`` of the stock class and on the class of its patch ``merger``.
    """
    declare_model(stock, (*methods, *mixin.autoprune_overrides), merger)
    backbone = next(row for row in BACKBONES.values() if row.stock == stock.__name__)
    why = backbone.unsplittable
    embeds_text = backbone.embeds_text
    placeholders = replace(placeholders, unsplittable=why, embeds_text=embeds_text)
    members = {
        "__doc__": f"``{stock.__name__}`` with K of N visual tokens where a state is served.",
        "_processor_factory": make_pruned_factories(
            stock._processor_factory, placeholders
        ),
        "autoprune_vision": vision,
        "autoprune_placeholders": placeholders,
    }
    return type(f"Autoprune{stock.__name__}", (mixin, stock), members)


def _clear_features(model: nn.Module) -> None:
    vision = model.autoprune if isinstance(model, PrunedModel) else None
    if vision is not None:
        vision.clear()


@contextmanager
def _hold_feature_cache(model: nn.Module) -> Iterator[bool]:
    """Allocate what the feature cache may take; yields whether this model prunes images."""
    vision = model.autoprune if isinstance(model, PrunedModel) else None
    buffer = None
    if vision is not None:
        buffer = vision.cache.reserve(vision.sample_weight.device)
    yield vision is not None
    del buffer


def _tensor_fields(inputs: Mapping[str, object]) -> EncoderInputs:
    """Tensor fields of one call, without the plans; absent fields are None."""
    return {
        n: g for n, g in inputs.items() if n != FIELD and isinstance(g, Tensor | list)
    }
