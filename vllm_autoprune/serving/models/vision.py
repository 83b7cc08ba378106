"""Vision side that all backbones share: cached features of images, and inputs of policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from vllm.model_executor.models.interfaces import SupportsMultiModal

from vllm_autoprune.serving.compat.worker import Encode, embed_without_lora
from vllm_autoprune.serving.shared.plan import NO_KEY, Key
from vllm_autoprune.serving.shared.served_state import ServedState
from vllm_autoprune.serving.worker.cores import CoreCache
from vllm_autoprune.serving.worker.features import FeatureCache, ImageFeatures, TowerFeatures
from vllm_autoprune.serving.worker.region_selection import ModelParts
from vllm_autoprune.serving.worker.relevance import ClipTower, InputEmbeddings, RelevanceSpace
from vllm_autoprune.tpdsl.tokens import Grid, VisualTokens

EncoderInputs = Mapping[str, Tensor | list[Tensor]]
"""Arguments of one call of ``embed_multimodal``."""

ImageInputs = Mapping[str, Tensor]
"""The part of them that belongs to one image."""


@dataclass(frozen=True, slots=True)
class ModelImage:
    """One image as it reaches the model; ``tokens`` is N, its visual tokens before pruning."""

    inputs: ImageInputs
    tokens: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """M tiles of n tokens each, after the vision tower; a field is None if it is not read.

    projected ``(M, n, D)``, attention that a token gets ``(M, n)``, patches where relevance is
    measured ``(M, n, C)``, tower with M in front of each shape, tokens before the projector
    ``(M, n, Dv)`` where no tower holds them.
    """

    projected: Tensor
    attention: Tensor | None = None
    patches: Tensor | None = None
    tower: TowerFeatures | None = None
    encoder: Tensor | None = None

    def split(self, counts: Sequence[int]) -> Iterator[Tiles]:
        """The tiles of each image, as many as it has."""
        first = 0
        for count in counts:
            some = slice(first, first + count)
            yield Tiles(
                self.projected[some],
                None if self.attention is None else self.attention[some],
                None if self.patches is None else self.patches[some],
                None if self.tower is None else self.tower.select(some),
                None if self.encoder is None else self.encoder[some],
            )
            first += count


class Vision(ABC):
    """The vision side of one served model.

    Not a submodule of the model: its text tower and cached features are not in the checkpoint, and
    vLLM's loader must not look for them.
    """

    def __init__(self, model: SupportsMultiModal, served: ServedState) -> None:
        self.cores = CoreCache(served.cache_bytes // 8 if served.splits else 0)
        self.cache = FeatureCache(served.cache_bytes - self.cores.limit)
        self.runs = 0
        self.served = served
        self.needs = served.needs
        self._model = model
        self.graphs: Encode | None = None
        """The encoder as vLLM's CUDA graphs run it, for the images of the present call."""
        self._relevance: RelevanceSpace | None = None

    @staticmethod
    @abstractmethod
    def tower(model: SupportsMultiModal) -> nn.Module:
        """The vision tower; vLLM leaves a ``StageMissingLayer`` where no images are served."""

    @abstractmethod
    def images(self, inputs: EncoderInputs) -> list[ModelImage]:
        """Split the images of one call of ``embed_multimodal``."""

    @abstractmethod
    def encode(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        """Encode images in one pass of the vision tower."""

    def project(self, rows: Tensor) -> Tensor:
        """Rows of the vision tower ``(..., Dv)`` through the model's projector, ``(..., D)``."""
        raise NotImplementedError(f"{type(self).__name__} gives policies no rows of its tower")

    @property
    def sample_weight(self) -> Tensor:
        """A parameter of the vision tower: its device and dtype."""
        return next(self.tower(self._model).parameters())

    def relevance(self) -> RelevanceSpace | None:
        """Embedding space of relevance, loaded at first use.

        That is at the end of weight loading, or while profiling where weights are dummies; both
        times vLLM counts its memory.
        """
        if self._relevance is None and "instruction" in self.needs:
            tower = self.served.tower
            if tower is not None:
                self._relevance = ClipTower(tower, self.sample_weight.device)
            else:
                embed = embed_without_lora(self._model.get_language_model())
                self._relevance = InputEmbeddings(embed, self.sample_weight.device)
        return self._relevance

    def model_parts(self) -> ModelParts:
        """Parts of the model that policies read in addition to image features."""
        return ModelParts(self.project, self.relevance(), embed=self.word_embedding())

    @property
    def reads_encoder(self) -> bool:
        """Whether any state reads the tokens before the projector or merger."""
        return not self.needs.isdisjoint({"encoder", "merger_input"})

    def cosine(self, tokens: Tensor, encoder: Tensor | None, grid: Grid) -> Tensor:
        """Cosines ``(N, N)`` that the server's own state compares the tokens of an image by.

        Of the projected ``(N, D)``, or of the encoder's ``(N, Dv)`` where it ranks those.
        """
        if self.served.state.rank_at == "merger_in" and encoder is not None:
            tokens = encoder
        return VisualTokens(tokens[None], grid).cosine[0]

    def word_embedding(self) -> Callable[[Tensor], Tensor] | None:
        """The language model's input embedding, None where the state reads no words."""
        if "words" not in self.needs:
            return None
        return embed_without_lora(self._model.get_language_model())

    def capture_weights(
        self, weights: Iterable[tuple[str, Tensor]]
    ) -> Iterable[tuple[str, Tensor]]:
        """Pass the checkpoint's weights through, copying those that the stock model leaves out."""
        return weights

    def finish_loading(self) -> None:
        """Drop features of old weights after new ones were loaded, and load the relevance space.

        Raises :class:`ConfigError` where the checkpoint lacks what the state reads.
        """
        self.clear()
        self.relevance()

    def clear(self) -> None:
        """Drop what is kept of images, as when weights are replaced."""
        self.cache.clear()
        self.cores.clear()

    def features(
        self, keys: Sequence[Key], images: Sequence[ImageInputs], profile: bool = False
    ) -> list[ImageFeatures]:
        """Features of every image: cached ones, and one pass for each image not seen yet.

        Only features of the same geometry are used, whatever the key says: a plan may come from
        a client. An image without a key is encoded and not kept.
        """
        if profile:
            # All dummy images are equal; caching them would measure too little memory.
            return self._encoded(images)
        entries: list[Hashable] = [
            at if key == NO_KEY else (key, describe_geometry(image))
            for at, (key, image) in enumerate(zip(keys, images, strict=True))
        ]
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
            encoded = self._encoded(list(missing.values()))
            for entry, features in zip(missing, encoded, strict=True):
                known[entry] = features
                if not isinstance(entry, int):  # those without a key are counted, not kept
                    self.cache.put(entry, features)
        return [known[entry] for entry in entries]

    def _encoded(self, images: Sequence[ImageInputs]) -> list[ImageFeatures]:
        self.runs += 1
        return self.encode(images)


def group_by_tokens(sizes: Sequence[int], bound: int) -> Iterator[slice]:
    """Runs of neighbouring images with at most ``bound`` tokens, or of a single larger one."""
    start, total = 0, 0
    for at, size in enumerate(sizes):
        if at > start and total + size > bound:
            yield slice(start, at)
            start, total = at, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def describe_geometry(image: ImageInputs) -> Hashable:
    """Shapes of an image's tensors, and the integers that describe its patch or tile grid.

    vLLM keeps these integers on the CPU, so nothing is read from a device. They are one row; masks
    of pixels, which have more dimensions, are described by their shape alone.
    """
    return tuple((name, tuple(part.shape), _grid(part)) for name, part in sorted(image.items()))


def _grid(part: Tensor) -> str | None:
    """A row of integers on the CPU as text; None for any other tensor."""
    if part.is_floating_point() or part.dim() > 1 or part.device.type != "cpu":
        return None
    return str(part.tolist())


def split_by_image(inputs: EncoderInputs) -> list[dict[str, Tensor]]:
    """Fields that hold one entry an image, stacked or in a list, as one mapping an image."""
    names = list(inputs)
    return [dict(zip(names, parts, strict=True)) for parts in zip(*inputs.values(), strict=True)]


def stack_field(images: Sequence[ImageInputs], name: str) -> Tensor:
    """One field of images of one shape, ``(B, ...)``."""
    return torch.stack([image[name] for image in images])
