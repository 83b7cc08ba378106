"""Videos before an engine: K of all frames, identities, what is sent, what is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from tests.serving.engine import built
from tests.serving.unit.configurations import places, vllm_config
from tests.serving.unit.samples import served
from tests.serving.unit.samples import video_state as state
from tests.serving.unit.sender import Sender, picture
from tests.tables import parametrize_from_file
from vllm_autoprune import RequestError, load_state
from vllm_autoprune.selftest.questions import video
from vllm_autoprune.serving.api.budgets import RequestBudgets
from vllm_autoprune.serving.api.placeholders import TokenCount
from vllm_autoprune.serving.api.request import PruningRequest
from vllm_autoprune.serving.inputs import VIDEO_TILES, check_inputs
from vllm_autoprune.serving.models import BACKBONES
from vllm_autoprune.serving.models.mrope import (
    _compute_input_positions,
    _place_image_tokens,
    position_channels,
    set_times,
)
from vllm_autoprune.serving.plan import NO_KEY, ItemPlan
from vllm_autoprune.serving.plan_rules import PlanRules
from vllm_autoprune.serving.request_rules import RequestRules
from vllm_autoprune.serving.served_state import Capabilities
from vllm_autoprune.serving.settings import VIDEO_BUDGET_FLAG
from vllm_autoprune.serving.state_codec import encode_state
from vllm_autoprune.serving.worker.features import ImageFeatures, Region
from vllm_autoprune.serving.worker.rows import KeptRows, insert_text
from vllm_autoprune.serving.worker.selection import FallbackReporter, PlanReader
from vllm_autoprune.tpdsl.tokens import Grid

pytestmark = pytest.mark.compat

FRAMES = 8
PER_FRAME = 6
GROUPS = FRAMES // 2
"""Temporal groups T of a video, which the tower makes of two frames each."""
TOKENS = GROUPS * PER_FRAME

VIDEO = video(FRAMES)
OTHER = video(FRAMES, 1)
SHORT = video(FRAMES - 2)
VIDEOS = Capabilities(prunes_videos=True)


@pytest.fixture(scope="module")
def tiny() -> Path:
    return built("qwen2_5_vl")


@pytest.fixture(params=[True, False], ids=["cache", "no cache"])
def sender(request: pytest.FixtureRequest, tiny: Path) -> Sender:
    rules = RequestRules("shipped-states")
    server = Sender(tiny, budget=8, rules=rules, **state("echoprune"))
    return server.with_cache() if request.param else server


def alone(sender: Sender, video: Any, uuid: str | None = None, **entry: Any) -> Any:
    """Identity, number of tokens and digest of the tensors of one video."""
    names = None if uuid is None else [uuid]
    sent = sender.send([video], names, modality="video", **entry)
    return sent.identities[0], sent.lengths[0], sent.data[0]


def test_k_is_of_all_frames_and_a_video_is_sent_once(sender: Sender) -> None:
    for requested, kept_tokens in (
        (None, 2 * GROUPS),
        ("tokens_per_frame:3", 3 * GROUPS),
        ("1/4", TOKENS // 4),
        (5, 5),
        (10**4, TOKENS),
        ("100%", TOKENS),
    ):
        sent = sender.send([VIDEO, OTHER], modality="video", video_budget=requested)
        assert (
            sent.lengths
            == [kept_tokens, kept_tokens]
            == [plan.budget for plan in sent.plans]
        )
        assert [(plan.frames, plan.tokens) for plan in sent.plans] == [
            (GROUPS, TOKENS)
        ] * 2
        assert sent.sent == [sender.cache is None or requested is None] * 2


def test_all_images_and_videos_of_a_request_have_a_bound(tiny: Path) -> None:
    """Of which an image has as much as a video, and a video what the image leaves."""
    rules = RequestRules("budget", total=14)
    sender = Sender(tiny, budget=8, rules=rules, **state("vcast"))
    send = partial(sender.send, modality="video")
    assert send([VIDEO]).lengths == [2 * GROUPS] and send([VIDEO] * 3).lengths == [
        5,
        5,
        4,
    ]
    assert send([VIDEO], beside=[picture(168, 112)]).lengths == [7]
    assert send([VIDEO] * 2, beside=[picture(56, 56)]).lengths == [5, 5], (
        "the image has 4"
    )
    assert alone(sender, VIDEO, video_budget=14)[1] == 14
    for requested in ({"video_budget": "tokens_per_frame:4"}, {"enabled": False}):
        with pytest.raises(RequestError, match="a request has 14 for them"):
            send([VIDEO], **requested)


def test_the_range_of_requests_is_of_each_temporal_group(tiny: Path) -> None:
    """Of which this video has 6 tokens each; MIN does not bound a video that stays whole."""

    def count(minimum: int, maximum: int, **entry: Any) -> Any:
        rules = RequestRules("budget", minimum, maximum)
        sender = Sender(tiny, budget=8, rules=rules, **state("vcast"))
        return alone(sender, VIDEO, **entry)[1]

    assert count(7, 64, enabled=False) == TOKENS
    with pytest.raises(RequestError, match="1 to 5 of each"):
        count(1, 5, enabled=False)
    assert count(2, 5, video_budget=5 * GROUPS) == 5 * GROUPS
    for budget in (GROUPS, 5 * GROUPS + 1):
        with pytest.raises(RequestError, match="2 to 5 of each"):
            count(2, 5, video_budget=budget)


def test_a_row_behind_the_last_frame_counts_as_a_token() -> None:
    """LLaVA-OneVision's newline, which is kept where all tokens are, and only if K has room."""
    folder = built("llava_onevision")
    frames = 8
    tokens = 4 * 8

    def keep(requested: Any, total: int | None = None) -> int:
        """K of a video, as the engine's checks have it too."""
        rules = RequestRules("budget", total=total)
        sender = Sender(folder, budget=8, rules=rules, **state("vcast"))
        (kept_tokens,) = sender.send(
            [video(frames)], modality="video", video_budget=requested
        ).lengths
        return kept_tokens

    assert keep("100%") == keep("tokens_per_frame:4") == keep(tokens + 1) == tokens + 1
    assert keep(tokens) == keep(f"100%:1-{tokens}") == tokens
    assert [keep(tokens, total) for total in (tokens, tokens + 1)] == [tokens] * 2
    every = state("vcast", tokens={"atom": "per_frame_budget", "k": 4})
    server = Sender(folder, 8, RequestRules("budget", total=2 * tokens), **every)
    assert (
        server.send([video(frames), video(frames, 1)], modality="video").lengths
        == [tokens] * 2
    )


def test_identities_hold_all_that_chooses_tokens_and_nothing_else(
    sender: Sender,
) -> None:
    requests: list[tuple[Any, dict[str, Any]]] = [
        (VIDEO, {}),
        (OTHER, {}),
        (SHORT, {}),
        (VIDEO, {"video_budget": 5}),
        (VIDEO, {"video_budget": "100%"}),
        (VIDEO, {"keep": "random"}),
        (VIDEO, {"keep": "resized"}),
        (VIDEO, {"video_instructions": ["cat"]}),
        (VIDEO, {"salt": "tenant"}),
        (VIDEO, {"state": "vcast", "video_budget": 8}),
    ]
    identities, again = (
        [alone(sender, c, **e)[0] for c, e in requests] for _ in range(2)
    )
    assert identities == again
    assert len({*identities}) == len(identities)
    alike: list[dict[str, Any]] = [
        {"video_budget": 2 * GROUPS},
        {"video_budget": "1/3"},
        {"budget": 3},
    ]
    assert {alone(sender, VIDEO, **entry)[0] for entry in alike} == {identities[0]}
    unread: dict[str, Any] = {"state": "vcast", "video_budget": 8}
    for text in ("cat", "dog"):
        assert (
            alone(sender, VIDEO, video_instructions=[text], **unread)[0]
            == identities[-1]
        )


def test_a_name_is_no_identity_and_finds_its_video_again(tiny: Path) -> None:
    """Of the same tenant."""
    sender = Sender(tiny, budget=8, **state("vcast")).with_cache()
    named, renamed = (alone(sender, video, "x") for video in (VIDEO, OTHER))
    assert named[0] != renamed[0]
    assert alone(sender, None, "x")[:2] == renamed[:2]
    with pytest.raises(ValueError, match="data is not provided"):
        alone(sender, None, "x", salt="other")
    assert alone(sender, VIDEO, "y") == (*named[:2], None)


def test_a_random_draw_depends_on_the_pixels_of_a_video_alone(tiny: Path) -> None:
    """Not on its name or salt, nor on the server or the model."""
    servers = [
        Sender(tiny, budget=8, **state("vcast")).with_cache(),
        Sender(tiny, budget=4, **state("evs")),
        Sender(built("qwen2_vl"), budget=8, **state("vcast")),
    ]
    settings: list[dict[str, Any]] = [
        {},
        {"uuids": ["x"]},
        {"salt": "a"},
        {"video_budget": 5},
    ]

    def draw(server: Sender, video: Any, **requested: Any) -> int:
        (plan,) = server.send(
            [video], modality="video", keep="random", **requested
        ).plans
        return plan.key[0]

    seeds = {
        draw(server, VIDEO, **requested) for server in servers for requested in settings
    }
    assert len(seeds) == 1 and draw(servers[0], OTHER) not in seeds
    with pytest.raises(
        RequestError, match="drawn from pixels, and this video comes by its name"
    ):
        draw(servers[0], None, uuids=["x"])
    draw(servers[0], None, uuids=["x"], video_budget="100%")  # where nothing is drawn


@pytest.mark.parametrize("kind", ["lru", "shm", "several"])
def test_a_video_has_its_plan_under_every_cache_of_processed_items(
    tiny: Path, kind: str
) -> None:
    """Also one that is cached, or named, whose tensors most caches do not give again."""
    uncached = Sender(tiny, budget=8, **state("vcast")).send(
        [VIDEO, SHORT], modality="video"
    )
    sender = Sender(tiny, budget=8, **state("vcast")).with_cache(kind)
    try:
        for videos in ([VIDEO, SHORT], [VIDEO, SHORT], [None, None]):
            sent = sender.send(videos, ["x", "y"], modality="video")
            assert replace(sent, data=uncached.data) == uncached
    finally:
        sender.cache.close()


def test_what_cannot_be_is_refused(tiny: Path) -> None:
    other_model = Sender(built("glm_ocr"), budget=8, **state("vcast"))
    images_only = Sender(tiny, budget=8)
    videos = Sender(tiny, budget=8, **state("vcast"))
    for sender, budget, problem in (
        (other_model, 5, "this model's are served whole"),
        (images_only, 5, "leaves videos whole"),
        (videos, 0, "is not a budget"),
        (videos, "tokens_per_frame:0", "is not a budget"),
        (videos, [5], "is not a budget"),
    ):
        with pytest.raises(RequestError, match=problem):
            sender.send([VIDEO], modality="video", video_budget=budget)
    settings = {"state": "vcast", "video_budget": "1/4"}
    assert places(settings) == [VIDEO_BUDGET_FLAG]
    assert places({**settings, "state": "divprune"}) == [f"{VIDEO_BUDGET_FLAG}#/frames"]
    config = vllm_config(architecture="Qwen2VLForConditionalGeneration")
    vars(config.model_config.multimodal_config)["video_pruning_rate"] = 0.5
    assert places({"state": "vcast"}, config) == ["--video-pruning-rate"]


@pytest.mark.parametrize("architecture", BACKBONES)
def test_models_whose_videos_are_pruned_say_so(architecture: str) -> None:
    """Where start-up looks, and where the processor does."""
    module, _, name = BACKBONES[architecture].model.partition(":")
    placeholders = vars(import_module(module))[name].autoprune_placeholders
    assert (placeholders.video_token is not None) == BACKBONES[architecture].videos
    assert placeholders.measure is not None or not BACKBONES[architecture].videos


FRAMES_OF_FOUR = torch.zeros(4, 3, 2, 2)


@pytest.mark.parametrize(
    ("fields", "frame", "tokens"),
    [
        (
            {
                "video_grid_thw": torch.tensor([4, 4, 6]),
                "pixel_values_videos": torch.ones(96, 2),
            },
            None,
            24,
        ),
        ({"pixel_values_videos": FRAMES_OF_FOUR}, (6, 1), 25),
        (
            {"pixel_values_flat_video": FRAMES_OF_FOUR, VIDEO_TILES: torch.tensor(4)},
            (6, 0),
            24,
        ),
    ],
    ids=["grid", "pooled", "tiles"],
)
def test_a_plan_of_another_video_is_refused(
    fields: dict[str, Any], frame: tuple[int, int] | None, tokens: int
) -> None:
    good = ItemPlan(8, NO_KEY, tokens=tokens, frames=4)
    check_inputs(ItemPlan.decode(good.encode()), "video", fields, frame)
    forgeries = [
        (replace(good, frames=0), "video", fields, "T = 0"),
        (replace(good, frames=5), "video", fields, "T = 5"),
        (replace(good, tokens=tokens + 1), "video", fields, f"N = {tokens + 1}"),
        (good, "image", fields, "is of 'image' with the pixels"),
        (good, "video", {}, "pixels of nothing"),
        (
            good,
            "video",
            {"pixel_values": torch.ones(96, 2)},
            "is of 'video' with the pixels",
        ),
    ]
    if VIDEO_TILES in fields:
        forgeries.append(
            (good, "video", {**fields, VIDEO_TILES: torch.tensor(3)}, VIDEO_TILES)
        )
    for plan, modality, item, problem in forgeries:
        with pytest.raises(RequestError, match=problem):
            check_inputs(plan, modality, item, frame)


def test_tokens_of_a_video_are_placed_once_however_often_they_are() -> None:
    """As when a request is preempted; also those as late as they are low and far to the right."""
    token = 9
    width = 3
    base = 100
    times = [0, 2, 4, 6]
    rows = position_channels(4, 3, torch.device("cpu"), [0, 2, 4, 6])
    ids = torch.tensor([5, *[token] * len(rows), 6])
    positions = torch.full((3, len(ids)), base)
    positions[2, 1:-1] += width
    offsets = torch.cartesian_prod(
        *(torch.tensor(axis) for axis in (times, [*range(4)], [0, 1, 2]))
    )
    for _ in range(2):
        positions = _place_image_tokens(
            ids, positions, [rows.bfloat16()], [8, token], 0
        )
        assert torch.equal(positions[:, 1:-1].T - base, offsets)
    half = _place_image_tokens(ids, positions, [rows[20:].bfloat16()], [8, token], 21)
    assert torch.equal(half, positions)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Glm4vProcessor
@pytest.mark.parametrize("backbone", ["qwen3_vl", "glm4v"])
def test_frames_and_their_times_stand_where_they_do_in_the_whole_video(
    backbone: str,
) -> None:
    """The worker embeds the text of a pruned video, all of whose tokens are placeholders."""
    sender = Sender(built(backbone), budget=8, **state("vcast"))
    stock_video, few = (
        sender.send([VIDEO], modality="video", video_budget=k) for k in ("100%", 9)
    )
    (plan,) = few.plans
    kept_tokens = torch.tensor([0, 5, 6, 7, 14, 18, 20, 21, 23])
    count = 9 + len(plan.text)
    row = next(r for r in BACKBONES.values() if r.name == backbone)
    alike = zip(stock_video.prompt, few.prompt, strict=False)
    start = next(index for index, (old, after) in enumerate(alike) if old != after)
    token = few.prompt[start]
    assert few.prompt[start : start + count] == [token] * count
    unpruned = plan.write_text([token] * TOKENS)
    length = len(unpruned)
    assert (
        stock_video.prompt[start : start + length] == unpruned
        and not stock_video.plans[0].text
    )
    assert few.lengths == [count] and stock_video.lengths == [TOKENS]

    module, _, name = row.model.partition(":")
    model: Any = vars(import_module(module))[name].__mro__[4]
    model = model.__new__(model)
    vars(model)["config"] = sender.info.get_hf_config()

    def feature(length: int, is_embed: Any) -> list[MultiModalFeatureSpec]:
        grid: Any = SimpleNamespace(data=torch.tensor([GROUPS, 6, 4]))
        placeholder = PlaceholderRange(start, length, is_embed)
        return [
            MultiModalFeatureSpec({"video_grid_thw": grid}, "video", "", placeholder)
        ]

    is_token = torch.tensor(unpruned) == token
    stock, delta = model.get_mrope_input_positions(
        stock_video.prompt, feature(length, is_token)
    )
    compute_positions = model.get_mrope_input_positions
    videos = feature(count, None)
    positions, pruned_delta = _compute_input_positions(
        compute_positions, few.prompt, videos, {0: unpruned}, {}, {0: 2}
    )
    channels = position_channels(3, 2, torch.device("cpu"), [0] * GROUPS)
    features = ImageFeatures(
        (Region(Grid(3, 2, tiles=GROUPS, video=True), channels, {}),)
    )
    item = KeptRows(channels[kept_tokens].bfloat16(), kept_tokens, kept_tokens)
    (with_text,) = insert_text(
        [item], [plan], [features], lambda ids: ids[:, None].float(), set_times
    )
    rows = with_text.rows
    in_clip = plan.write_text([-1 - index for index in range(TOKENS)])
    is_kept = [index >= 0 or -1 - index in kept_tokens for index in in_clip]
    behind = start + length
    expected = [
        *range(start),
        *(start + index for index in range(length) if is_kept[index]),
    ]
    expected += range(behind, len(stock_video.prompt))
    for _ in range(2):
        ids = torch.tensor(few.prompt)
        positions = _place_image_tokens(
            ids, positions, [rows[:, -6:]], [token], 0, moves_all=True
        )
        assert torch.equal(positions, stock[:, expected])
    assert pruned_delta - delta == length - count


@parametrize_from_file("fields", "level", "frames", "problem")
def test_plans_from_elsewhere_are_held_to_the_rules(
    fields: dict[str, Any], level: Any, frames: bool, problem: str
) -> None:
    """MAX bounds the tokens of a group, and the server's own budget those of the video."""
    changes = {f"/{name}": value for name, value in state("vcast").items() if frames}
    server = replace(
        served(changes), rules=RequestRules(level, 1, 3), capabilities=VIDEOS
    )
    rules = PlanRules(server, 100)
    plan = ItemPlan(8, NO_KEY, tokens=24, frames=4)
    if frames:
        rules.check(plan, 8)
    plan = replace(plan, **fields)
    with pytest.raises(RequestError, match=problem):
        rules.check(plan, plan.budget)
    reporter = FallbackReporter()
    reader = PlanReader(rules, reporter, torch.device("cpu"), 100)
    assert reader.read([plan.encode()])[0].budget == plan.budget


@parametrize_from_file("sizes", "refused")
def test_a_state_of_a_request_is_priced_at_the_size_of_its_videos(
    tiny: Path, sizes: list[tuple[int, int]], refused: bool
) -> None:
    """Scope has no score, so that it picks nearly all tokens of every frame."""
    frames = {"tokens": {"atom": "per_frame_budget", "k": 2}}
    dear = load_state(
        json.dumps({**json.loads(load_state("scope").dumps()), "frames": frames})
    )
    sender = Sender(tiny, budget=8, rules=RequestRules("states"), **state("vcast"))
    server = sender._processor._planner.served
    budgets = RequestBudgets(server, PruningRequest(), dear)
    with pytest.raises(RequestError, match="are allowed") if refused else nullcontext():
        budgets.plan_videos([TokenCount(n, frames=t) for n, t in sizes], None)


def test_a_plan_with_a_state_is_held_to_the_price_of_its_video() -> None:
    """As plans that a client sends may carry one."""
    frames = {"tokens": {"atom": "per_frame_budget", "k": 2}}
    dear = load_state(
        json.dumps({**json.loads(load_state("cdpruner").dumps()), "frames": frames})
    )
    server = replace(served(), rules=RequestRules("states"), capabilities=VIDEOS)
    plan = ItemPlan(8, NO_KEY, state=encode_state(dear), tokens=4096, frames=16)
    PlanRules(server, 100).check_choice(plan)
    with pytest.raises(RequestError, match="predicted to take"):
        PlanRules(server, 100).check_choice(replace(plan, frames=1))
    PlanRules(server, 100).check_choice(replace(plan, frames=1, keep="random"))
