"""A stock model class with its images pruned, where a state is served; the same for all backbones.

Knows nothing about any one model; a subclass says which :class:`Vision` is its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn
from vllm.model_executor.models.utils import StageMissingLayer

from vllm_autoprune.serving.accounts import accounts_of
from vllm_autoprune.serving.batch import prune_images
from vllm_autoprune.serving.compat import clear_with_worker_caches
from vllm_autoprune.serving.first_images import FirstImages
from vllm_autoprune.serving.models.vision import Vision, batches
from vllm_autoprune.serving.plan import FIELD, ItemPlan
from vllm_autoprune.serving.plan_rules import PlanReader, PlanRules
from vllm_autoprune.serving.prune import FallbackMeter
from vllm_autoprune.serving.ranks import is_first_rank
from vllm_autoprune.serving.served import ServedState, served_state
from vllm_autoprune.serving.stopwatch import Stopwatch
from vllm_autoprune.serving.worker_metrics import WorkerMetrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.models.interfaces import MultiModalEmbeddings
    from vllm.model_executor.models.interfaces import SupportsMultiModal as _Stock
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
        self.autoprune_served: ServedState = served
        self.autoprune_meter = FallbackMeter(FirstImages())
        self.autoprune = self.autoprune_vision(self, served)
        clear_with_worker_caches(_clear_features)
        rules = PlanRules(served, vllm_config.model_config.get_vocab_size())
        device = self.autoprune.like.device
        self.autoprune_plans = PlanReader(rules, self.autoprune_meter, device)
        self.autoprune_watch = Stopwatch(self.autoprune.like.device)
        accounts = accounts_of(vllm_config.model_config)
        self.autoprune_metrics = None if accounts is None else WorkerMetrics(accounts.folder)
        # vLLM counts a pruned image as K tokens, so a step may hold far more images than
        # profiling saw: features and selections are made for as many at a time as it did see.
        self.autoprune_bound: int = vllm_config.scheduler_config.max_num_encoder_input_tokens

    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Rows of every image: ``[(K_i, D)]`` (``SupportsMultiModal.embed_multimodal``).

        vLLM calls it for one modality at a time; what comes without a plan is not ours.
        """
        rows = kwargs.pop(FIELD, None)
        if self.autoprune is None or rows is None:
            return super().embed_multimodal(**kwargs)
        assert isinstance(rows, Tensor | list)
        return self.autoprune_pruned(self.autoprune_plans.read(rows), kwargs)

    def autoprune_pruned(self, plans: list[ItemPlan], inputs: Mapping[str, object]) -> list[Tensor]:
        """``(K_i, D)`` rows of every image."""
        vision = self.autoprune
        assert vision is not None
        # Fields that this call has nothing of are None.
        held = {n: given for n, given in inputs.items() if isinstance(given, Tensor | list)}
        images = vision.images(held)
        profile = any(plan.profile for plan in plans)
        reserved = vision.cache.reserve(vision.like.device) if profile else None
        total = sum(image.tokens for image in images)
        done: list[Tensor] = []
        for some in batches(images, total if profile else self.autoprune_bound):
            keys = [plan.key for plan in plans[some]]
            shown = [image.inputs for image in images[some]]
            features, parts = vision.features(keys, shown, profile), vision.parts()
            with nullcontext() if profile else self.autoprune_watch.running():
                done += prune_images(
                    self.autoprune_served, plans[some], features, parts, self.autoprune_meter
                )
        del reserved
        if self.autoprune_metrics is not None and not profile and is_first_rank():
            metered = self.autoprune_watch, self.autoprune_meter, vision.cache
            self.autoprune_metrics.publish(*metered)
        return done

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As stock; other weights that the state reads are taken here too, so vLLM counts them.

        A running engine may be given new weights (``reload_weights``): features of the old ones
        are dropped.
        """
        if self.autoprune is None:
            return super().load_weights(weights)
        loaded = super().load_weights(self.autoprune.heard(weights))
        self.autoprune.loaded()
        return loaded


def _clear_features(model: nn.Module) -> None:
    vision = model.autoprune if isinstance(model, PrunedModel) else None
    if vision is not None:
        vision.cache.clear()
