"""A worker's model without an engine: what it computes of images, keeps of them, and survives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from torch import Tensor, nn
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.serving.engine import built
from tests.serving.unit.sender import Sender
from tests.stand_in_device import DEVICE, forbid_waiting
from vllm_autoprune import PruningPolicy, VisualTokens, load_state
from vllm_autoprune.ops import similarity
from vllm_autoprune.serving.compat import worker as worker_patches
from vllm_autoprune.serving.compat.runner_v1 import profile_images
from vllm_autoprune.serving.inputs import VIDEO_GRID
from vllm_autoprune.serving.models import pruned_model
from vllm_autoprune.serving.models.grid import GridVision
from vllm_autoprune.serving.models.model_state import BoundedEncoder
from vllm_autoprune.serving.models.pruned_model import PrunedModel
from vllm_autoprune.serving.plan import FIELD, ItemPlan
from vllm_autoprune.serving.served_state import ServedState
from vllm_autoprune.serving.worker import selection
from vllm_autoprune.serving.worker.batch import prune_images
from vllm_autoprune.serving.worker.features import (
    ImageFeatures,
    TensorCache,
)
from vllm_autoprune.serving.worker.metrics import SELECTION, Stopwatch, WorkerMetrics
from vllm_autoprune.serving.worker.selection import (
    FallbackReporter,
)
from vllm_autoprune.tpdsl import refine
from vllm_autoprune.tpdsl import tokens as visual_tokens
from vllm_autoprune.tpdsl.atoms.source import BudgetCall
from vllm_autoprune.tpdsl.base_policy import Given, TokenSelection
from vllm_autoprune.tpdsl.refine import select_tokens

WIDTH = 3584
"""Of Qwen2.5-VL-7B, whose largest image has 16,384 tokens."""

CACHE_BYTES = 250_000_000
"""The default of the feature cache."""

Picture = tuple[int, Tensor]
"""The key of an image, and its patches ``(height, width, D)``."""


class LanguageModel(nn.Embedding):
    """The input embeddings alone."""

    config = SimpleNamespace(hidden_size=WIDTH)

    def embed_input_ids(self, ids: Tensor) -> Tensor:
        rows: Tensor = self(ids)
        return rows


class StockModel(nn.Module):
    """A model class of vLLM, as far as a pruned one builds on it."""

    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=1))

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.visual = nn.Linear(1, 1, device=vllm_config.device)
        self.language_model = LanguageModel(8, WIDTH, device=vllm_config.device)

    def get_language_model(self) -> nn.Module:
        return self.language_model


class PatchVision(GridVision):
    """A vision side whose tower hands on the patches of every image."""

    def rows(
        self, pixels: Tensor | Sequence[Tensor], grids: Tensor
    ) -> Sequence[Tensor]:
        assert isinstance(pixels, Tensor)
        return pixels.split(grids.prod(-1).tolist())


class Model(PrunedModel, StockModel):
    autoprune_vision = PatchVision


@pytest.fixture
def make_model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Model]:
    """A function that builds a model for a state on a device; vLLM is not patched."""
    for patch in ("clear_with_worker_caches", "bound_encoder_calls", "profile_images"):
        monkeypatch.setattr(pruned_model, patch, lambda *_: None)

    def make(state: ServedState, device: torch.device = DEVICE) -> Model:
        model_config = SimpleNamespace(
            autoprune=state, get_vocab_size=lambda: 32_000, max_model_len=32_768
        )
        scheduler = SimpleNamespace(max_num_encoder_input_tokens=16_384)
        config: Any = SimpleNamespace(
            model_config=model_config,
            scheduler_config=scheduler,
            device=device,
            use_v2_model_runner=False,
        )
        return Model(vllm_config=config)

    return make


def serve(
    name: str, budget: int | str = 8, cache_bytes: int = CACHE_BYTES
) -> ServedState:
    """A shipped state under the default size of the feature cache."""
    return ServedState(
        "Model", load_state(name), BudgetCall.parse(budget), None, cache_bytes
    )


def select_rows(model: Model, *pictures: Picture, budget: int = 8) -> list[Tensor]:
    """Rows of images of one call, selected without waiting for their device."""
    plans = [ItemPlan(budget, (key, key)) for key, _ in pictures]
    grids = torch.tensor([[1, *patches.shape[:2]] for _, patches in pictures])
    pixels = torch.cat([patches.flatten(0, 1) for _, patches in pictures])
    with torch.inference_mode(), forbid_waiting():
        return model.autoprune_rows(
            plans, {"pixel_values": pixels, "image_grid_thw": grids}
        )


def empty(height: int, width: int) -> Tensor:
    return torch.empty(height, width, WIDTH, dtype=torch.bfloat16, device=DEVICE)


# ---- the bounds of a state ----


def test_images_of_five_hundred_sizes_are_selected_from_once_each(
    make_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share as budget gives most sizes a K of their own, and none makes the host wait."""
    selected: list[int] = []

    def count(
        policy: PruningPolicy, tokens: VisualTokens, earlier: Given | None
    ) -> TokenSelection:
        selected.append(policy.budget)
        return select_tokens(policy, tokens, earlier)

    monkeypatch.setattr(selection, "select_tokens", count)
    monkeypatch.setattr(refine, "select_tokens", count)
    model = make_model(serve("norm", "1/8"))
    random = Random(0)
    sizes = [(random.randrange(8, 96), random.randrange(8, 96)) for _ in range(500)]
    for key, (height, width) in enumerate(sizes, 1):
        select_rows(model, (key, empty(height, width)), budget=height * width // 8)
    assert model.autoprune_reporter.errors == {}
    assert selected == [height * width // 8 for height, width in sizes]
    assert len(set(selected)) > 300


# ---- cosines ----


@pytest.fixture
def cosines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the cosines that are computed between all tokens of images."""
    shapes: list[tuple[int, ...]] = []

    def count(features: Tensor, norm: Tensor, tiles: int = 1) -> Tensor:
        computed = similarity.cosines(features, norm, tiles)
        shapes.append(tuple(computed.shape))
        return computed

    monkeypatch.setattr(visual_tokens, "cosines", count)
    return shapes


@pytest.mark.parametrize(
    "base", ["cen_divprune", "cen_cdpruner", "divprune", "norm", "vidcom2"]
)
def test_cosines_that_no_policy_reads_are_not_computed(
    base: str, make_model: Callable[..., Model], cosines: list[tuple[int, ...]]
) -> None:
    """The largest image of Qwen2.5-VL-7B: its cosines would take 1 GiB."""
    model = make_model(serve(base))
    for _ in range(2):
        select_rows(model, (1, empty(128, 128)))
    assert model.autoprune is not None
    cache = model.autoprune.cache
    assert cosines == []
    assert cache.used_bytes == 128 * 128 * WIDTH * 2
    assert (cache.hits, cache.misses) == (1, 1)
    assert model.autoprune_reporter.errors == {}


def test_cosines_that_a_policy_reads_are_computed_once_an_image(
    make_model: Callable[..., Model], cosines: list[tuple[int, ...]]
) -> None:
    model = make_model(serve("instruction-free"))
    for budget in (8, 8, 4):
        for key in (1, 2):
            select_rows(model, (key, empty(6, 6)), budget=budget)
    assert model.autoprune is not None
    assert cosines == [(1, 36, 36)] * 2
    assert model.autoprune.cache.used_bytes == 2 * (36 * WIDTH * 2 + 36 * 36 * 4)


def test_an_image_whose_cosines_do_not_fit_is_cached_without_them(
    make_model: Callable[..., Model], cosines: list[tuple[int, ...]]
) -> None:
    features = 36 * WIDTH * 2
    model = make_model(serve("instruction-free", cache_bytes=features))
    for _ in range(2):
        select_rows(model, (1, empty(6, 6)))
    assert model.autoprune is not None
    cache = model.autoprune.cache
    assert cosines == [(1, 36, 36)] * 2
    assert (cache.used_bytes, cache.hits) == (features, 1)


# ---- memory ----

HOST = torch.device("cpu")


def picture(seed: int, side: int = 6) -> Picture:
    source = torch.Generator().manual_seed(seed)
    return seed, torch.randn(side, side, WIDTH, generator=source)


def refuse(
    monkeypatch: pytest.MonkeyPatch, where: str, refuses: Callable[[int, int], bool]
) -> None:
    """Let memory run out for some calls, by their number of images and that of all their tokens."""

    def check(images: int, tokens: int) -> None:
        if refuses(images, tokens):
            raise torch.OutOfMemoryError("made to fail")

    def rows(vision: PatchVision, pixels: Tensor, grids: Tensor) -> Sequence[Tensor]:
        check(len(grids), len(pixels))
        return pixels.split(grids.prod(-1).tolist())

    def prune(context: Any, plans: Any, images: Any) -> list[Tensor]:
        check(len(images), sum(image.tokens for image in images))
        return prune_images(context, plans, images)

    if where == "tower":
        monkeypatch.setattr(PatchVision, "rows", rows)
    else:
        monkeypatch.setattr(pruned_model, "prune_images", prune)


@pytest.mark.parametrize("where", ["tower", "selection"])
def test_images_without_memory_for_all_of_them_are_encoded_one_by_one(
    where: str, make_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(serve("divprune"), HOST)
    pictures = [picture(seed) for seed in (1, 2, 3)]
    alone = [select_rows(model, shot)[0] for shot in pictures]
    assert model.autoprune is not None
    model.autoprune.clear()
    select_rows(model, picture(4))
    refuse(monkeypatch, where, lambda images, _: images > 1)
    assert all(map(torch.equal, select_rows(model, *pictures), alone))
    assert model.autoprune_reporter.errors == {"OutOfMemoryError": 1}
    assert len(model.autoprune.cache) == 3, (
        "memory of cached features is given up for them"
    )


@pytest.mark.parametrize("where", ["tower", "selection"])
def test_an_image_that_cannot_be_encoded_is_lost_alone(
    where: str,
    make_model: Callable[..., Model],
    monkeypatch: pytest.MonkeyPatch,
    logged: pytest.LogCaptureFixture,
) -> None:
    """Also before any other, of which a row might have been known."""
    (rows,) = select_rows(make_model(serve("divprune"), HOST), picture(1))
    model = make_model(serve("divprune"), HOST)
    refuse(monkeypatch, where, lambda _, tokens: tokens >= 49)
    sound, lost = select_rows(model, picture(1), picture(2, side=7))
    assert torch.equal(sound, rows)
    assert torch.equal(lost, torch.zeros(8, WIDTH))
    assert model.autoprune_reporter.counts()["zeros", "error"] == 1
    assert logged.records[-1].getMessage().startswith("An image cannot be encoded")
    monkeypatch.undo()


def test_what_ranks_do_together_is_not_tried_again(
    make_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "broadcast_rank_zero", lambda packed: packed)
    model = make_model(serve("divprune"), HOST)
    monkeypatch.setattr(pruned_model, "is_rank_zero", lambda: True)
    for module in (worker_patches, selection):
        monkeypatch.setattr(module, "world_size", lambda: 2)
    select_rows(model, picture(1))
    refuse(monkeypatch, "tower", lambda *_: True)
    with pytest.raises(torch.OutOfMemoryError):
        select_rows(model, picture(2))


def test_a_rank_that_publishes_no_times_keeps_none(
    make_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruned_model, "is_rank_zero", lambda: False)
    model: Any = make_model(serve("divprune"), HOST)
    model.autoprune_metrics = "those of another rank"
    select_rows(model, picture(1))
    assert model.autoprune_watch.collect() == []


# ---- profiling ----


class Profiled(NamedTuple):
    """A configuration under which vLLM profiles a video, for it has more tokens than images."""

    config: Any
    registry: Any
    budget: MultiModalBudget

    def check(self, batches: list[Any]) -> None:
        """Check that one call encoded as many of the largest images as a step may hold."""
        (batch,) = batches
        plans = [ItemPlan.decode(row) for row in batch[FIELD]]
        assert len(plans) == self.budget.mm_max_items_per_batch["image"]
        largest = self.budget.mm_max_toks_per_item["image"]
        assert all(plan.profile and plan.tokens == largest for plan in plans)


@pytest.fixture
def profiled() -> Profiled:
    """Qwen2.5-VL, whose videos are left whole by this state."""
    sender = Sender(built("qwen2_5_vl"), budget=8)
    scheduler = SimpleNamespace(
        max_num_encoder_input_tokens=2048,
        encoder_cache_size=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=4,
        disable_chunked_mm_input=False,
        enable_chunked_prefill=True,
    )
    config: Any = SimpleNamespace(
        model_config=sender._config, scheduler_config=scheduler
    )
    registry: Any = SimpleNamespace(create_processor=lambda *_: sender._processor)
    budget = MultiModalBudget(config, registry, enable_cache=False)
    assert budget.get_modality_with_max_tokens() == "video"
    return Profiled(config, registry, budget)


@pytest.mark.compat
@pytest.mark.parametrize("skips", [False, True])
def test_largest_images_are_profiled_beside_a_larger_video(
    profiled: Profiled, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    model = SimpleNamespace(embed_multimodal=lambda **batch: calls.append(batch))
    monkeypatch.setattr(
        GPUModelRunner, "profile_run", lambda *_, **named: calls.append(named)
    )
    model_config = profiled.config.model_config
    monkeypatch.setattr(model_config.multimodal_config, "skip_mm_profiling", skips)
    profile_images(lambda _: nullcontext(True))
    runner: Any = SimpleNamespace(
        vllm_config=profiled.config,
        model_config=model_config,
        mm_registry=profiled.registry,
        device=HOST,
        get_model=lambda: model,
    )
    GPUModelRunner.profile_run(runner, randomize_inputs=True)
    *batches, last = calls
    assert last == {"randomize_inputs": True}
    if skips:
        assert not batches
    else:
        profiled.check(batches)


@pytest.mark.compat
def test_the_state_of_runner_v2_profiles_images_and_holds_the_feature_cache(
    profiled: Profiled,
) -> None:
    """Until vLLM drops what it has encoded, as ``GPUModelRunner.profile_run`` does at its end."""
    calls: list[Any] = []
    held: list[bool] = []
    buffer = torch.zeros(8)
    cache = EncoderCache()

    def embed(**batch: Any) -> list[Tensor]:
        calls.append(batch)
        held.append(any(entry is buffer for entry in cache.encoder_outputs.values()))
        items = batch[FIELD if FIELD in batch else VIDEO_GRID]
        return [torch.zeros(1, 4)] * len(items)

    vision = SimpleNamespace(cache=SimpleNamespace(reserve=lambda device: buffer))
    model: Any = SimpleNamespace(
        embed_multimodal=embed,
        autoprune=vision,
        autoprune_split=lambda items: [slice(0, len(items))],
    )
    stock = EncoderRunner(model, 8, 4, cache, torch.float32, HOST)
    dummies = profiled.budget.get_dummy_encoder_profile_inputs()
    BoundedEncoder(stock).profile_encoder_cache(dummies, profiled.budget)
    profiled.check([batch for batch in calls if FIELD in batch])
    assert len(calls) == 2 and all(held)
    cache.reset_encoder_cache()
    assert not cache.encoder_outputs


def test_the_feature_cache_is_held_until_profiling_ends(
    make_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: list[ref[Tensor]] = []
    reserve = TensorCache.reserve

    def record(cache: TensorCache[Any], device: torch.device) -> Tensor:
        buffer = reserve(cache, device)
        assert buffer is not None and buffer.nbytes == CACHE_BYTES
        buffers.append(ref(buffer))
        return buffer

    monkeypatch.setattr(TensorCache, "reserve", record)
    model = make_model(serve("divprune"))
    with pruned_model._hold_feature_cache(model) as prunes:
        assert prunes and buffers[0]() is not None
    assert buffers[0]() is None
    with pruned_model._hold_feature_cache(nn.Module()) as prunes:
        assert not prunes


def test_seconds_fall_into_buckets_of_a_file_that_api_servers_read(
    tmp_path: Path,
) -> None:
    with closing(WorkerMetrics(str(tmp_path))) as worker:
        for seconds in ((0.0005, 0.001, 0.3), (99.0,)):
            watch: Any = SimpleNamespace(collect=lambda seconds=seconds: seconds)
            worker.publish(watch, FallbackReporter(), TensorCache[ImageFeatures](64))
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    metrics = {name: float(value) for name, value in pairs}
    buckets = {"0.001": 2, "0.25": 2, "0.5": 3, "2.5": 3, "+Inf": 4}
    assert {
        edge: metrics[f'{SELECTION}_bucket{{le="{edge}"}}'] for edge in buckets
    } == buckets
    assert metrics[f"{SELECTION}_sum"] == pytest.approx(99.3015)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_collect_does_not_wait_for_the_gpu() -> None:
    watch = Stopwatch(torch.device("cuda"))
    with watch.measure():
        torch.cuda._sleep(200_000_000)
    assert watch.collect() == []
    torch.cuda.synchronize()
    (seconds,) = watch.collect()
    assert seconds > 0.01
