"""Backbones: pruned classes, encoded images, rows and placeholders of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import SmolVLMImageProcessor
from vllm.multimodal.processing.processor import PromptUpdateDetails

from tests.serving.unit.samples import Sender, image, served
from vllm_autoprune.backbones import find_backbone
from vllm_autoprune.selftest.backbones import build
from vllm_autoprune.selftest.checks import count_between
from vllm_autoprune.serving.api.layout import shorten_placeholders
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.models.llava import (
    Join,
    Tiles,
    compute_joined_layout,
    join_features,
    split_joined_images,
)
from vllm_autoprune.serving.models.tiled import IDEFICS3_PLACEHOLDERS
from vllm_autoprune.serving.plan import NO_KEY
from vllm_autoprune.serving.worker.features import FeatureCache, ImageFeatures
from vllm_autoprune.serving.worker.selection import FallbackReporter
from vllm_autoprune.tpdsl.tokens import Grid


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
    before = vision.features(_keys(1, 2, 1), _pixels(1, 2, 1))
    assert encoded == [[1.0, 2.0]]
    assert [f.rows()[0, 0].item() for f in before] == [1, 2, 1]
    again = vision.features(_keys(2, 3), _pixels(2, 3))
    assert encoded[1:] == [[3.0]]
    assert [f.rows()[0, 0].item() for f in again] == [2, 3]


def test_features_of_another_geometry_are_not_used() -> None:
    """Two shapes of pixels under one key: a plan may be forged, and keys are digests."""
    vision, encoded = _vision(cache_bytes=1 << 20)
    before, other = _pixels(1), [{"pixel_values": torch.full((4, 6, 6), 2.0)}]
    vision.features(_keys(1), before)
    (features,) = vision.features(_keys(1), other)
    assert encoded == [[1.0], [2.0]]
    assert features.rows()[0, 0].item() == 2
    assert [f.rows()[0, 0].item() for f in vision.features(_keys(1), before)] == [1]
    assert len(encoded) == 2


@pytest.mark.compat
def test_geometry_is_shapes_and_the_numbers_on_the_cpu() -> None:
    from vllm_autoprune.serving.models.pruned_model import describe_geometry

    wide = {"pixel_values": torch.zeros(16, 4), "image_grid_thw": torch.tensor([1, 2, 8])}
    high = {**wide, "image_grid_thw": torch.tensor([1, 8, 2])}
    assert describe_geometry(wide) != describe_geometry(high)
    assert describe_geometry(wide) == describe_geometry({**wide, "pixel_values": torch.ones(16, 4)})
    assert describe_geometry(wide) != describe_geometry({"pixel_values": torch.zeros(16, 4)})
    on_device = [
        {name: part.to("meta") for name, part in inputs.items()} for inputs in (wide, high)
    ]
    assert describe_geometry(on_device[0]) == describe_geometry(on_device[1])


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


@pytest.mark.compat
@pytest.mark.parametrize("rank", [0, 1])
def test_times_of_selections_are_kept_by_the_rank_that_publishes_them(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_autoprune.serving.models import pruned_model
    from vllm_autoprune.serving.worker.metrics import Stopwatch

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
    from vllm_autoprune.selftest.backbones import TINY_MODELS

    assert {backbone.name for backbone in BACKBONES.values()} == {"llava", *TINY_MODELS}


# ---- tiles with text between them ----


@pytest.mark.parametrize("kind", ["Idefics3", "SmolVLM"])
def test_a_square_has_most_tokens(kind: str, tmp_path: Path) -> None:
    folder = build(kind.lower(), tmp_path)
    architecture = f"{kind}ForConditionalGeneration"
    sender = Sender(folder, 7, architecture=architecture, placeholder="<image>")
    assert IDEFICS3_PLACEHOLDERS.count_largest(sender.info).tokens == 9 * 5


@pytest.mark.parametrize(
    ("name", "tile", "patch", "scale"),
    [("idefics3-8b", 364, 14, 2), ("smolvlm2-2.2b", 384, 14, 3), ("smolvlm2-500m", 512, 16, 4)],
)
def test_shapes_have_the_tokens_of_a_square_image(
    name: str, tile: int, patch: int, scale: int
) -> None:
    """Tiles as the image processor counts them, of patches that are shuffled into tokens."""
    pixels = SmolVLMImageProcessor(
        size={"longest_edge": 4 * tile}, max_image_size={"longest_edge": tile}
    )
    tiles, _, _ = pixels.get_number_of_image_patches(1000, 1000)
    assert find_backbone(name).tokens == tiles * (tile // patch // scale) ** 2


# ---- any-resolution images ----

SIDE, SIZE = 4, 16


def join_of(rows: int, columns: int, cut: int = 0) -> Join:
    """LLaVA-NeXT's order: base view, then the stitched map without ``cut`` rows at both ends."""

    def join(tiles: Tensor, newline: Tensor) -> Tensor:
        base, crops = tiles[0], tiles[1 : 1 + rows * columns]
        stitched = crops.reshape(rows, columns, SIDE, SIDE, -1).permute(0, 2, 1, 3, 4)
        canvas = stitched.reshape(rows * SIDE, columns * SIDE, -1)
        canvas = canvas[cut : len(canvas) - cut]
        ends = newline.expand(len(canvas), 1, -1)
        return torch.cat([base, torch.cat([canvas, ends], dim=1).flatten(0, 1)])

    return join


def tiled_image(
    join: Join, tiles: int, width: int = 8, blank: int = 0
) -> tuple[Tensor, ImageFeatures]:
    """Random tiles: the rows of the stock model, and the joined features.

    ``blank`` tiles stand behind them, as where a larger image was processed in the same call.
    """
    source = torch.Generator().manual_seed(tiles)
    projected = torch.randn(tiles, SIZE, width, generator=source)
    attention = projected[:, :, 0].exp()
    newline = torch.full((width,), 9.0)
    padded: Tiles = (
        nn.functional.pad(projected, (0, 0, 0, 0, 0, blank)),
        {"cls_attention": nn.functional.pad(attention, (0, 0, 0, blank))},
    )
    inputs = {"image_sizes": torch.tensor([SIDE, SIDE * (tiles - 1)])}
    joined = join_features(padded, inputs, lambda _: join, newline, config_of(tiles))
    return join(projected, newline), joined


def config_of(tiles: int) -> Any:
    """Of a model that cuts every image into so many tiles, the base view among them."""
    return SimpleNamespace(
        image_grid_pinpoints=[[SIDE, SIDE * (tiles - 1)]],
        vision_config=SimpleNamespace(image_size=SIDE, patch_size=1),
    )


def test_without_padding_base_view_and_crops_are_equal_tiles() -> None:
    join = join_of(2, 2)
    (place,) = compute_joined_layout(join, 5, SIDE).places
    assert (place.grid, place.share) == (Grid(SIDE, SIDE, 5), 5)
    rows, joined = tiled_image(join, 5)
    assert (joined.tokens, joined.candidates, joined.gaps) == (len(rows), 80, 8)
    assert torch.equal(joined.rows(), rows)
    source = torch.Generator().manual_seed(5)
    tiles = torch.randn(5, SIZE, 8, generator=source)
    assert torch.equal(joined.regions[0].projected, tiles.flatten(0, 1)), "tile after tile"


@pytest.mark.parametrize("cut", [0, 1])
def test_blank_tiles_of_a_batch_change_nothing(cut: int) -> None:
    """As the model cuts them off: neither layout nor shares of the budget count them."""
    join = join_of(2, 2, cut)
    (_, alone), (_, padded) = tiled_image(join, 5), tiled_image(join, 5, blank=4)
    assert torch.equal(padded.rows(), alone.rows())
    for region, expected in zip(padded.regions, alone.regions, strict=True):
        assert (region.grid, region.share) == (expected.grid, expected.share)
        assert torch.equal(region.signals["cls_attention"], expected.signals["cls_attention"])
    tiles = torch.zeros(1, 9, 3, SIDE, SIDE)
    inputs = {"pixel_values": tiles, "image_sizes": torch.tensor([[SIDE, 4 * SIDE]])}
    (split,) = split_joined_images(inputs, lambda _: join, config_of(5))
    assert split.tokens == alone.tokens


# ---- placeholders ----

IMAGE, OTHER = 7, 1


def test_tokens_around_placeholders_are_kept() -> None:
    content = PromptUpdateDetails.select_token_id([OTHER, *[IMAGE] * 6, OTHER, OTHER], IMAGE)
    cut = shorten_placeholders(content, 2)
    assert cut.full == [OTHER, IMAGE, IMAGE, OTHER, OTHER]
    assert cut.is_embed is not None
    assert torch.equal(cut.is_embed(cut.full), torch.tensor([False, True, True, False, False]))


def test_each_tile_keeps_its_share() -> None:
    """What does not divide goes to the first tile, or to the one that shows the whole image."""
    tiles = [OTHER, *[IMAGE] * 3, OTHER, *[IMAGE] * 3, OTHER, *[IMAGE] * 3, OTHER]
    content = PromptUpdateDetails.select_token_id(tiles, IMAGE)
    assert _runs(shorten_placeholders(content, 5).full) == [2, 2, 1]
    assert _runs(shorten_placeholders(content, 5, rest_at=-1).full) == [2, 1, 2]
    assert _runs(shorten_placeholders(content, 1, rest_at=-1).full) == [0, 0, 1]
    assert shorten_placeholders(content, 9) is content


def _runs(ids: Sequence[int]) -> list[int]:
    return count_between(list(ids), IMAGE)[1:-1]
