"""Mixin that prunes the images of a stock model class, and the vision side it asks for features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.utils import StageMissingLayer
from vllm.multimodal.inputs import MultiModalFlatField
from vllm.multimodal.utils import group_and_batch_mm_items

from vllm_autoprune.ops.dpp import compile_for
from vllm_autoprune.serving.api.layout import Placeholders
from vllm_autoprune.serving.api.processor import make_pruned_factories
from vllm_autoprune.serving.compat import declare_model, depends_on
from vllm_autoprune.serving.compat.worker import (
    bound_encoder_calls,
    clear_with_worker_caches,
    connect_ranks,
    is_rank_zero,
    leaves_ranks_apart,
    profile_images,
)
from vllm_autoprune.serving.inputs import CELLS_FIELD, PIXELS
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.plan import FIELD, NO_KEY, ItemPlan, Key
from vllm_autoprune.serving.served_state import (
    PlanRules,
    ServedState,
    served_state,
)
from vllm_autoprune.serving.worker.batch import (
    ModelParts,
    SelectionContext,
    prune_images,
)
from vllm_autoprune.serving.worker.features import (
    ImageFeatures,
    IndexCache,
    Signal,
    TensorCache,
)
from vllm_autoprune.serving.worker.metrics import Stopwatch, WorkerMetrics
from vllm_autoprune.serving.worker.question import (
    ClipTower,
    InputEmbeddings,
    RelevanceSpace,
)
from vllm_autoprune.serving.worker.selection import FallbackReporter, PlanReader
from vllm_autoprune.serving.worker.tower_hooks import (
    InputHook,
    Merger,
    QueriesAndKeys,
)

EncoderInputs = Mapping[str, Tensor | list[Tensor]]
"""Arguments of one call of ``embed_multimodal``."""

ImageInputs = Mapping[str, Tensor]
"""The part of them that belongs to one image."""


@dataclass(frozen=True, slots=True)
class ModelImage:
    """One image as it reaches the model; ``tokens`` is N, its visual tokens before pruning."""

    inputs: ImageInputs
    tokens: int


class Vision(ABC):
    """The vision side of one served model: cached features of images, and inputs of policies.

    Not a submodule of the model: its text tower and cached features are not in the checkpoint, and
    vLLM's loader must not look for them.
    """

    tower_name: ClassVar[str] = "vision_tower"
    """Dotted name of the vision tower within the model."""
    layers: ClassVar[str]
    """Dotted name of the tower's layers up to the last that the model reads."""
    attention_name: ClassVar[str] = "self_attn.attn"
    """Dotted name of the attention module within one of them."""

    def __init__(self, model: SupportsMultiModal, served: ServedState) -> None:
        self.served = served
        self.needs = served.needs
        self.cache = TensorCache[ImageFeatures](served.cache_bytes)
        self.indices = IndexCache()
        self.runs = 0
        self._model = model
        self._relevance: RelevanceSpace | None = None
        # What reads the tower where the state does, while `recording`.
        self.attention: InputHook[QueriesAndKeys] | None = None
        self.merger: dict[Signal, InputHook[Tensor]] = {}
        if not self.needs.isdisjoint({"cls_attention", "tower", "next_layer"}):
            self.attention = self.hook_attention()
        before_merger = not self.needs.isdisjoint({"encoder", "merger_input"})
        merger = self.find_merger() if before_merger else None
        if merger is not None:
            self.merger["encoder"] = merger.hook_rows()
            if "merger_input" in self.needs:
                self.merger["merger_norms"] = merger.hook_norms()

    @classmethod
    def tower(cls, model: SupportsMultiModal) -> nn.Module:
        """The vision tower; vLLM leaves a ``StageMissingLayer`` where no images are served."""
        tower: nn.Module = attrgetter(cls.tower_name)(model)
        return tower

    @abstractmethod
    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call of ``embed_multimodal``."""

    @abstractmethod
    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images in one pass of the vision tower."""

    def find_attention(self) -> Any:
        """Attention module of the last layer that the model reads."""
        return attrgetter(self.attention_name)(attrgetter(self.layers)(self._model)[-1])

    def hook_attention(self) -> InputHook[QueriesAndKeys]:
        """Hook on the attention of the last layer that the model reads."""
        return QueriesAndKeys.hook(self.find_attention())

    def find_merger(self) -> Merger | None:
        """The patch merger; None where the model has none."""
        return None

    @cached_property
    def _width(self) -> int:
        """Width of the language model's embeddings, D."""
        return int(self._model.get_language_model().config.hidden_size)

    @property
    def row_width(self) -> int:
        """Width of a row without positions."""
        return self._width

    @property
    def sample_weight(self) -> Tensor:
        """A parameter of the vision tower: its device and dtype."""
        return next(self.tower(self._model).parameters())

    def load_relevance(self) -> RelevanceSpace | None:
        """Embedding space of relevance, loaded at first use.

        That is at the end of weight loading, or while profiling where weights are dummies; both
        times vLLM counts its memory.
        """
        if self._relevance is None and "instruction" in self.needs:
            device = self.sample_weight.device
            if self.served.tower is not None:
                self._relevance = ClipTower(self.served.tower, device)
            else:
                self._relevance = InputEmbeddings(self.embed, device)
        return self._relevance

    @depends_on(
        "vllm.model_executor.models.interfaces:SupportsMultiModal", "get_language_model"
    )
    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings ``(T, D)`` of token ids ``(T,)``, without the adapters of any batch.

        Why: ``VocabParallelEmbeddingWithLoRA.forward`` looks up one adapter for each token of the
        scheduled batch, and adds it to whatever tokens it is given: instructions are other tokens,
        of other requests.
        Remove when: LoRA layers can be called without a mapping.
        """
        language_model = self._model.get_language_model()
        # No protocol declares either; Idefics3's language model has no head around it.
        inner = getattr(language_model, "model", language_model)
        # Its embedding has many names (embed_tokens; InternLM2: tok_embeddings).
        wrapped = {
            n: layer
            for n, layer in inner.named_children()
            if hasattr(layer, "base_layer")
        }
        for name, layer in wrapped.items():
            setattr(inner, name, layer.base_layer)
        try:
            embedded: Tensor = getattr(language_model, "embed_input_ids")(ids)  # noqa: B009
        finally:
            for name, layer in wrapped.items():
                setattr(inner, name, layer)
        return embedded

    def model_parts(self) -> ModelParts:
        """Parts of the model that policies read in addition to image features."""

        def project(rows: Tensor) -> Tensor:
            raise NotImplementedError(
                f"{type(self).__name__} gives policies no rows of its tower"
            )

        axes: int = getattr(self._model, "autoprune_axes", 0)
        return ModelParts(project, self.embed, self.load_relevance(), axes=axes)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Let the hooks read the calls of the vision tower within."""
        with ExitStack() as stack:
            for hook in (self.attention, *self.merger.values()):
                if hook is not None:
                    stack.enter_context(hook.recording())
            yield

    def capture_weights(
        self, weights: Iterable[tuple[str, Tensor]]
    ) -> Iterable[tuple[str, Tensor]]:
        """Pass the checkpoint's weights through, copying those that the stock model leaves out."""
        return weights

    def finish_loading(self) -> None:
        """Drop features of old weights after new ones were loaded, and load the relevance space.

        Ranks are connected too: both take memory, which vLLM measures next.
        Raises :class:`ConfigError` where the checkpoint lacks what the state reads.
        """
        self.clear()
        self.load_relevance()
        connect_ranks(self.sample_weight.device)

    def clear(self) -> None:
        """Drop what is kept of images, as when weights are replaced."""
        self.cache.clear()
        self.indices.clear()

    def features(
        self, entries: Sequence[Hashable], images: Sequence[ImageInputs]
    ) -> list[ImageFeatures]:
        """Features of every image: cached ones, and one pass for all that are not.

        ``entries`` as :func:`find_entries` gives them.
        """
        known: dict[Hashable, ImageFeatures] = {}
        missing: dict[Hashable, ImageInputs] = {}
        for entry, image in zip(entries, images, strict=True):
            if entry in known or entry in missing:
                continue
            features = self.cache.get(entry)
            if features is None:
                missing[entry] = image
            else:
                known[entry] = features
        if missing:
            self.runs += 1
            known.update(zip(missing, self.encode(list(missing.values())), strict=True))
        return [known[entry] for entry in entries]

    def keep(
        self, entries: Sequence[Hashable], features: Sequence[ImageFeatures]
    ) -> None:
        """Cache features once tokens are selected, with the cosines that the selection has read.

        Cosines of so many tokens that an image would not fit are left out.
        """
        for entry, image in zip(entries, features, strict=True):
            if image.nbytes > self.cache.limit:
                image.drop_cosines()
            if not isinstance(entry, int):
                self.cache.put(entry, image)


def find_entries(keys: Sequence[Key], images: Sequence[ImageInputs]) -> list[Hashable]:
    """What each image is cached as: its key and its geometry.

    Only features of the same geometry are used, whatever the key says: a plan may come from a
    client. An image without a key is a number, and is not kept.
    """
    return [
        number if key == NO_KEY else (key, _describe_geometry(image))
        for number, (key, image) in enumerate(zip(keys, images, strict=True))
    ]


def _group_by_tokens(
    sizes: Sequence[int], bound: int, kinds: Sequence[Hashable] = ()
) -> Iterator[slice]:
    """Runs of neighbouring images with at most ``bound`` tokens, or of a single larger one.

    Those of a run are of one kind.
    """
    start = 0
    total = 0
    for at, size in enumerate(sizes):
        changes = bool(kinds) and kinds[at] != kinds[at - 1]
        if at > start and (changes or total + size > bound):
            yield slice(start, at)
            start = at
            total = 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def _describe_fields(item: MultiModalKwargsItem) -> Hashable:
    """What is alike of all items that vLLM batches for a model: types, and most of their shapes."""
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


def _describe_geometry(image: ImageInputs) -> Hashable:
    """Shapes of an image's tensors, and the integers that describe its patch or tile grid.

    vLLM keeps these integers on the CPU, so nothing is read from a device. They are one row; masks
    of pixels, which have more dimensions, are described by their shape alone.
    """
    described: list[Hashable] = []
    for name, part in sorted(image.items()):
        row = (
            part.dim() <= 1
            and part.device.type == "cpu"
            and not part.is_floating_point()
        )
        numbers = (
            sha256(part.numpy().tobytes()).digest() if row else None
        )  # may be thousands
        described.append((name, tuple(part.shape), numbers))
    return tuple(described)


# Mixin that prunes the images of a stock model class, the same for all backbones.


if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.interfaces import MultiModalEmbeddings
    from vllm.model_executor.models.interfaces import SupportsMultiModal as _Stock
    from vllm.multimodal.inputs import MultiModalKwargsItem
else:
    _Stock = object


class PrunedModel(_Stock):
    """Mixin before a stock model class: K of N visual tokens, where a state is served.

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
        bound_encoder_calls()
        profile_images(_hold_feature_cache)

    def autoprune_split(
        self, items: Sequence[MultiModalKwargsItem | None]
    ) -> list[slice]:
        """Runs of neighbouring items whose images have as many tokens, N, as memory profiling saw.

        That is vLLM's own encoder budget, rounded down to whole images of the largest size. An
        image with more than that is a run of its own. Counted from the pixels while they are on
        the CPU, because a count sent with the request could be forged. So is an item that cannot
        be split off, or that vLLM cannot batch with its neighbours.
        """
        vision = self.autoprune
        if vision is None:
            return [slice(0, len(items))]
        bound = self.autoprune_profiled or self.autoprune_budget
        sizes = [0] * len(items)  # of inputs without a plan, which vLLM counts itself
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
            # vLLM has to see that the largest images do not fit.
            if any(plan.profile for plan in plans) or leaves_ranks_apart(error):
                raise
            return [self.autoprune_blank(plan, error) for plan in plans]

    def autoprune_blank(self, plan: ItemPlan, error: Exception) -> Tensor:
        """Rows ``(K, D + E)`` of zeros for an image that cannot be encoded, which is counted.

        vLLM has no way to end one request from a worker, and without rows the engine ends.
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
            # Of the largest image; vLLM warns of what is compiled once it serves.
            compile_for(
                max(image.tokens for image in images), vision.sample_weight.device
            )
            # All dummy images are equal; caching them would measure too little memory.
            features = vision.encode([image.inputs for image in images])
            return self._autoprune_select(plans, features)
        # Times that are not published would be kept forever.
        metrics = self.autoprune_metrics if is_rank_zero() else None
        try:
            rows = self._autoprune_encode(plans, images, metrics)
        except Exception as error:  # of one image, mostly that memory runs out
            if leaves_ranks_apart(error):
                raise
            reporter.report_error(error, "encoding the images of its step one by one")
            rows = []
        # Beyond the handler, which holds what has been allocated.
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
        """Rows of images that are encoded in one pass, whose features are cached."""
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
        """Rows of one image; zeros where it cannot be encoded alone either."""
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

        Features of the old weights are dropped when a running engine gets new ones
        (``reload_weights``).
        """
        if self.autoprune is None:
            return super().load_weights(weights)
        loaded = super().load_weights(self.autoprune.capture_weights(weights))
        self.autoprune.finish_loading()
        return loaded


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

    ``methods`` of the stock class, and the class of its patch ``merger``, are depended on.
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
    """Hold as much memory as the feature cache may take; whether this model prunes images."""
    vision = model.autoprune if isinstance(model, PrunedModel) else None
    held = None if vision is None else vision.cache.reserve(vision.sample_weight.device)
    yield vision is not None
    del held


def _tensor_fields(inputs: Mapping[str, object]) -> EncoderInputs:
    """Tensor fields of one call, without the plans; absent ones are None."""
    return {
        n: g for n, g in inputs.items() if n != FIELD and isinstance(g, Tensor | list)
    }
