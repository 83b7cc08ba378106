"""Backbones: cached features, what a pruned class keeps of stock, tiles, places of M-RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import vllm.distributed
from torch import Tensor, nn
from vllm.config import MultiModalConfig
from vllm.model_executor.models.llava import LlavaForConditionalGeneration as Stock
from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniThinkerForConditionalGeneration as Omni,
)
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerForConditionalGeneration as Omni3,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.processing.processor import PromptUpdateDetails

from tests.serving.engine import built
from tests.serving.unit.samples import served
from tests.serving.unit.sender import Sender
from tests.tables import parametrize_from_file
from vllm_autoprune.errors import RequestError
from vllm_autoprune.selftest.checks import _count_between
from vllm_autoprune.serving.api.placeholders import Placeholders
from vllm_autoprune.serving.models.grid import GridVision
from vllm_autoprune.serving.models.llava import (
    AutopruneLlavaForConditionalGeneration,
    LlavaVision,
    _JoinedVision,
)
from vllm_autoprune.serving.models.mrope import (
    _compute_input_positions,
    _place_image_tokens,
    position_channels,
)
from vllm_autoprune.serving.models.placed_model import match_items
from vllm_autoprune.serving.models.vision import _describe_geometry, find_entries
from vllm_autoprune.serving.plan import LINE, NO_KEY, Choice, ItemPlan, Part
from vllm_autoprune.tpdsl.tokens import Grid

PLAIN: dict[str, object] = {
    "/base_policy": {"name": "divprune"},
    "/constraints/selector/q_e": 0,
}


class Tower(nn.Module):
    """A vision tower whose states are the pixels themselves, with a [CLS] row before them."""

    vision_model = SimpleNamespace(encoder=SimpleNamespace(layers=[None]))

    def __init__(self) -> None:
        super().__init__()
        self.encoded: list[list[float]] = []

    def forward(self, pixels: Tensor) -> Tensor:
        self.encoded.append(pixels[:, 0, 0, 0].tolist())
        return nn.functional.pad(
            pixels[:, 0].flatten(1)[..., None], (0, 0, 1, 0), value=-1.0
        )


class Vision(LlavaVision):
    """LLaVA's vision side with that tower."""

    sample_weight = torch.zeros(1)

    def __init__(self, cache_bytes: int = 1 << 20) -> None:
        self.clip = Tower()
        sizes = SimpleNamespace(image_size=6, patch_size=1)
        model: Any = SimpleNamespace(
            config=SimpleNamespace(vision_config=sizes),
            vision_tower=self.clip,
            multi_modal_projector=nn.Identity(),
        )
        super().__init__(model, served(PLAIN, cache_bytes=cache_bytes))

    def encode_values(
        self, keys: list[int], *values: float, channels: int = 3
    ) -> list[float]:
        """The first number of each image's features, by key; 0 is none."""
        images = [
            {"pixel_values": torch.full((channels, 6, 6), float(value))}
            for value in values
        ]
        entries = find_entries([(key, key) if key else NO_KEY for key in keys], images)
        features = self.features(entries, images)
        self.keep(entries, features)
        return [image.rows()[0, 0].item() for image in features]


# ---- cached features ----


def test_images_without_a_key_are_encoded_and_not_kept() -> None:
    vision = Vision()
    for _ in range(2):
        assert vision.encode_values([0, 0, 1], 4, 5, 6) == [4, 5, 6]
    assert vision.clip.encoded == [[4, 5, 6], [4, 5]]
    assert (len(vision.cache), vision.cache.hits, vision.cache.misses) == (1, 1, 5)


def test_features_of_another_geometry_are_not_used() -> None:
    """Two images under one key: a plan may be forged, and keys are digests.

    Grids of an image, or of its tiles, are on the CPU wherever the pixels are.
    """
    vision = Vision()
    vision.encode_values([1], 1)
    assert vision.encode_values([1], 2, channels=4) == [2]
    assert vision.encode_values([1], 1) == [1]
    for wide, high in ([[1, 2, 8], [1, 8, 2]], [[[2, 8], [4, 4]], [[8, 2], [4, 4]]]):
        images = [
            {"pixel_values": torch.zeros(16, 4), "grid": torch.tensor(grid)}
            for grid in (wide, high)
        ]
        assert _describe_geometry(images[0]) != _describe_geometry(images[1])
        on_device = [
            {name: part.to("meta") for name, part in image.items()} for image in images
        ]
        assert _describe_geometry(on_device[0]) == _describe_geometry(on_device[1])


def test_cached_rows_do_not_keep_their_batch_alive() -> None:
    pixels = [{"pixel_values": torch.full((3, 6, 6), value)} for value in (1.0, 2.0)]
    for features in Vision().features([1, 2], pixels):
        assert (
            sum(p.untyped_storage().nbytes() for p in features.tensors())
            == features.nbytes
        )


# ---- pruned classes ----


@pytest.mark.compat
def test_new_weights_clear_cached_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reloads weights into a running engine without building the model anew."""
    monkeypatch.setattr(Stock, "load_weights", lambda *_: {"w"})
    model: Any = AutopruneLlavaForConditionalGeneration.__new__(
        AutopruneLlavaForConditionalGeneration
    )
    nn.Module.__init__(model)
    vision = Vision()
    vision.encode_values([1], 1)
    model.__dict__["autoprune"] = vision
    assert model.load_weights([]) == {"w"}
    assert len(vision.cache) == 0


@pytest.mark.compat
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_are_connected_once_weights_are_loaded(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first broadcast of a group takes seconds, and memory that profiling has to see."""
    sent: list[tuple[torch.device, int]] = []
    group = SimpleNamespace(
        world_size=ranks,
        broadcast=lambda tensor, src: sent.append((tensor.device, src)),
    )
    monkeypatch.setattr(vllm.distributed, "get_tp_group", lambda: group)
    monkeypatch.setattr(vllm.distributed, "model_parallel_is_initialized", lambda: True)
    Vision().finish_loading()
    assert sent == [(torch.device("cpu"), 0)] * (ranks - 1)


@pytest.mark.compat
def test_server_without_images_has_no_vision_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--limit-mm-per-prompt '{"image": 0}'` leaves the tower out; text is served as ever."""
    from vllm.model_executor.models.utils import StageMissingLayer

    def stock(self: nn.Module, **_: object) -> None:
        nn.Module.__init__(self)
        self.vision_tower = StageMissingLayer("image_tower", nn.Linear(1, 1))

    monkeypatch.setattr(Stock, "__init__", stock)
    monkeypatch.setattr(Stock, "load_weights", lambda *_: set())
    two_axes = {
        "uses_mrope": True,
        "mrope_num_dims": LINE,
        "multimodal_config": MultiModalConfig(),
    }
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(autoprune=served(), **two_axes)
    )
    model = AutopruneLlavaForConditionalGeneration(vllm_config=config)
    assert model.autoprune is None
    positions, delta = model.get_mrope_input_positions([5, 6, 7], [])
    assert (positions[0].tolist(), len(positions), delta) == ([0, 1, 2], LINE, 0)
    assert model.load_weights([]) == set()
    assert model.autoprune_split([None, None]) == [slice(0, 2)]


@pytest.mark.compat
def test_profiling_compiles_what_its_largest_image_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before it measures memory, and before a request waits for it."""

    class Compiled(Exception):
        """Ends the call, for what is compiled is all that is looked at."""

    def compile_for(tokens: int, device: torch.device) -> None:
        raise Compiled(tokens, device)

    monkeypatch.setattr(
        "vllm_autoprune.serving.models.pruned_model.compile_for", compile_for
    )
    vision = Vision()
    images = [SimpleNamespace(tokens=tokens) for tokens in (9, 36, 4)]
    monkeypatch.setattr(vision, "images", lambda _: images)
    model: Any = SimpleNamespace(
        autoprune=vision, autoprune_reporter=None, autoprune_profiled=0
    )
    plans = [ItemPlan(8, NO_KEY, profile=True)] * 3
    with pytest.raises(Compiled) as caught:
        AutopruneLlavaForConditionalGeneration.autoprune_rows(model, plans, {})
    assert caught.value.args == (36, torch.device("cpu"))


# ---- any-resolution images ----

SIDE = 4
SIZE = 16
WIDTH = 8
TILES = torch.randn(5, SIZE, WIDTH, generator=torch.Generator().manual_seed(5))


class Joined(_JoinedVision):
    """Tiles that are their own features; two rows of two crops, ``cut`` rows less at both ends."""

    def __init__(self, cut: int) -> None:
        sizes = SimpleNamespace(image_size=SIDE, patch_size=1)
        # Every image is cut into a base view and four crops.
        pinpoints = [[2 * SIDE, 2 * SIDE]]
        self.model: Any = SimpleNamespace(
            config=SimpleNamespace(image_grid_pinpoints=pinpoints, vision_config=sizes),
            image_newline=torch.full((WIDTH,), 9.0),
            _parse_and_validate_image_input=lambda **_: None,
        )
        super().__init__(self.model, served(PLAIN))
        self.cut = cut

    def find_attention(self) -> Any:
        raise AssertionError("the state does not read it")

    def encode_tiles(self, pixels: Tensor) -> Any:
        return pixels, {
            "cls_attention": pixels[:, :, 0].exp(),
            "tower_cls": pixels[:, :1],
        }

    def merge(self, model: Any, size: Any, tiles: Tensor, newline: Tensor) -> Tensor:
        """LLaVA-NeXT's order: base view, then the stitched map with a newline a row."""
        stitched = tiles[1:5].reshape(2, 2, SIDE, SIDE, -1).permute(0, 2, 1, 3, 4)
        canvas = stitched.reshape(2 * SIDE, 2 * SIDE, -1)[
            self.cut : 2 * SIDE - self.cut
        ]
        rows = torch.cat([canvas, newline.expand(len(canvas), 1, -1)], dim=1)
        return torch.cat([tiles[0], rows.flatten(0, 1)])


@pytest.mark.parametrize("cut", [0, 1])
def test_joined_tiles_are_the_model_s_rows_and_regions_share_like_tiles(
    cut: int,
) -> None:
    """Without padding base view and crops are equal tiles, else the crops are one region.

    Beside another image, which is encoded before; blank tiles, as of a larger image of the same
    call, count in neither layout nor shares.
    """
    vision = Joined(cut)
    size = torch.tensor([2 * SIDE, 2 * SIDE])
    padded = nn.functional.pad(TILES, (0, 0, 0, 0, 0, 4))
    (image,) = vision.images({"pixel_values": padded[None], "image_sizes": size[None]})
    other = {"pixel_values": torch.zeros(5, SIZE, WIDTH), "image_sizes": size}
    features = vision.encode([other, image.inputs])[1]
    height = 2 * SIDE - 2 * cut
    assert torch.equal(
        features.rows(), vision.merge(None, None, TILES, vision.model.image_newline)
    )
    assert image.tokens == features.tokens == SIZE + height * (2 * SIDE + 1)
    assert (features.candidates, features.gaps) == (image.tokens - height, height)
    expected = [(Grid(SIDE, SIDE), 1), (Grid(height, 2 * SIDE), 4)]
    expected = expected if cut else [(Grid(SIDE, SIDE, 5), 5)]
    assert [(region.grid, region.share) for region in features.regions] == expected
    for region in features.regions:
        assert torch.equal(
            region.signals["cls_attention"], region.projected[:, 0].exp()
        )
    cls = [region.signals["tower_cls"] for region in features.regions]
    if cut:  # crops that form one grid share one [CLS]
        torch.testing.assert_close(torch.cat(cls)[1], TILES[1:, 0].mean(dim=0))
    else:
        assert torch.equal(features.regions[0].projected, TILES.flatten(0, 1)), (
            "tile after tile"
        )
    assert torch.equal(cls[0][0], TILES[0, 0])


# ---- tiles with text between them ----


@pytest.mark.parametrize("kind", ["Idefics3", "SmolVLM"])
def test_a_square_has_most_tokens(kind: str) -> None:
    folder = built(kind.lower())
    sender = Sender(folder, 7, placeholder="<image>")
    assert sender._processor._placeholders.count_largest(sender.info).tokens == 9 * 5


IMAGE = 7
OTHER = 1
PLACEHOLDERS = Placeholders(Mock(), Mock(), Mock())


@pytest.mark.parametrize("embeds_text", [False, True])
@pytest.mark.parametrize(
    ("budget", "runs"),
    [(5, [2, 2, 1]), (1, [1, 0, 0]), (9, [3, 3, 3]), (10, [3, 3, 3])],
)
@pytest.mark.parametrize("profile", [False, True])
def test_each_tile_keeps_its_share(
    budget: int, runs: list[int], embeds_text: bool, profile: bool
) -> None:
    """What is kept whole is stock's; profiling needs room for the text that the worker embeds."""
    tiles = [OTHER, *[IMAGE] * 3, OTHER, *[IMAGE] * 3, OTHER, *[IMAGE] * 3, OTHER]
    content = PromptUpdateDetails.select_token_id(tiles, IMAGE)
    placeholders = replace(PLACEHOLDERS, embeds_text=embeds_text)
    plan = ItemPlan(budget, NO_KEY, profile=profile)
    shortened, planned = placeholders.lay_out(content, plan)
    assert _count_between(shortened.full, IMAGE)[1:-1] == (
        [3, 3, 3] if profile else runs
    )
    unpruned = profile or budget >= 9
    with_text = embeds_text and not (unpruned and not profile)
    assert (shortened is content) == (unpruned and not with_text)
    assert (shortened.is_embed is None) == with_text
    text = ((0, OTHER), (3, OTHER), (6, OTHER), (9, OTHER)) if with_text else ()
    assert planned == replace(plan, text=text)


def test_an_image_with_more_text_than_a_plan_may_carry_is_refused() -> None:
    content = PromptUpdateDetails.select_token_id([IMAGE, OTHER] * 16_385, IMAGE)
    with pytest.raises(RequestError, match="16385 tokens of text"):
        replace(PLACEHOLDERS, embeds_text=True).lay_out(content, ItemPlan(1, NO_KEY))


# ---- M-RoPE: positions of kept tokens are checked on an engine (``positions_are_a_gather``) ----


@parametrize_from_file("parts", "places")
def test_deltas_and_recalls_stand_where_their_image_does(
    parts: list[tuple[Part, int]], places: dict[int, int]
) -> None:

    def plans_of(items: Sequence[tuple[Part, int]]) -> dict[int, ItemPlan]:
        """Plans of parts of images, by the number of their item."""
        return {
            i: ItemPlan(
                2,
                (key, key),
                part=part,
                core=2 if part in ("core", "delta") else 0,
                earlier=(Choice(4),) if part == "recall" else (),
            )
            for i, (part, key) in enumerate(items)
        }

    assert match_items(plans_of(parts)) == places


@pytest.mark.compat
@pytest.mark.parametrize("stock", [Omni, Omni3])
def test_audio_and_videos_stand_where_they_do_behind_the_whole_image(
    stock: Any,
) -> None:
    """Also the audio of a video, whose item lies over that of the video."""
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=25)
    model = stock.__new__(stock)
    numbers = {"seconds_per_chunk": 2, "position_id_per_seconds": 25}
    vars(model)["config"] = SimpleNamespace(vision_config=vision, **numbers)
    image = torch.tensor([1, 4, 6])
    grid = torch.tensor([2, 4, 4])
    sound = torch.tensor(100)
    video = {"video_grid_thw": grid, "use_audio_in_video": torch.tensor(True)}
    heard = model._compute_audio_token_count(100)

    def lay_out(tokens: int) -> tuple[int, list[MultiModalFeatureSpec]]:
        """Length of a prompt, and its items: an image, a video with its audio."""
        items: Any = [
            ("image", 3, tokens, {"image_grid_thw": image}),
            ("video", tokens + 6, 8 + heard + 2, video),
            ("audio", tokens + 6, 8 + heard + 2, {"audio_feature_lengths": sound}),
        ]
        features = [
            MultiModalFeatureSpec(
                {field: SimpleNamespace(data=value) for field, value in data.items()},
                modality,
                modality,
                PlaceholderRange(offset, length),
            )
            for modality, offset, length, data in items
        ]
        return tokens + 6 + 8 + heard + 2 + 4, features

    length, features = lay_out(6)
    stock, delta = model.get_mrope_input_positions([OTHER] * length, features)
    shorter, features = lay_out(2)
    call: Any = (
        model.get_mrope_input_positions,
        [OTHER] * shorter,
        features,
        {0: [OTHER] * 6},
        {},
    )
    positions, pruned_delta = _compute_input_positions(*call)
    assert torch.equal(positions[:, :3], stock[:, :3])
    assert torch.equal(positions[:, 5:], stock[:, 9:])
    assert pruned_delta == delta + 4


@pytest.mark.parametrize("video", [0, 2])
def test_tokens_without_a_row_of_an_image_stay_where_they_are(video: int) -> None:
    """Image tokens in user text, which come after all kept ones; frames of GLM's videos before."""
    ids = torch.tensor([5, IMAGE, IMAGE, 6, IMAGE, IMAGE, 6])
    positions = torch.arange(7).expand(3, -1)
    frames = torch.full((video, 6), -1.0)
    rows = position_channels(4, 4, torch.device("cpu"))[[2, 13]].bfloat16()
    placed = _place_image_tokens(ids, positions, [frames, rows], [IMAGE], 0).T.tolist()
    start = 4 if video else 1
    moved = [[start, start, start + 2], [start + 1, start + 1 + 3, start + 1 + 1]]
    expected = [[position] * 3 for position in range(7)]
    expected[start : start + 2] = moved
    assert placed == expected


# ---- videos of one grid ----


def test_each_frame_of_a_video_is_a_sequence_of_the_tower() -> None:
    lengths: list[int] = []

    def receive(counts: list[int]) -> list[Tensor]:
        lengths.extend(counts)
        return [torch.arange(float(count)) for count in counts]

    vision: Any = GridVision.__new__(GridVision)
    vision._width = WIDTH
    vision.merger = {}
    vision.attention = SimpleNamespace(
        recording=nullcontext, take=lambda: SimpleNamespace(received=receive)
    )
    vision._model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)),
        _parse_and_validate_video_input=lambda **fields: fields,
        _process_video_input=lambda fields: torch.zeros(8, WIDTH).split([4, 4]),
    )
    pixels = torch.zeros(32, 3)
    grids = torch.tensor([[2, 2, 4], [1, 4, 4]])
    videos = vision.images({"pixel_values_videos": pixels, "video_grid_thw": grids})
    features = vision.encode([video.inputs for video in videos])
    assert lengths == [8, 8, 16]
    assert [video.tokens for video in videos] == [4, 4]
    (two_frames, _) = (item.regions[0] for item in features)
    assert (two_frames.grid.tiles, two_frames.grid.video) == (2, True)
    assert two_frames.signals["cls_attention"].tolist() == [1.5, 5.5, 1.5, 5.5]
