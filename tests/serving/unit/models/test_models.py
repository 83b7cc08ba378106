from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.serving.unit.conftest import Registered
from tests.serving.unit.samples import hf_config, image, served
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.models.checkpoint_checks import check_siglip_checkpoint
from vllm_autoprune.serving.shared.plan import NO_KEY
from vllm_autoprune.serving.startup.activation import activate
from vllm_autoprune.serving.worker.features import FeatureCache


@pytest.mark.compat
@pytest.mark.parametrize("architecture", BACKBONES)
def test_import_path_of_every_backbone(architecture: str) -> None:
    """The class is a subclass of the stock class with its own processor."""
    from vllm.model_executor.models import registry

    module, _, name = BACKBONES[architecture].model.partition(":")
    model_class = vars(importlib.import_module(module))[name]
    stock = registry._VLLM_MODELS[architecture]
    base = vars(importlib.import_module(f"vllm.model_executor.models.{stock[0]}"))[stock[1]]
    assert issubclass(model_class, base)
    assert model_class is not base
    assert model_class._processor_factory is not base._processor_factory
    assert model_class._processor_factory.info is base._processor_factory.info


@pytest.mark.parametrize("architecture", BACKBONES)
def test_a_model_without_problems_has_none(architecture: str) -> None:
    config = hf_config()
    if BACKBONES[architecture].problems is check_siglip_checkpoint:
        config.vision_config.model_type = "siglip_vision_model"
        config.vision_feature_select_strategy = "full"
    assert list(BACKBONES[architecture].problems(config)) == []


def test_activation_registers_the_class_and_the_renderer_once(registered: Registered) -> None:
    for _ in range(3):
        activate("LlavaForConditionalGeneration")
    record = BACKBONES["LlavaForConditionalGeneration"]
    assert registered.models == [("LlavaForConditionalGeneration", record.model)]
    assert registered.renderers == [
        ("hf", "vllm_autoprune.serving.api.renderer", "AutopruneHfRenderer")
    ]


@pytest.mark.compat
def test_import_path_of_the_renderer(registered: Registered) -> None:
    from vllm.renderers.hf import HfRenderer

    activate("LlavaForConditionalGeneration")
    ((_, module, name),) = registered.renderers
    assert issubclass(vars(importlib.import_module(module))[name], HfRenderer)


class Tower(nn.Module):
    """A vision tower whose states are the pixels themselves, with a [CLS] row before them."""

    def __init__(self) -> None:
        super().__init__()
        layer = SimpleNamespace(self_attn=None)
        self.vision_model = SimpleNamespace(encoder=SimpleNamespace(layers=[layer]))
        self.shown: list[list[float]] = []

    def forward(self, pixels: Tensor) -> Tensor:
        self.shown.append(pixels[:, 0, 0, 0].tolist())
        return nn.functional.pad(pixels[:, 0].flatten(1)[..., None], (0, 0, 1, 0), value=-1.0)


def _vision(cache_bytes: int) -> tuple[Any, list[list[float]]]:
    """The vision side with a tower that records the images it encodes."""
    from vllm_autoprune.serving.models.llava import LlavaVision

    state = served(
        {"/base_policy": {"name": "divprune"}, "/constraints/selector/q_e": 0},
        cache_bytes=cache_bytes,
    )
    tower = Tower()
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(image_size=6, patch_size=1)),
        vision_tower=tower,
        multi_modal_projector=nn.Identity(),
    )
    return LlavaVision(model, state), tower.shown


def _pixels(*values: float) -> list[dict[str, Tensor]]:
    return [{"pixel_values": torch.full((3, 6, 6), float(value))} for value in values]


def _keys(*keys: int) -> list[tuple[int, int]]:
    return [(key, key) for key in keys]


def test_each_image_is_encoded_once() -> None:
    vision, encoded = _vision(cache_bytes=1 << 20)
    first = vision.features(_keys(1, 2, 1), _pixels(1, 2, 1))
    assert encoded == [[1.0, 2.0]]
    assert [f.rows()[0, 0].item() for f in first] == [1, 2, 1]
    again = vision.features(_keys(2, 3), _pixels(2, 3))
    assert encoded[1:] == [[3.0]]
    assert [f.rows()[0, 0].item() for f in again] == [2, 3]


def test_features_of_another_geometry_are_not_used() -> None:
    """Two shapes of pixels under one key: a plan may be forged, and keys are digests."""
    vision, encoded = _vision(cache_bytes=1 << 20)
    first, other = _pixels(1), [{"pixel_values": torch.full((4, 6, 6), 2.0)}]
    vision.features(_keys(1), first)
    (features,) = vision.features(_keys(1), other)
    assert encoded == [[1.0], [2.0]]
    assert features.rows()[0, 0].item() == 2
    assert [f.rows()[0, 0].item() for f in vision.features(_keys(1), first)] == [1]
    assert len(encoded) == 2


@pytest.mark.compat
def test_geometry_is_shapes_and_the_numbers_on_the_cpu() -> None:
    from vllm_autoprune.serving.models.vision import describe_geometry

    wide = {"pixel_values": torch.zeros(16, 4), "image_grid_thw": torch.tensor([1, 2, 8])}
    high = {**wide, "image_grid_thw": torch.tensor([1, 8, 2])}
    assert describe_geometry(wide) != describe_geometry(high)
    assert describe_geometry(wide) == describe_geometry({**wide, "pixel_values": torch.ones(16, 4)})
    assert describe_geometry(wide) != describe_geometry({"pixel_values": torch.zeros(16, 4)})
    on_device = [{name: part.to("meta") for name, part in one.items()} for one in (wide, high)]
    assert describe_geometry(on_device[0]) == describe_geometry(on_device[1])


@pytest.mark.compat
def test_geometry_has_no_pixels_of_a_mask() -> None:
    """Idefics3's masks have as many numbers as its tiles have pixels."""
    from vllm_autoprune.serving.models.vision import describe_geometry

    tiles = torch.zeros(17, 3, 64, 64)
    image = {"pixel_values": tiles, "pixel_attention_mask": torch.ones(17, 64, 64).bool()}
    assert len(str(describe_geometry(image))) < 200


def test_images_without_a_key_are_encoded_and_not_kept() -> None:
    vision, encoded = _vision(cache_bytes=1 << 20)
    for _ in range(2):
        features = vision.features([NO_KEY, NO_KEY, (1, 1)], _pixels(4, 5, 6))
        assert [f.rows()[0, 0].item() for f in features] == [4, 5, 6]
    assert encoded == [[4.0, 5.0, 6.0], [4.0, 5.0]]
    assert len(vision.cache) == 1
    assert (vision.cache.hits, vision.cache.misses) == (1, 5)


def test_cached_rows_do_not_keep_their_batch_alive() -> None:
    vision, _ = _vision(cache_bytes=1 << 20)
    for features in vision.features(_keys(1, 2), _pixels(1, 2)):
        assert sum(p.untyped_storage().nbytes() for p in features.tensors()) == features.nbytes


def test_profiling_encodes_every_dummy_image() -> None:
    vision, encoded = _vision(cache_bytes=1 << 20)
    assert len(vision.features(_keys(0, 0, 0), _pixels(0, 0, 0), profile=True)) == 3
    assert encoded == [[0.0, 0.0, 0.0]]
    assert len(vision.cache) == 0


@pytest.mark.compat
@pytest.mark.parametrize("rank", [0, 1])
def test_times_of_selections_are_kept_by_the_rank_that_publishes_them(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_autoprune.serving.models import pruned_model
    from vllm_autoprune.serving.worker.fallbacks import FallbackReporter
    from vllm_autoprune.serving.worker.stopwatch import Stopwatch

    published: list[list[float]] = []
    monkeypatch.setattr(pruned_model, "is_rank_zero", lambda: rank == 0)
    monkeypatch.setattr(pruned_model, "prune_images", lambda *_: [])
    vision, _ = _vision(cache_bytes=0)
    monkeypatch.setattr(vision, "images", lambda _: [])
    monkeypatch.setattr(type(vision), "sample_weight", torch.zeros(1))
    model: Any = SimpleNamespace(
        autoprune=vision,
        autoprune_state=vision.served,
        autoprune_reporter=FallbackReporter(),
        autoprune_first_check=SimpleNamespace(unsafe=0),
        autoprune_watch=Stopwatch(torch.device("cpu")),
        autoprune_metrics=SimpleNamespace(
            publish=lambda watch, *_: published.append(watch.collect())
        ),
    )
    for _ in range(3):
        pruned_model.PrunedModel.autoprune_rows(model, [], {})
    assert [len(times) for times in published] == ([1, 1, 1] if rank == 0 else [])
    assert model.autoprune_watch.collect() == []


@pytest.mark.compat
def test_new_weights_clear_cached_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reloads weights into a running engine without building the model anew."""
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration

    from vllm_autoprune.serving.models.llava import AutopruneLlavaForConditionalGeneration

    monkeypatch.setattr(LlavaForConditionalGeneration, "load_weights", lambda *_: {"w"})
    model = AutopruneLlavaForConditionalGeneration.__new__(AutopruneLlavaForConditionalGeneration)
    nn.Module.__init__(model)
    cache = FeatureCache(1 << 20)
    cache.put((1, 1), image(0))
    vision = SimpleNamespace(capture_weights=lambda weights: weights, finish_loading=cache.clear)
    model.__dict__["autoprune"] = vision
    assert model.load_weights([]) == {"w"}
    assert cache.get((1, 1)) is None


@pytest.mark.compat
def test_server_without_images_has_no_vision_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--limit-mm-per-prompt '{"image": 0}'` leaves the tower out; text is served as ever."""
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration
    from vllm.model_executor.models.utils import StageMissingLayer

    from vllm_autoprune.serving.models.llava import AutopruneLlavaForConditionalGeneration

    def stock(self: nn.Module, **_: object) -> None:
        nn.Module.__init__(self)
        self.vision_tower = StageMissingLayer("image_tower", nn.Linear(1, 1))

    monkeypatch.setattr(LlavaForConditionalGeneration, "__init__", stock)
    monkeypatch.setattr(LlavaForConditionalGeneration, "load_weights", lambda *_: set())
    config = SimpleNamespace(model_config=SimpleNamespace(autoprune=served()))
    model = AutopruneLlavaForConditionalGeneration(vllm_config=config)
    assert model.autoprune is None
    assert model.load_weights([]) == set()
    assert model.autoprune_split([None, None]) == [slice(0, 2)]


def test_every_backbone_has_a_tiny_model() -> None:
    """Engine tests are parametrised by these; LLaVA-1.5 has the trained mini-LLaVA."""
    from vllm_autoprune.selftest.backbones import BUILDERS

    assert {backbone.name for backbone in BACKBONES.values()} == {"llava", *BUILDERS}
