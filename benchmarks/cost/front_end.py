"""`python -m benchmarks.cost front_end`: processor time that the plugin adds to an API server.

The API server fetches, decodes, processes and hashes images, and writes the prompt. Its process
alone is measured. Stock vLLM and the plugin are two servers, which take turns. Models have their
true image processor, and towers and language models of a layer or few.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from PIL import Image

from benchmarks.common.requests import build_content, draw_picture, encode_picture
from benchmarks.common.shapes import write_shape
from benchmarks.cost import clips, turns
from benchmarks.cost.turns import Arm, Table, Turns, as_fields, build_model
from benchmarks.server import Server, serve
from vllm_autoprune.serving.plugin import DISABLE

_SIDE = 768
_FLAGS = (
    "--served-model-name served --load-format dummy --enforce-eager --block-size 32 "
    "--max-model-len 65536 --max-num-batched-tokens 4096 --mm-processor-cache-gb 1 "
    "--limit-mm-per-prompt.image 20"
)
# Twenty unpruned images of LLaVA do not fit into its context.
_LONGER = '--hf-overrides={"text_config": {"max_position_embeddings": 65536}}'
_WIDTH = 128
"""Width of LLaVA's language models."""
_PRUNED = (
    "--autoprune-state cen_divprune --autoprune-budget 1/8 --autoprune-requests states"
)
_STATES: Mapping[str, Mapping[str, object]] = {
    "cen_divprune": {},
    "cen_cdpruner": {"state": "cen_cdpruner"},
}
"""Arms with the plugin: a state that does not read the question, and one that does."""


def _write_llava(name: str, folder: Path) -> Path:
    """Write a folder with a tower and a language model of one layer."""
    return write_shape(name, folder, 1, tower_layers=2, width=_WIDTH)


_LEAST_SPEED = 0.97
"""Promised minimum of the ratio of requests/s, plugin over stock."""
_VIDEO_BUDGET = "1/4"
_QWEN3 = "scaled-qwen3-vl"
_MODELS: Mapping[str, Callable[[Path], Path]] = {
    "llava-1.5-7b": partial(_write_llava, "llava-1.5-7b"),
    "llava-next-7b": partial(_write_llava, "llava-next-7b"),
    _QWEN3: build_model,
}
"""Functions that write the folder of a model."""

Draw = Callable[[int], Sequence[Mapping[str, object]]]
"""Draws the content of a message from a seed."""


@dataclass(frozen=True)
class Case:
    """Requests of one kind, ``users`` at once."""

    name: str
    users: int
    draw: Draw
    arms: Mapping[str, Mapping[str, object]]
    """Settings of the plugin by arm."""


def draw_new(images: int, seed: int) -> Sequence[Mapping[str, object]]:
    """A question about images that no request had before."""
    urls = [
        _mark_picture(images * seed + number, number % _count_bases())
        for number in range(images)
    ]
    return build_content("what is the colour", urls)


def _draw_seen(images: int, seed: int) -> Sequence[Mapping[str, object]]:
    """A new question about the same images."""
    urls = [_mark_picture(number, number % _count_bases()) for number in range(images)]
    return build_content(f"what is the colour of {seed}", urls)


def _count_bases() -> int:
    return len(_draw_bases())


@cache
def _draw_bases() -> Sequence[Image.Image]:
    """A few photographs; drawing one takes longer than rendering a request."""
    return [draw_picture(seed, _SIDE, _SIDE) for seed in range(8)]


@cache
def _mark_picture(number: int, base: int) -> str:
    """JPEG of a photograph, as a data URL, with two blocks whose colours no other number has."""
    image = _draw_bases()[base].copy()
    shades = [number // 8**place % 8 * 32 for place in range(6)]
    for block in (0, 1):
        red, green, blue = shades[3 * block : 3 * block + 3]
        image.paste((red, green, blue), (16 * block, 0, 16 * block + 16, 16))
    return encode_picture(image, "jpeg")


def _measure_api_server(server: Server) -> float:
    """User and system time so far of the process that answers requests, in seconds."""
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


def _list_cases() -> list[Case]:
    """Requests about images, which every model takes."""
    return [
        Case("1 new image", 8, partial(draw_new, 1), _STATES),
        Case("20 new images", 2, partial(draw_new, 20), _STATES),
        Case("1 seen image", 8, partial(_draw_seen, 1), _STATES),
        Case("20 seen images", 2, partial(_draw_seen, 20), _STATES),
    ]


def _list_more_cases() -> list[Case]:
    """Requests that only models of Qwen's kind take, and the settings that concern them."""
    cells = {"cells": {"cells": "flat"}}
    videos = {"video budget 1/4": {"video_budget": _VIDEO_BUDGET}}
    return [
        Case("1 new image, blank cells dropped", 8, partial(draw_new, 1), cells),
        Case("1 new clip of 32 frames", 4, clips.draw_clip, videos),
    ]


OPTIONS = turns.OPTIONS | {
    "--models": {
        "nargs": "+",
        "choices": [*_MODELS],
        "default": [*_MODELS],
        "help": "whose processors work",
    },
    "--out": {
        "type": Path,
        "default": Path("out/front-end"),
        "help": "folder of files",
    },
}


def run(options: argparse.Namespace) -> int:
    """Measure, and print rows of ``docs/data``."""
    table = Table()
    for model in options.models:
        folder = _MODELS[model](options.out / model)
        cases = _list_cases()
        if model == _QWEN3:
            cases += _list_more_cases()
        with ExitStack() as stack:
            launch = partial(_launch, stack, folder)
            stock = launch((), {DISABLE: "1"}, options.out / f"{model}-stock.log")
            pruned = launch(_PRUNED.split(), {}, options.out / f"{model}-plugin.log")
            for case in cases:
                _measure(table, model, case, stock, pruned, options.rounds)
    return 0


def _launch(
    stack: ExitStack,
    folder: Path,
    flags: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
) -> Server:
    """A server that runs until the stack is closed."""
    return stack.enter_context(
        serve(
            folder,
            *_FLAGS.split(),
            _LONGER,
            *flags,
            env=environment,
            log=log,
        )
    )


def _measure(
    table: Table,
    model: str,
    case: Case,
    stock: Server,
    pruned: Server,
    rounds: int,
) -> None:
    """Add the rows of a case."""
    arms: dict[str, Arm] = {"stock": (stock, {})}
    for name, entry in case.arms.items():
        arms[name] = (pruned, as_fields(entry) if entry else {})
    setting = f"{model}, {case.name}, {case.users} at once"
    taken = Turns(setting, _measure_api_server)
    taken.take(arms, case.users, rounds, case.draw)
    taken.write(table, {("stock", name): _LEAST_SPEED for name in case.arms})
