"""Vision side of a served model: features of its images, and further inputs of policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.model_executor.models.interfaces import SupportsMultiModal

from vllm_autoprune.serving.compat import depends_on
from vllm_autoprune.serving.compat.worker import connect_ranks
from vllm_autoprune.serving.inputs import CUT_FIELD
from vllm_autoprune.serving.models.cut_tower import CRITERIA
from vllm_autoprune.serving.plan import NO_KEY, ItemPlan, Key
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.worker.batch import ModelParts
from vllm_autoprune.serving.worker.features import (
    ImageFeatures,
    IndexCache,
    Signal,
    TensorCache,
)
from vllm_autoprune.serving.worker.question import (
    ClipTower,
    InputEmbeddings,
    RelevanceSpace,
)
from vllm_autoprune.serving.worker.tower_hooks import (
    InputHook,
    Merger,
    QueriesAndKeys,
)

if TYPE_CHECKING:
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

EncoderInputs = Mapping[str, Tensor | list[Tensor]]
"""Arguments of one call of ``embed_multimodal``."""

ImageInputs = Mapping[str, Tensor]
"""The arguments that belong to one image."""


@dataclass(frozen=True, slots=True)
class ModelImage:
    """One image or video as it reaches the model."""

    inputs: ImageInputs
    """Inputs of the vision tower."""
    tokens: int
    """N, the number of its visual tokens before pruning."""


class Vision(ABC):
    """The vision side of one served model: cached features of images, and inputs of policies.

    It is not a submodule of the model, because its text tower and cached features are not in the
    checkpoint, and vLLM's loader must not look for them.
    """

    tower_name: ClassVar[str] = "vision_tower"
    """Dotted name of the vision tower within the model."""
    layers: ClassVar[str]
    """Dotted name of the list of the tower's layers, up to the last one that the model reads."""
    attention_name: ClassVar[str] = "self_attn.attn"
    """Dotted name of the attention module within a layer."""

    def __init__(self, model: SupportsMultiModal, served: ServedState) -> None:
        self.served = served
        self.needs = served.needs
        self.cache = TensorCache[ImageFeatures](served.cache_bytes)
        self.indices = IndexCache()
        self.runs = 0
        self.graphs: EncoderCudaGraphManager | None = None
        self._model = model
        self._relevance: RelevanceSpace | None = None
        # Hooks that read the tower's calls while `recording`, for states that need it.
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
        """The vision tower; vLLM leaves a ``StageMissingLayer`` if no images are served."""
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

    def cut_tower(self, image: ModelImage, plan: ItemPlan) -> ModelImage:
        """The image with what its plan drops inside the tower."""
        if plan.tower is None:
            return image
        layer = plan.tower.find_layer(len(attrgetter(self.layers)(self._model)))
        cut = (plan.tokens, layer, CRITERIA.index(plan.tower.criterion))
        return replace(image, inputs={**image.inputs, CUT_FIELD: torch.tensor(cut)})

    def hook_attention(self) -> InputHook[QueriesAndKeys]:
        """Hook on the attention of the last layer that the model reads."""
        return QueriesAndKeys.hook(self.find_attention())

    def find_merger(self) -> Merger | None:
        """The patch merger; None if the model has none."""
        return None

    @cached_property
    def _width(self) -> int:
        """Width of the language model's embeddings, D."""
        return int(self._model.get_language_model().config.hidden_size)

    @property
    def row_width(self) -> int:
        """Width of a row without its positions."""
        return self._width

    @property
    def sample_weight(self) -> Tensor:
        """A parameter of the vision tower: its device and dtype."""
        return next(self.tower(self._model).parameters())

    def load_relevance(self) -> RelevanceSpace | None:
        """Embedding space of relevance, loaded at first use.

        First use is at the end of weight loading, or while profiling if weights are dummies; in
        both cases vLLM counts its memory.
        """
        if self._relevance is None and "instruction" in self.needs:
            device = self.sample_weight.device
            if self.served.text_tower is not None:
                self._relevance = ClipTower(self.served.text_tower, device)
            else:
                self._relevance = InputEmbeddings(self.embed, device)
        return self._relevance

    @depends_on(
        "vllm.model_executor.models.interfaces:SupportsMultiModal", "get_language_model"
    )
    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings ``(T, D)`` of token ids ``(T,)``, without any LoRA adapters.

        Why: ``VocabParallelEmbeddingWithLoRA.forward`` looks up one adapter for each token of the
        scheduled batch, and applies it to whatever tokens it is given. Instructions are other
        tokens, of other requests.
        Remove when: LoRA layers can be called without a mapping.
        """
        language_model: Any = self._model.get_language_model()
        # Idefics3's language model has no head around it.
        inner = getattr(language_model, "model", language_model)
        # The embedding has various names (embed_tokens; InternLM2: tok_embeddings).
        wrapped = {
            name: layer
            for name, layer in inner.named_children()
            if hasattr(layer, "base_layer")
        }
        for name, layer in wrapped.items():
            setattr(inner, name, layer.base_layer)
        try:
            embedded: Tensor = language_model.embed_input_ids(ids)
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
        """Let the hooks read the calls of the vision tower made within."""
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

        Also connects the ranks: both take memory, which vLLM measures next. Raises
        :class:`ConfigError` if the checkpoint lacks what the state reads.
        """
        self.clear()
        self.load_relevance()
        connect_ranks(self.sample_weight.device)

    def clear(self) -> None:
        """Drop everything that is cached of images, for example because weights were replaced."""
        self.cache.clear()
        self.indices.clear()

    def features(
        self, entries: Sequence[Hashable], images: Sequence[ImageInputs]
    ) -> list[ImageFeatures]:
        """Features of every image: from the cache, and by one pass for all images not in it.

        ``entries`` are the results of :func:`find_entries`.
        """
        features: dict[Hashable, ImageFeatures | None] = {}
        missing: dict[Hashable, ImageInputs] = {}
        for entry, image in zip(entries, images, strict=True):
            if entry not in features:
                features[entry] = self.cache.get(entry)
                if features[entry] is None:
                    missing[entry] = image
        encoded: dict[Hashable, ImageFeatures] = {}
        if missing:
            self.runs += 1
            encoded.update(
                zip(missing, self.encode(list(missing.values())), strict=True)
            )
        return [features[entry] or encoded[entry] for entry in entries]

    def keep(
        self, entries: Sequence[Hashable], features: Sequence[ImageFeatures]
    ) -> None:
        """Cache features once tokens are selected, with the cosines that the selection has read.

        Cosines are left out if the image would not fit into the cache with them.
        """
        for entry, image in zip(entries, features, strict=True):
            if image.nbytes > self.cache.limit:
                image.drop_cosines()
            if not isinstance(entry, int):
                self.cache.put(entry, image)


def find_entries(keys: Sequence[Key], images: Sequence[ImageInputs]) -> list[Hashable]:
    """Cache entry of each image: its key and its geometry.

    Only features of the same geometry are used, whatever the key is, because a plan may come from a
    client. The entry of an image without a key is a number, and nothing is cached under it.
    """
    return [
        number if key == NO_KEY else (key, _describe_geometry(image))
        for number, (key, image) in enumerate(zip(keys, images, strict=True))
    ]


def _describe_geometry(image: ImageInputs) -> Hashable:
    """Shapes of an image's tensors, and the integers that describe its patch or tile grid.

    vLLM keeps these integers on the CPU, so nothing is read from a device. They have a row for an
    image or for each of its tiles. Masks of pixels, which have more dimensions, are described by
    their shape only, and so are pixels of 8 bits.
    """
    described: list[Hashable] = []
    for name, part in sorted(image.items()):
        rows = (
            part.dim() <= 2
            and part.device.type == "cpu"
            and part.dtype in (torch.int32, torch.int64)
        )
        numbers = (
            sha256(part.numpy().tobytes()).digest() if rows else None
        )  # there may be thousands
        described.append((name, tuple(part.shape), numbers))
    return tuple(described)
