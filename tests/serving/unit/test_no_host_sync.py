"""Nothing that a worker does for a selection waits for a GPU, or mixes its tensors with the host's.

Left out is one place that waits by design: the positions under Model Runner V1, which keeps them on
the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.serving.engine import CLIP
from tests.serving.unit.samples import served
from tests.serving.unit.signal_models import (
    START,
    VISION_WIDTH,
    Attention,
    served_model,
)
from tests.stand_in_device import DEVICE, WaitsForDevice, forbid_waiting
from vllm_autoprune import Grid, load_state
from vllm_autoprune.serving.models.cut_tower import Cut, CutTower
from vllm_autoprune.serving.models.mrope import position_channels
from vllm_autoprune.serving.plan import Choice, ItemPlan
from vllm_autoprune.serving.state_codec import encode_state
from vllm_autoprune.serving.worker.batch import (
    ModelParts,
    SelectionContext,
    prune_images,
)
from vllm_autoprune.serving.worker.features import (
    ImageFeatures,
    IndexCache,
    Region,
    Signals,
)
from vllm_autoprune.serving.worker.question import (
    ClipTower,
    InputEmbeddings,
    LlamaPrefix,
)
from vllm_autoprune.serving.worker.selection import FallbackReporter
from vllm_autoprune.serving.worker.tower_hooks import QueriesAndKeys
from vllm_autoprune.text_tower import read_text_tower
from vllm_autoprune.tpdsl.base_policy import BASE_POLICIES, ReferenceSelection

WIDTH = 24
TOWER_WIDTH = 20
ONE = Grid(6, 6)
TILES = Grid(3, 3, tiles=4)


@contextmanager
def worker_step() -> Iterator[None]:
    """As a worker runs a step, but on the stand-in for a GPU."""
    with torch.inference_mode(), forbid_waiting():
        yield


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=DEVICE)


def region(grid: Grid, order: bool = False, share: int = 1) -> Region:
    """A region with everything that any policy reads."""
    count = grid.tokens
    signals: Signals = {
        "cls_attention": empty(count, dtype=torch.float32),
        "encoder": empty(count, TOWER_WIDTH),
        "tower_cls": empty(grid.tiles, TOWER_WIDTH),
        "tower_keys": empty(count, 8),
        "next_attention": empty(count, dtype=torch.float32),
        "next_keys": empty(count, TOWER_WIDTH),
    }
    return Region(
        grid,
        empty(count, WIDTH),
        signals,
        extra_channels=empty(count, 4),
        order=torch.arange(count, device=DEVICE) if order else None,
        share=share,
    )


def whole_image(grid: Grid = ONE) -> ImageFeatures:
    return ImageFeatures((region(grid),))


def image_of_two_regions() -> ImageFeatures:
    """A base view and cropped tiles with newlines between their rows, as LLaVA-NeXT's."""
    regions = (region(ONE, order=True), region(Grid(4, 5), order=True, share=2))
    return ImageFeatures(regions, filler=empty(WIDTH + 4), gaps=4)


@pytest.fixture(scope="module")
def parts(llama: Any) -> ModelParts:
    """Parts of a model whose language model is a small Llama on the device."""
    layers = served_model(llama.to(DEVICE))
    embedding = llama.embed_tokens
    projector = empty(TOWER_WIDTH, WIDTH)
    return ModelParts(
        lambda rows: rows @ projector,
        embedding,
        InputEmbeddings(embedding, DEVICE),
        partial(LlamaPrefix, layers, (START,)),
    )


def count_rows(
    parts: ModelParts,
    base: str,
    plans: list[ItemPlan],
    image: ImageFeatures,
    **core: object,
) -> list[int]:
    """The number of rows of each image; fails where a policy raised and something else was kept."""
    state = served(
        {"/base_policy": {"name": base}, **({"/core": core} if core else {})}
    )
    reporter = FallbackReporter()
    context = SelectionContext(state, parts, reporter, indices=IndexCache())
    with worker_step():
        rows = prune_images(context, plans, [image] * len(plans))
    assert reporter.errors == {} and all(part.is_meta for part in rows)
    return [len(part) for part in rows]


def asked(
    budget: int, key: int, ids: tuple[int, ...] = (7, 8), **fields: Any
) -> ItemPlan:
    return ItemPlan(budget, (key, key), ids, language=ids, **fields)


@pytest.mark.parametrize(
    ("base", "image"),
    [(base, whole_image) for base in BASE_POLICIES]
    + [(base, image_of_two_regions) for base in ("cdpruner", "visionzip", "fastv")],
)
def test_batches_of_mixed_plans(
    base: str, image: Callable[[], ImageFeatures], parts: ModelParts
) -> None:
    """Of every kind: budgets, controls, an image that keeps all, a recall."""
    total = image().tokens
    plans = [
        asked(9, 0),
        asked(9, 1, ids=(5,)),
        asked(5, 2, ids=()),
        asked(9, 3, keep="reference"),
        asked(9, 4, keep="random"),
        asked(9, 5, keep="resized"),
        replace(asked(4, 6, part="recall"), earlier=(Choice(9, (7,), (7,)),)),
        asked(total, 8),
        asked(9, 9, profile=True),
    ]
    assert count_rows(parts, base, plans, image()) == [
        9,
        9,
        5,
        9,
        9,
        9,
        4,
        total,
        total,
    ]


@pytest.mark.parametrize("base", ["autoprune", "cdpruner", "divprune", "norm"])
def test_tokens_whose_places_only_the_device_knows(
    base: str, parts: ModelParts
) -> None:
    grid = Grid(6, 6, remaining=20)
    places = torch.arange(20, device=DEVICE)
    image = ImageFeatures((replace(region(grid), places=places),))
    state = load_state(base) if base == "autoprune" else None
    plan = asked(9, 1, state=b"" if state is None else encode_state(state))
    name = "divprune" if base == "autoprune" else base
    assert count_rows(parts, name, [plan, asked(5, 2)], image) == [9, 5]


def test_cells_leave_a_tower() -> None:
    """A whole image beside two that lose cells, in different layers; two deepstack levels."""

    class Block(nn.Module):
        def forward(self, hidden: Tensor, **metadata: Tensor) -> Tensor:
            sizes = {len(part) for name, part in metadata.items() if "rotary" in name}
            assert sizes == {len(hidden)}
            return hidden

    class Merge(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.reshape(-1, 4 * WIDTH)

    levels = [Merge(), Merge()]
    tower = SimpleNamespace(
        spatial_merge_size=2,
        blocks=[Block() for _ in range(4)],
        merger=Merge(),
        deepstack_merger_list=levels,
    )
    rotary = empty(400, 8)
    edges = empty(4, dtype=torch.int32)

    def encode() -> Tensor:
        hidden = empty(400, 1, WIDTH)
        joined = []
        for layer, block in enumerate(tower.blocks):
            hidden = block(
                hidden,
                cu_seqlens=edges,
                rotary_pos_emb_cos=rotary,
                rotary_pos_emb_sin=rotary,
            )
            joined += [levels[layer](hidden)] if layer < 2 else []
        return torch.cat([tower.merger(hidden), *joined], dim=1)

    cuts = [Cut(30, 1, 0), None, Cut(10, 3, 0)]
    cut = CutTower(tower, [40, 30, 30], cuts, lambda lengths: {"cu_seqlens": edges})
    with worker_step():
        rows = cut.run(encode)
    assert rows.shape == (70, 3 * 4 * WIDTH) and cut.counts == [30, 30, 10]
    assert cut.cells is not None and cut.cells.shape == (70,)
    assert not any("forward" in vars(module) for module in (*tower.blocks, *levels))


@pytest.mark.parametrize("base", BASE_POLICIES)
def test_core_and_delta(base: str, parts: ModelParts) -> None:
    core = asked(8, 1, ids=(), part="core", core=8)
    delta = asked(4, 1, part="delta", core=8)
    items = [core, delta, replace(delta, instruction=(5,))]
    image = whole_image(TILES)
    assert count_rows(parts, base, items, image, share=0.5) == [8, 4, 4]
    assert count_rows(parts, base, items[2:], image, share=0.5) == [4]


def test_fallbacks_are_counted(
    parts: ModelParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object) -> ReferenceSelection:
        raise ValueError("no selection")

    monkeypatch.setitem(
        BASE_POLICIES, "cdpruner", replace(BASE_POLICIES["cdpruner"], function=failing)
    )
    reporter = FallbackReporter()
    context = SelectionContext(served(), parts, reporter)
    with worker_step():
        for _ in range(2):
            (rows,) = prune_images(context, [asked(12, 0)], [whole_image()])
            assert rows.shape == (12, WIDTH + 4)
        reporter.report_refused_plan(ValueError("not a plan"), DEVICE)
    assert reporter.errors["ValueError"] > 1
    assert len(reporter.counts()) == 16  # zeros: nothing is copied from this device


def test_instructions_in_the_space_of_clip() -> None:
    tower = ClipTower(read_text_tower(str(CLIP)), DEVICE)
    with worker_step():
        text, used = tower.instructions([(476, 5, 477), tuple(range(60)), ()])
        assert text.is_meta and used.is_meta
        assert tower.patches(empty(2, 9, VISION_WIDTH)).is_meta


def test_attention_of_towers_with_and_without_cls() -> None:
    module = Attention()
    hook = QueriesAndKeys.hook(module)
    for rows, counts in ((empty(2, 10, 8), None), (empty(1, 600, 2, 4), [590, 10])):
        with worker_step():
            with hook.recording():
                module(rows, rows, rows)
            taken = hook.take()
            assert [len(part) for part in taken.received(counts)] == (
                counts or [10, 10]
            )
            assert taken.cls_attention().shape == (len(rows), rows.shape[1] - 1)
            assert taken.mean_keys().shape == (len(rows), rows.shape[1] - 1, 4)


@pytest.mark.compat
@pytest.mark.parametrize("share_token", [False, True], ids=["Qwen", "GLM"])
def test_positions_of_kept_tokens(share_token: bool) -> None:
    """As Model Runner V2 asks for them: token ids and positions lie on the device."""
    from vllm_autoprune.serving.models.grid import GridVision
    from vllm_autoprune.serving.models.mrope import PrunedMRope

    vision: Any = GridVision.__new__(GridVision)
    vision._width = WIDTH
    vision.videos_share_token = share_token
    config = SimpleNamespace(image_token_id=9)
    model: Any = PrunedMRope.__new__(PrunedMRope)
    vars(model).update(
        autoprune=vision, config=config, autoprune_table=8192, autoprune_axes=3
    )
    ids = empty(40, dtype=torch.int64)
    positions = empty(3, 40, dtype=torch.int64)
    with worker_step():
        places = position_channels(4, 3, DEVICE).to(torch.bfloat16)
        rows = torch.cat([empty(12, WIDTH), places], dim=1)
        video = empty(6, WIDTH)
        embeddings, placed, delta = model.recompute_mrope_positions(
            ids, [rows[:5], video, rows[:7]], positions, 4
        )
    assert [part.shape for part in embeddings] == [(5, WIDTH), (6, WIDTH), (7, WIDTH)]
    assert placed.shape == (3, 40) and placed.is_meta
    assert delta == 0  # the state of the model keeps what was known


DEVICE_ROWS = torch.zeros(3, 3, device=DEVICE)
HOST_ROWS = torch.zeros(3, 3)

WAITING: dict[str, Callable[[], object]] = {
    "a new tensor of host data": lambda: torch.tensor([1, 2], device=DEVICE),
    "an upload": lambda: HOST_ROWS.to(DEVICE),
    "a list as index": lambda: DEVICE_ROWS[:, [0, 2]],
    "a sum of both": lambda: DEVICE_ROWS + HOST_ROWS,
    "a download that is used at once": lambda: DEVICE_ROWS.to("cpu", non_blocking=True),
    "a number": lambda: int(DEVICE_ROWS.sum()),
    "a mask as index": lambda: DEVICE_ROWS[DEVICE_ROWS > 0],
}


@pytest.mark.parametrize("call", WAITING.values(), ids=WAITING)
def test_the_stand_in_for_a_gpu_refuses_what_a_gpu_waits_for(
    call: Callable[[], object],
) -> None:
    # PyTorch itself refuses to read values of a tensor without data.
    with (
        forbid_waiting(),
        pytest.raises((WaitsForDevice, RuntimeError, NotImplementedError)),
    ):
        call()
