"""Mixin that prunes the images of a stock model class, the same for all backbones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn
from vllm.model_executor.models.utils import StageMissingLayer
from vllm.multimodal.utils import group_and_batch_mm_items

from vllm_autoprune.serving.compat.worker import (
    Encode,
    bound_encoder_calls,
    clear_with_worker_caches,
    prune_after_encoder_graphs,
)
from vllm_autoprune.serving.models.vision import EncoderInputs, Vision, group_by_tokens
from vllm_autoprune.serving.shared.metrics_setup import find_metrics_setup
from vllm_autoprune.serving.shared.plan import FIELD, ItemPlan
from vllm_autoprune.serving.shared.plan_rules import PlanRules
from vllm_autoprune.serving.shared.served_state import ServedState, served_state
from vllm_autoprune.serving.worker.batch import prune_images
from vllm_autoprune.serving.worker.fallbacks import FallbackReporter
from vllm_autoprune.serving.worker.first_image_check import FirstImageCheck
from vllm_autoprune.serving.worker.metrics import WorkerMetrics
from vllm_autoprune.serving.worker.plan_reader import PlanReader
from vllm_autoprune.serving.worker.region_selection import SelectionContext
from vllm_autoprune.serving.worker.stopwatch import Stopwatch
from vllm_autoprune.serving.worker.tensor_parallel import is_rank_zero

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

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        served = served_state(vllm_config.model_config)
        self.autoprune: Vision | None = None
        # `--limit-mm-per-prompt '{"image": 0}'` leaves the tower's weights out.
        if served is None or isinstance(self.autoprune_vision.tower(self), StageMissingLayer):
            return
        self.autoprune_state: ServedState = served
        self.autoprune_reporter = FallbackReporter()
        self.autoprune_first_check = FirstImageCheck()
        self.autoprune = self.autoprune_vision(self, served)
        clear_with_worker_caches(_clear_features)
        rules = PlanRules(served, vllm_config.model_config.get_vocab_size())
        device = self.autoprune.sample_weight.device
        self.autoprune_plan_reader = PlanReader(rules, self.autoprune_reporter, device)
        self.autoprune_watch = Stopwatch(self.autoprune.sample_weight.device)
        setup = find_metrics_setup(vllm_config.model_config)
        self.autoprune_metrics = None if setup is None else WorkerMetrics(setup.folder)
        self.autoprune_budget: int = vllm_config.scheduler_config.max_num_encoder_input_tokens
        self.autoprune_profiled = 0
        bound_encoder_calls()
        prune_after_encoder_graphs()

    @property
    def autoprune_bound(self) -> int:
        """Maximum number of unpruned tokens of one call, as in memory profiling.

        It is vLLM's own encoder budget, rounded down to whole images of the largest size.
        """
        return self.autoprune_profiled or self.autoprune_budget

    def autoprune_split(self, items: Sequence[MultiModalKwargsItem | None]) -> list[slice]:
        """Runs of neighbouring items whose images have at most ``autoprune_bound`` tokens, N.

        An image with more than that is a run of its own. Counted from the pixels while they are on
        the CPU, because a count sent with the request could be forged.
        """
        vision = self.autoprune
        if vision is None:
            return [slice(0, len(items))]
        return list(
            group_by_tokens([_unpruned(vision, item) for item in items], self.autoprune_bound)
        )

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Rows of every image: ``[(K_i, D)]`` (``SupportsMultiModal.embed_multimodal``).

        vLLM calls it for one modality at a time; inputs without a plan go to the stock model.
        """
        rows = kwargs.pop(FIELD, None)
        if self.autoprune is None or rows is None:
            return super().embed_multimodal(**kwargs)
        assert isinstance(rows, Tensor | list)
        return self.autoprune_rows(self.autoprune_plan_reader.read(rows), kwargs)

    def autoprune_prune_by_graphs(
        self, kwargs: Mapping[str, object], encode: Encode
    ) -> MultiModalEmbeddings:
        """Rows of every image, encoded by the CUDA graphs that ``encode`` replays.

        Embeddings that come as inputs need no encoder; videos go through the graphs as stock.
        """
        vision = self.autoprune
        if vision is None or not (FIELD in kwargs or kwargs.get("image_embeds") is not None):
            return list(encode(kwargs))
        vision.graphs = encode
        try:
            return self.embed_multimodal(**kwargs)
        finally:
            vision.graphs = None

    def autoprune_rows(self, plans: list[ItemPlan], inputs: Mapping[str, object]) -> list[Tensor]:
        """Encode the images and select their tokens: rows ``(K_i, D)`` for each image."""
        vision = self.autoprune
        assert vision is not None
        images = vision.images(_tensor_fields(inputs))
        profile = any(plan.profile for plan in plans)
        if profile:
            tokens = sum(image.tokens for image in images)
            self.autoprune_profiled = max(self.autoprune_profiled, tokens)
        device = vision.sample_weight.device
        reserved = vision.cache.reserve(device, vision.cores.limit) if profile else None
        keys = [plan.key for plan in plans]
        encoder_inputs = [image.inputs for image in images]
        features, parts = vision.features(keys, encoder_inputs, profile), vision.model_parts()
        context = SelectionContext(
            self.autoprune_state,
            parts,
            self.autoprune_reporter,
            self.autoprune_first_check,
            vision.cores,
        )
        # Times that are not published would be kept forever.
        metrics = self.autoprune_metrics if not profile and is_rank_zero() else None
        with nullcontext() if metrics is None else self.autoprune_watch.measure():
            rows = prune_images(context, plans, features)
        del reserved
        if metrics is not None:
            meter, unsafe = self.autoprune_reporter.meter, self.autoprune_first_check.unsafe
            metrics.publish(self.autoprune_watch, meter, vision.cache, unsafe)
        return rows

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


def _clear_features(model: nn.Module) -> None:
    vision = model.autoprune if isinstance(model, PrunedModel) else None
    if vision is not None:
        vision.clear()


def _unpruned(vision: Vision, item: MultiModalKwargsItem | None) -> int:
    """N of an image with a plan; 0 for inputs that vLLM counts itself."""
    if item is None or FIELD not in item:
        return 0
    ((_, inputs),) = group_and_batch_mm_items([item])
    return vision.images(_tensor_fields(inputs))[0].tokens


def _tensor_fields(inputs: Mapping[str, object]) -> EncoderInputs:
    """Tensor fields of one call, without the plans; absent ones are None."""
    return {n: g for n, g in inputs.items() if n != FIELD and isinstance(g, Tensor | list)}
